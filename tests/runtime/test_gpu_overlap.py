"""Two batches in turns on a fake GPU: kernels in one order, and exchanges beside the other."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import moetune
from moetune.comm.transfer import Transfer
from moetune.domain.constraints import Strategy
from moetune.domain.layer import Phase
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.turns import BatchTurn, current_batch
from moetune.runtime.parallel.thread_state import ThreadState
from moetune.runtime.trace import NoRecorder
from tests.cuda_kit import CudaFaultError, FakeCuda
from tests.ranks import run_ranks
from tests.runtime import accelerator_worker
from tests.runtime.gpu_runs import GPU, NCCL, STRATEGIES, decision, on_every_rank

WIDTH = 8
Losses = tuple[torch.Tensor, torch.Tensor]


def _model(strategy: Strategy = "none", degrees: tuple[int, int] = (1, 1)) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(
        *(
            module
            for _ in range(2)
            for module in (nn.Linear(WIDTH, WIDTH), MoELayer(WIDTH, 16, 4, 2, dtype=torch.float64))
        ),
        nn.Linear(WIDTH, WIDTH),
    ).to(GPU, torch.float64)
    for layer in _layers(model):
        layer.pin(decision(strategy, degrees))
    return model


def _layers(model: nn.Module) -> list[MoELayer]:
    return [each for each in model.modules() if isinstance(each, MoELayer)]


def _batches() -> list[torch.Tensor]:
    return [torch.randn(rows, WIDTH, dtype=torch.float64, device=GPU) for rows in (12, 9)]


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x)
    return y.square().mean() + 0.1 * sum(layer.aux_loss for layer in _layers(model))


def _overlap(model: nn.Module) -> moetune.BatchOverlap[torch.Tensor]:
    return moetune.BatchOverlap[torch.Tensor](model, partial(_loss, model))


def _one_after_the_other(model: nn.Module) -> Callable[[Sequence[torch.Tensor]], Losses]:
    def step(batches: Sequence[torch.Tensor]) -> Losses:
        losses = []
        for number, x in enumerate(batches):
            is_last = number == len(batches) - 1
            with contextlib.nullcontext() if is_last else moetune.no_sync(model):
                losses.append(_loss(model, x))
                losses[-1].backward()
        return losses[0].detach(), losses[1].detach()

    return step


def _train(run: Callable[[Sequence[torch.Tensor]], Losses], model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        run(_batches())
        optimizer.step()


def test_torch_runs_both_backward_passes_of_an_accelerator_in_the_batches_own_threads() -> None:
    assert run_ranks(accelerator_worker.backward_passes_take_turns, 1) == [""]


@pytest.mark.parametrize("degrees", [(1, 1), (2, 3)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_read_waits_for_its_write_and_ranks_issue_alike(
    strategy: Strategy, degrees: tuple[int, int]
) -> None:
    def program(_: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        model = moetune.replicate(_model(strategy, degrees))
        _train(_overlap(model), model, 3)

    on_every_rank(program, backends=NCCL)


def test_three_ranks_and_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(_: FakeCuda, *, dispatcher: Any, experts: int) -> None:
        torch.cuda.set_device(GPU)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoELayer(WIDTH, 16, experts, 2)).to(GPU)
        _layers(model)[0].pin(replace(decision("S4", (2, 2)), dispatcher=dispatcher))
        _train(_overlap(model.double()), model, 2)

    on_every_rank(partial(program, dispatcher="flat", experts=3), num_ranks=3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    on_every_rank(partial(program, dispatcher="hierarchical", experts=4), num_ranks=4)


def test_a_caller_has_a_stream_of_its_own_and_another_current_device() -> None:
    found: list[tuple[int, object]] = []

    def program(_: FakeCuda) -> None:
        model = _model("S1", (2, 2))
        stream = torch.cuda.Stream(GPU)
        stream.wait_stream(torch.cuda.current_stream(GPU))
        before = torch.cuda.current_stream(GPU)
        with torch.cuda.stream(stream), torch.cuda.device(0):
            model[0].register_forward_hook(lambda *_: found.append(_current()))
            _train(_overlap(model), model, 2)
            assert found[-4:] == [(0, stream)] * 4
        assert _current() == (0, before)
        before.wait_stream(stream)

    on_every_rank(program)


def _current() -> tuple[int, object]:
    return torch.cuda.current_device(), torch.cuda.current_stream(GPU)


def test_a_follower_on_another_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadState, "on_streams", lambda _: contextlib.nullcontext())

    def program(_: FakeCuda) -> None:
        model = _model()
        stream = torch.cuda.Stream(GPU)
        stream.wait_stream(torch.cuda.current_stream(GPU))
        with torch.cuda.stream(stream):
            _train(_overlap(model), model, 2)

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
        model = _model()
        _overlap(model)(_batches())

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
        for way in (_overlap, _one_after_the_other):
            model = moetune.replicate(_model("S2", degrees))
            _train(way(model), model, 1)
            torch.manual_seed(5)
            model.zero_grad()
            losses = way(model)(_batches())
            found.append([*losses, *(each.grad for each in model.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)

    on_every_rank(program, backends=NCCL)


def test_the_host_stops_once_a_layer_and_batch_for_the_sizes_of_exchanges_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program(cuda: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        model = moetune.replicate(_model("S1", (2, 2)))
        overlap = _overlap(model)
        overlap(_batches())  # ranks meet, and compare the order of gradients
        batches = _batches()
        cuda.syncs.clear()
        with _no_synchronization(cuda, monkeypatch):
            overlap(batches)
        assert cuda.syncs == ["tolist"] * 4

    on_every_rank(program, backends=NCCL)


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
        for way in (_overlap, _one_after_the_other):
            model = moetune.replicate(_model())
            run = way(model)
            run(_batches())
            batches, lane = _batches(), cuda.current_stream(GPU).lane
            begin = lane.seconds
            run(batches)
            seconds.append(lane.seconds - begin)

    on_every_rank(program, backends=NCCL, seconds=20e-3)
    for in_turns, alone in zip(seconds[::2], seconds[1::2], strict=True):
        assert in_turns < 0.8 * alone


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
        model, log = _model()[:2], _Log()

        def dense(_: nn.Module, __: object, y: torch.Tensor) -> None:
            log.add("forward", "dense")
            y.register_hook(lambda _: log.add("backward", "dense"))

        next(model.children()).register_forward_hook(dense)
        _layers(model)[0].recorder = log
        _overlap(model)(_batches())
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


class _Faulty(NoRecorder):
    """Lets the experts of one batch fail."""

    def __init__(self, phase: Phase, batch: int) -> None:
        self._place = phase, batch

    def compute(self, *place: object) -> contextlib.AbstractContextManager[None]:
        if (place[0], current_batch()) == self._place:
            raise ValueError(f"batch {current_batch()}")
        return contextlib.nullcontext()


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["none", "S1"])
def test_a_batch_that_fails_ends_the_other_and_leaves_nothing_under_way(
    strategy: Strategy, phase: Phase, batch: int
) -> None:
    def program(_: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        model = moetune.replicate(_model(strategy, (2, 2)))
        overlap = _overlap(model)
        for is_faulty in (False, True, False, True, False):
            for layer in _layers(model):
                layer.recorder = _Faulty(phase, batch) if is_faulty else NoRecorder()
            fails = pytest.raises(ValueError, match=f"batch {batch}")
            with fails if is_faulty else contextlib.nullcontext():
                overlap(_batches())
            model.zero_grad()

    on_every_rank(program, backends=NCCL)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_so_do_exchanges_in_two_steps_of_a_caller_with_a_stream_of_its_own(
    phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def program(_: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        model = _model()
        stream = torch.cuda.Stream(GPU)
        stream.wait_stream(torch.cuda.current_stream(GPU))
        for layer in _layers(model):
            layer.pin(replace(decision("none", (2, 2)), dispatcher="hierarchical"))
        overlap = _overlap(model)
        with torch.cuda.stream(stream):
            for batch in (None, 0, None, 1, None):
                for layer in _layers(model):
                    layer.recorder = NoRecorder() if batch is None else _Faulty(phase, batch)
                fails = contextlib.nullcontext() if batch is None else pytest.raises(ValueError)  # noqa: PT011 - the test above has its text
                with fails:
                    overlap(_batches())
                model.zero_grad()
        torch.cuda.current_stream(GPU).wait_stream(stream)

    on_every_rank(program, num_ranks=4)


def test_both_batches_have_the_callers_autocast_which_stays_as_it_was() -> None:
    found: list[tuple[bool, torch.dtype]] = []
    backward: list[bool] = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found.append(_autocast())
        made = _loss(model, x)
        made.register_hook(lambda _: backward.append(_autocast()[0]))
        return made

    with FakeCuda(), torch.autocast("cuda", torch.float16):
        model = _model()
        for layer in _layers(model):
            layer.register_forward_pre_hook(lambda *_: found.append(_autocast()))
        moetune.BatchOverlap[torch.Tensor](model, partial(loss, model))(_batches())
        assert found == [(True, torch.float16)] * 6
        assert backward == [False] * 2
        assert _autocast() == (True, torch.float16)


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
