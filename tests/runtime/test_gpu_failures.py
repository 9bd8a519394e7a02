"""A step that fails in the middle leaves no copy or exchange behind that the next one could hit."""

import contextlib

import pytest

from benchmarks.staged_link import HostStagedLink
from moetune.comm.group import Communicator
from moetune.domain.constraints import Strategy
from moetune.domain.layer import Phase
from moetune.runtime.trace import NoRecorder
from tests.cuda_kit import FakeCuda
from tests.runtime.gpu_runs import GPU, STRATEGIES, decision, moe_layer, on_every_rank, step


class StepError(Exception):
    """As an out-of-memory error in the middle of a phase."""


class Faulty(NoRecorder):
    """Lets the experts of one chunk fail."""

    def __init__(self, phase: Phase, chunk: int) -> None:
        self.place = phase, chunk

    def compute(self, *place: object) -> contextlib.AbstractContextManager[None]:
        phase, _, chunk = place
        if (phase, chunk) == self.place:
            raise StepError
        return contextlib.nullcontext()


def _fail_and_go_on(
    strategy: Strategy, phase: Phase, chunk: int, communicator: Communicator | None = None
) -> None:
    layer = moe_layer(communicator=communicator)
    layer.pin(decision(strategy, (4, 4)))
    for is_faulty in (False, True, False, True, False):
        layer.recorder = Faulty(phase, chunk) if is_faulty else NoRecorder()
        failed = False
        try:
            step(layer)
        except StepError:
            failed = True
        assert failed is is_faulty


@pytest.mark.parametrize("chunk", [0, 1, 3])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_of_a_failed_step_is_free_only_behind_its_copies(
    strategy: Strategy, phase: Phase, chunk: int
) -> None:
    def program(_: FakeCuda) -> None:
        _fail_and_go_on(strategy, phase, chunk)

    on_every_rank(program)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_so_it_is_over_a_link_staged_by_the_host(strategy: Strategy, phase: Phase) -> None:
    with FakeCuda():
        _fail_and_go_on(strategy, phase, 1, HostStagedLink(GPU))
