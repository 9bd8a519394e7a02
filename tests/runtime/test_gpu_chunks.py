"""Models in chunks on a GPU: gathers, reductions, copies and steps wait for each other."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import moetune
from moetune.runtime.sharded.optimizer import ChunkedOptimizer
from tests.cuda_kit import FakeCuda
from tests.runtime.gpu_runs import GPU, Model, experts_say, on_every_rank, train_sharded


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_in_chunks_waits_for_every_transfer(dtype: torch.dtype, *, offload: bool) -> None:
    def program(_: FakeCuda) -> None:
        train_sharded(dtype=dtype, offload=offload)

    on_every_rank(program, says=experts_say)
    with FakeCuda() as alone:
        program(alone)


def test_the_streams_of_chunks_are_those_of_their_device() -> None:
    with FakeCuda() as cuda:
        assert torch.cuda.current_device() != GPU.index
        train_sharded(dtype=torch.float32, offload=True)
        devices = {one.lane.device for one in cuda.operations if "stream" in one.lane.name}
        assert devices == {GPU}


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": False}, {"capturable": True}])
@pytest.mark.parametrize("restarts", [False, True])
def test_the_number_of_steps_is_where_torch_reads_it(
    options: dict[str, bool], *, restarts: bool
) -> None:
    with FakeCuda() as cuda:
        model = Model(is_reversed=True).to(GPU)
        adamw = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type] # of any option
        _, optimizer = moetune.shard(model, adamw, chunk_bytes=4200, cache_bytes=30000)
        assert isinstance(optimizer, ChunkedOptimizer)
        if restarts:
            moetune.ShardedStates(model, optimizer).state_dict()
        for _ in range(2):
            model(torch.randn(24, 16, device=GPU)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        cuda.syncs.clear()
        optimizer.step()
        steps = {state["step"].device for state in optimizer.state.values()}
        # As torch's own: beside the values only where a kernel reads it.
        is_beside = not options or "capturable" in options
        assert steps == {GPU if is_beside else torch.device("cpu")}
        assert "_local_scalar_dense" not in cuda.syncs


def _dense_model(dtype: torch.dtype, *, offload: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model in chunks; for a layer of experts the host would wait in every pass."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).to(GPU, dtype)
    return moetune.shard(
        model, torch.optim.AdamW(model.parameters()), chunk_bytes=1200, cache_bytes=2400,
        offload=offload,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_shards_are_stepped_behind_the_gathers_of_an_evaluation(
    dtype: torch.dtype, *, offload: bool
) -> None:
    with FakeCuda():
        model, optimizer = _dense_model(dtype, offload=offload)
        x = torch.randn(24, 16, device=GPU, dtype=dtype)
        for _ in range(3):
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_states_are_loaded_behind_the_gathers_that_still_read_the_old_ones(
    dtype: torch.dtype, *, offload: bool
) -> None:
    with FakeCuda():
        model, optimizer = _dense_model(dtype, offload=offload)
        x = torch.randn(24, 16, device=GPU, dtype=dtype)
        model(x).sum().backward()
        optimizer.step()
        state = moetune.full_state_dict(model)
        with torch.no_grad():
            wanted = model(x)
            moetune.load_full_state_dict(model, state)
            found = model(x)
            parts = moetune.ShardedStates(model, optimizer)
            loaded = parts.state_dict()
            for name, value in loaded.items():
                if name.startswith("model."):
                    value.as_subclass(torch.Tensor).mul_(1)  # in place, as a checkpoint is loaded
            with torch.enable_grad():
                model(x).sum().backward()  # whose gradients are on the way
            parts.load_state_dict(loaded)
            again = model(x)
        assert torch.equal(found.cpu(), wanted.cpu())
        assert torch.equal(again.cpu(), wanted.cpu())


def _run(program: Callable[[FakeCuda], None], num_ranks: int) -> None:
    """Run a program on every rank, or without torch.distributed."""
    if num_ranks > 1:
        on_every_rank(program, num_ranks=num_ranks)
        return
    with FakeCuda() as cuda:
        program(cuda)


class Tied(nn.Module):
    """Uses one layer twice, whose values its first gradients overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.order: tuple[int, ...] = (0, 1, 2, 0, 3, 1)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = torch.relu(self.layers[number](x))
            if self.fails and number == 2:
                x.register_hook(self._fail)
        return x

    def _fail(self, _: torch.Tensor) -> None:
        raise StepError


class StepError(Exception):
    """As an out-of-memory error in the middle of a backward pass."""


def _tied(**options: Any) -> tuple[Tied, torch.optim.Optimizer]:
    model = Tied().to(GPU)
    adamw = torch.optim.AdamW(model.parameters())
    return model, moetune.shard(model, adamw, chunk_bytes=1200, **options)[1]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_unusual_steps_wait_as_well(num_ranks: int, *, offload: bool) -> None:
    def program(_: FakeCuda) -> None:
        model, optimizer = _tied(cache_bytes=2400, offload=offload)
        x = torch.randn(24, 16, device=GPU)
        for number in range(4):
            for _pass in range(2):  # gradients add up
                model(x).sum().backward()
            model.fails = number == 1
            if model.fails:
                with pytest.raises(StepError):
                    model(x).sum().backward()
            model.fails = False
            if number == 2:
                optimizer.zero_grad()
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    _run(program, num_ranks)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_backward_pass_that_fails_waits_for_its_reductions(
    num_ranks: int, *, offload: bool
) -> None:
    """Their chunks are freed, though the cache has space for more beside them."""

    def program(_: FakeCuda) -> None:
        model, optimizer = _tied(cache_bytes=6000, offload=offload)
        for fails in (False, True, False):
            model.fails = fails
            with pytest.raises(StepError) if fails else contextlib.nullcontext():
                model(torch.randn(24, 16, device=GPU)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    _run(program, num_ranks)


def test_a_layer_left_out_is_reduced_behind_the_gather_that_expected_it() -> None:
    def program(_: FakeCuda) -> None:
        model, optimizer = _tied(cache_bytes=6000)
        for order in (model.order, model.order, model.order, (0, 1, 2)):
            model.order = order
            model(torch.randn(24, 16, device=GPU)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    _run(program, 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_transfers_of_chunks_have_streams_of_their_own(num_ranks: int) -> None:
    def program(cuda: FakeCuda) -> None:
        model, optimizer = _dense_model(torch.float32, offload=True)
        model(torch.randn(24, 16, device=GPU)).sum().backward()
        optimizer.step()
        copies = [one.lane for one in cuda.operations if one.label == "copy_"]
        loads_and_stores = {lane for lane in copies if lane.name.startswith("cuda:1's stream")}
        assert len(loads_and_stores) == 2

    _run(program, num_ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_that_need_no_wider_dtype_are_reduce_scattered(dtype: torch.dtype) -> None:
    def program(cuda: FakeCuda) -> None:
        model, optimizer = _dense_model(dtype, offload=False)
        before = len(cuda.operations)
        model(torch.randn(24, 16, device=GPU, dtype=dtype)).sum().backward()
        optimizer.step()
        kinds = {one.label.partition(" of ")[0] for one in cuda.operations[before:]}
        own = "reduce_scatter" if dtype == torch.float32 else "all_to_all"
        assert kinds & {"reduce_scatter", "all_to_all"} == {own}

    on_every_rank(program)


def test_a_chunks_step_on_the_host_waits_for_its_own_gradients_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last chunk's gradients are stepped while the first one's are still travelling."""
    walked: list[int] = []
    known: list[float] = []
    step = torch.optim.AdamW.step

    with FakeCuda() as cuda:
        model, optimizer = _dense_model(torch.float32, offload=True)
        assert isinstance(optimizer, ChunkedOptimizer)

        def spied(self: torch.optim.AdamW) -> None:
            walked.append(sum(len(group["params"]) for group in self.param_groups))
            known.append(cuda.host.seconds)
            step(self)

        monkeypatch.setattr(torch.optim.AdamW, "step", spied)
        for _ in range(2):
            walked.clear()
            known.clear()
            model(torch.randn(24, 16, device=GPU)).sum().backward()
            last = max(one.end_seconds for one in cuda.operations if one.label == "copy_")
            optimizer.step()
            optimizer.zero_grad()
            assert len(walked) > 1
            assert sum(walked) == len(optimizer.shards)
            assert known[0] < last
