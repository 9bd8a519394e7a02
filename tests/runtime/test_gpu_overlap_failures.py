"""A batch that fails on a fake GPU ends the other, and the next step finds nothing under way."""

import contextlib

import pytest
import torch
from torch import nn

import moetune
from moetune.domain.constraints import Strategy
from moetune.domain.layer import Phase
from moetune.runtime.moe.turns import current_batch
from moetune.runtime.trace import NoRecorder
from tests.cuda_kit import FakeCuda
from tests.runtime.gpu_runs import GPU, NCCL, on_every_rank
from tests.runtime.gpu_turns import in_turns, layers_of, model_of, two_batches


class _Faulty(NoRecorder):
    """Lets the experts of one batch fail.

    Attributes:
        later: batches whose experts computed after that.
    """

    def __init__(self, phase: Phase, batch: int) -> None:
        self._place, self._has_failed = (phase, batch), False
        self.later: list[int] = []

    def compute(self, *place: object) -> contextlib.AbstractContextManager[None]:
        if self._has_failed:
            self.later.append(current_batch())
        if (place[0], current_batch()) == self._place:
            self._has_failed = True
            raise ValueError(f"batch {current_batch()}")
        return contextlib.nullcontext()


def _fail_and_go_on(model: nn.Module, phase: Phase, batch: int) -> None:
    overlap = in_turns(model)
    for is_faulty in (False, True, False, True, False):
        recorder = _Faulty(phase, batch) if is_faulty else NoRecorder()
        for layer in layers_of(model):
            layer.recorder = recorder
        fails = pytest.raises(ValueError, match=f"batch {batch}")
        with fails if is_faulty else contextlib.nullcontext():
            overlap(two_batches())
        if isinstance(recorder, _Faulty):
            assert recorder.later == []
        model.zero_grad()


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["none", "S1"])
def test_a_batch_that_fails_ends_the_other_and_leaves_nothing_under_way(
    strategy: Strategy, phase: Phase, batch: int
) -> None:
    def program(_: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        _fail_and_go_on(moetune.replicate(model_of(strategy, (2, 2))), phase, batch)

    on_every_rank(program, backends=NCCL)
