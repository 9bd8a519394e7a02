"""Steps that find no memory: a clear error, nothing leaks, and a smaller step works."""

import gc
import itertools
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.mpipemoe.live import HostMemory
from moetune.domain.constraints import Strategy
from moetune.domain.errors import AllocationError
from moetune.runtime.moe import offload, workspace
from moetune.runtime.moe.layer import MoELayer
from tests.ranks import run_ranks
from tests.runtime import faults
from tests.runtime.workers import results_of

SMALL, LARGE = 16, 64
FEWEST_ALLOCATIONS = 5
"""Of a step: rooms and results of both phases, and gradients."""
_HONEST = workspace.allocated


class Allocations:
    """The memory of steps' buffers, of which one allocation may fail, counted from 0.

    Attributes:
        num_asked: allocations so far.
        num_bytes: that are alive.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_asked = self.num_bytes = 0
        self.failing = -1
        for module in (workspace, offload):
            patch.setattr(module, "allocated", self._allocated)

    def _allocated(self, *args: Any, **options: Any) -> torch.Tensor:
        self.num_asked += 1
        if self.num_asked == self.failing + 1:
            raise torch.OutOfMemoryError("none is left")
        made = _HONEST(*args, **options)
        self.num_bytes += made.nbytes
        weakref.finalize(made.untyped_storage(), self._drop, made.nbytes)
        return made

    def _drop(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    def held(self, layer: MoELayer) -> int:
        """Return what stays between steps."""
        layer.zero_grad()
        layer.aux_loss = torch.zeros(())
        gc.collect()
        return self.num_bytes


def make(strategy: str) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(8, 16, 4, 2, pipeline=4, memory_reuse=strategy, dtype=torch.float64)


def gradients(layer: MoELayer, tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    results = results_of(layer, torch.randn(tokens, 8, generator=generator, dtype=torch.float64))
    layer.zero_grad()
    return results


@pytest.fixture
def young_heap() -> Iterator[None]:
    """Collect only what the test makes: with all of torch's objects a collection takes 0.2 s."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("young_heap")
@pytest.mark.parametrize("strategy", ["none", "S1"])
def test_a_step_that_fails_at_any_allocation_leaves_the_layer_as_it_was(strategy: str) -> None:
    wanted = gradients(make(strategy), SMALL)
    with pytest.MonkeyPatch.context() as patch:
        memory, healthy = Allocations(patch), make(strategy)
        gradients(healthy, LARGE)
        usual = memory.held(healthy)
    for failing in itertools.count():
        layer = make(strategy)
        with pytest.MonkeyPatch.context() as patch:
            memory = Allocations(patch)
            gradients(layer, SMALL)
            memory.num_asked, memory.failing = 0, failing
            try:
                gradients(layer, LARGE)
            except AllocationError as error:
                assert " memory for " in error.what  # noqa: PT017
                assert "more chunks" in error.hint  # noqa: PT017
            else:
                assert memory.num_asked == failing >= FEWEST_ALLOCATIONS
                break
            memory.failing = -1
            assert memory.held(layer) <= usual
            grads = gradients(layer, SMALL)
            torch.testing.assert_close(grads, wanted, rtol=1e-12, atol=1e-12)
            del grads
            gradients(layer, LARGE)
            assert memory.held(layer) == usual


_CHILD = """
import resource
from pathlib import Path
import torch
from moetune.domain.errors import AllocationError
from moetune.runtime.moe.layer import MoELayer

layer = MoELayer(64, 256, 4, pipeline=4, memory_reuse={!r})

def step(tokens):
    x = torch.randn(tokens, 64, requires_grad=True)
    layer(x).square().sum().backward()
    layer.zero_grad()

step(4096)
used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
limit = used + 2**25
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
x = torch.randn(2**16, 64, requires_grad=True)
try:
    layer(x)
except AllocationError as error:
    print(error)
del x
step(4096)
print("smaller step done")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits address space")
@pytest.mark.parametrize("strategy", ["S1"])
def test_a_process_at_its_limit_says_how_much_was_missing_and_goes_on(strategy: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD.format(strategy)],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert "memory for" in lines[0]
    assert "bytes" in lines[0]
    assert "fewer tokens" in lines[1]
    assert lines[-1] == "smaller step done"


@pytest.mark.parametrize(
    ("kind", "strategy", "phase"),
    [
        ("all_to_all", "none", "backward"),
        ("all_to_all", "S4", "forward"),
        ("tensor", "none", "backward"),
    ],
)
def test_no_rank_hangs_when_a_rank_has_no_memory(
    kind: faults.Kind, strategy: str, phase: str
) -> None:
    assert run_ranks(faults.shortage, 2, kind, strategy, phase) == ["", ""]


@pytest.mark.parametrize("strategy", ["S1", "S2", "S3"])
def test_host_memory_comes_back_when_the_graph_is_dropped(strategy: Strategy) -> None:
    layer = make(strategy)
    x = torch.randn(LARGE, 8, dtype=torch.float64)
    with HostMemory() as host:
        first = layer(x)
        of_a_step = host.num_bytes
        assert of_a_step > 0
        second = layer(x)
        assert host.num_bytes == 2 * of_a_step
        del first
        layer.aux_loss = torch.zeros(())
        gc.collect()
        assert host.num_bytes == of_a_step
        second.sum().backward()
        assert host.num_bytes == 0
