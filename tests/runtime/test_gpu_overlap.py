"""Two batches in turns on a fake GPU: kernels in one order, and exchanges beside the other."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import moetune
from moetune.comm.transfer import Transfer
from moetune.domain.constraints import Strategy
from moetune.runtime.delayed import WeightGradients
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.turns import BatchTurn, current_batch
from moetune.runtime.parallel.thread_state import ThreadState
from moetune.runtime.trace import NoRecorder
from tests.cuda_kit import CudaFaultError, FakeCuda
from tests.runtime.gpu_runs import GPU, NCCL, STRATEGIES, decision, on_every_rank
from tests.runtime.gpu_turns import (
    WIDTH,
    in_turns,
    layers_of,
    loss_of,
    model_of,
    one_after_the_other,
    train,
    two_batches,
)


@pytest.mark.parametrize("degrees", [(1, 1), (2, 3)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_read_waits_for_its_write_and_ranks_issue_alike(
    strategy: Strategy, degrees: tuple[int, int]
) -> None:
    def program(_: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        model = moetune.replicate(model_of(strategy, degrees))
        train(in_turns(model), model, 3)

    on_every_rank(program, backends=NCCL)


def test_three_ranks() -> None:
    def program(_: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoELayer(WIDTH, 16, 3, 2)).to(GPU)
        layers_of(model)[0].pin(decision("S4", (2, 2)))
        train(in_turns(model.double()), model, 2)

    on_every_rank(program, num_ranks=3)


def test_a_caller_has_a_stream_of_its_own_and_another_current_device() -> None:
    found: list[tuple[int, object]] = []

    def program(_: FakeCuda) -> None:
        model = model_of("S1", (2, 2))
        stream = torch.cuda.Stream(GPU)
        stream.wait_stream(torch.cuda.current_stream(GPU))
        before = torch.cuda.current_stream(GPU)
        with torch.cuda.stream(stream), torch.cuda.device(0):
            model[0].register_forward_hook(lambda *_: found.append(_current()))
            train(in_turns(model), model, 2)
            assert found[-4:] == [(0, stream)] * 4
        assert _current() == (0, before)
        before.wait_stream(stream)

    on_every_rank(program)


def _current() -> tuple[int, object]:
    return torch.cuda.current_device(), torch.cuda.current_stream(GPU)


def test_a_follower_on_another_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadState, "on_streams", lambda _: contextlib.nullcontext())

    def program(_: FakeCuda) -> None:
        model = model_of()
        stream = torch.cuda.Stream(GPU)
        stream.wait_stream(torch.cuda.current_stream(GPU))
        with torch.cuda.stream(stream):
            train(in_turns(model), model, 2)

    with pytest.raises(CudaFaultError, match="does not wait for it"):
        on_every_rank(program)


@pytest.mark.parametrize("which", [0, 1])
def test_a_wait_of_one_batch_that_is_left_out_is_found(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    during = BatchTurn.during

    def without_wait(turn: BatchTurn, transfer: Any) -> Any:
        return _NeverAwaited(turn) if turn.batch == which else during(turn, transfer)

    monkeypatch.setattr(BatchTurn, "during", without_wait)

    def program(_: FakeCuda) -> None:
        model = model_of()
        in_turns(model)(two_batches())

    with pytest.raises(CudaFaultError, match="does not wait for it"):
        on_every_rank(program)


class _NeverAwaited:
    def __init__(self, turn: BatchTurn) -> None:
        self._turn = turn

    def wait(self) -> None:
        with self._turn.given():
            pass

    def future(self) -> None:
        return None


@pytest.mark.parametrize("degrees", [(1, 1), (3, 2)])
def test_gradients_and_losses_are_those_of_one_batch_after_the_other(
    degrees: tuple[int, int],
) -> None:
    def program(_: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        found = []
        for way in (in_turns, one_after_the_other):
            model = moetune.replicate(model_of("S2", degrees))
            train(way(model), model, 1)
            torch.manual_seed(5)
            model.zero_grad()
            losses = way(model)(two_batches())
            found.append([*losses, *(each.grad for each in model.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)

    on_every_rank(program, backends=NCCL)


def test_the_host_stops_once_a_layer_and_batch_for_the_sizes_of_exchanges_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program(cuda: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        model = moetune.replicate(model_of("S1", (2, 2)))
        overlap = in_turns(model)
        overlap(two_batches())  # ranks meet, and compare the order of gradients
        batches = two_batches()
        cuda.syncs.clear()
        with _no_synchronization(cuda, monkeypatch):
            overlap(batches)
        assert cuda.syncs == ["tolist"] * 4

    on_every_rank(program, backends=NCCL)


def test_products_of_weights_may_wait_until_both_batches_have_ended() -> None:
    def program(_: FakeCuda) -> None:
        found = []
        for is_delayed in (True, False):
            model = model_of("none", (2, 2))
            for layer in layers_of(model):
                layer.weight_gradients = WeightGradients() if is_delayed else None
            torch.manual_seed(5)
            in_turns(model)(two_batches())
            for layer in layers_of(model):
                if layer.weight_gradients is not None:
                    layer.weight_gradients.take()()
            found.append([each.grad for each in model.parameters()])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)

    on_every_rank(program)


@contextlib.contextmanager
def _no_synchronization(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patch:
        for owner in (cuda.streams.stream_class, cuda.streams.event_class, torch.cuda):
            patch.setattr(owner, "synchronize", refuse)
        yield


def test_one_batch_computes_while_the_others_rows_travel() -> None:
    """As on a CPU, and in less simulated time than one after the other."""
    seconds: list[float] = []

    def program(cuda: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        for way in (in_turns, one_after_the_other):
            model = moetune.replicate(model_of())
            run = way(model)
            run(two_batches())
            batches, lane = two_batches(), cuda.current_stream(GPU).lane
            begin = lane.seconds
            run(batches)
            seconds.append(lane.seconds - begin)

    on_every_rank(program, backends=NCCL, seconds=20e-3)
    for turns, alone in zip(seconds[::2], seconds[1::2], strict=True):
        assert turns < 0.8 * alone


class _Log(NoRecorder):
    """What the batches issue, and where their streams wait, in order."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, str]] = []

    def add(self, phase: str, step: str) -> None:
        self.steps.append((phase, current_batch(), step))

    def compute(self, *place: object) -> contextlib.AbstractContextManager[None]:
        self.add(str(place[0]), str(place[1]))
        return contextlib.nullcontext()

    def transfer(self, *place: Any) -> Transfer:
        phase, step, _, transfer, _ = place
        self.add(phase, step)
        return _Logged(transfer, partial(self.add, phase, f"wait for {step}"))


class _Logged:
    def __init__(self, transfer: Transfer, say: Callable[[], None]) -> None:
        self._transfer, self._say = transfer, say

    def wait(self) -> None:
        self._say()
        self._transfer.wait()

    def future(self) -> torch.futures.Future[object] | None:
        return self._transfer.future()


def test_a_stream_waits_for_rows_behind_what_the_other_batch_has_issued_meanwhile() -> None:
    def program(_: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        model, log = model_of()[:2], _Log()

        def dense(_: nn.Module, __: object, y: torch.Tensor) -> None:
            log.add("forward", "dense")
            y.register_hook(lambda _: log.add("backward", "dense"))

        next(model.children()).register_forward_hook(dense)
        layers_of(model)[0].recorder = log
        in_turns(model)(two_batches())
        for phase in ("forward", "backward"):
            steps = [(batch, step) for its, batch, step in log.steps if its == phase]
            assert [one for one in steps if one[1] != "dense"] == [
                (0, "dispatch"), (1, "dispatch"),
                (0, "wait for dispatch"), (0, "experts"), (0, "combine"),
                (1, "wait for dispatch"), (1, "experts"), (1, "combine"),
                (0, "wait for combine"), (1, "wait for combine"),
            ]  # fmt: skip
            places = [at for at, (_, step) in enumerate(steps) if step == "dense"]
            assert places == ([0, 2] if phase == "forward" else [9, 11])

    on_every_rank(program, backends=NCCL)


def test_both_batches_have_the_callers_autocast_which_stays_as_it_was() -> None:
    found: list[tuple[bool, torch.dtype]] = []
    backward: list[bool] = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found.append(_autocast())
        made = loss_of(model, x)
        made.register_hook(lambda _: backward.append(_autocast()[0]))
        return made

    with FakeCuda(), torch.autocast("cuda", torch.float16):
        model = model_of()
        for layer in layers_of(model):
            layer.register_forward_pre_hook(lambda *_: found.append(_autocast()))
        moetune.BatchOverlap[torch.Tensor](model, partial(loss, model))(two_batches())
        assert found == [(True, torch.float16)] * 6
        assert backward == [False] * 2
        assert _autocast() == (True, torch.float16)


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
