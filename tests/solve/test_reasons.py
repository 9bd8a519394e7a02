"""Reasons that a plan gives, on steps whose every second is set by hand."""

import re

import pytest

from moetune.domain.costs import Estimate, Interference
from moetune.solve.layer.times import PhaseTime, StepTime
from moetune.solve.layer.words import explain_choice


def step(*, degree: int, seconds: float, chunk_seconds: float) -> StepTime:
    """Return a step of two equal phases, whose chunk has two transfers and a computation."""
    part = Estimate(seconds=chunk_seconds, trust="measured")
    phase = PhaseTime(degree=degree, seconds=seconds, transfer=part, compute=part)
    return StepTime(forward=phase, backward=phase, overhead=Estimate(seconds=0.0, trust="measured"))


IN_ONE = step(degree=1, seconds=3.0, chunk_seconds=1.0)


@pytest.mark.parametrize(
    ("seconds", "chunk_seconds", "times"),
    [
        # 2 chunks of 2 transfers and a computation, each way.
        (2.0, 0.4, ("800 ms", "1.20 s")),
        (2.4, 0.4, ("1.20 s",)),
        (2.6, 0.4, ("400 ms", "1.20 s")),
        (2.0, 0.6, ("3.20 s", "1.20 s")),
        (2.0, 0.5, ("2.00 s",)),
    ],
)
def test_chunks_are_chosen_for_what_they_hide_and_what_smaller_ones_save(
    seconds: float, chunk_seconds: float, times: tuple[str, ...]
) -> None:
    why = explain_choice(
        step=step(degree=2, seconds=seconds, chunk_seconds=chunk_seconds),
        sequential=IN_ONE,
        runner_up=None,
        interference=Interference(),
    )
    first, _, rest = why.partition(". ")
    assert re.findall(r"[\d.]+ m?s", first) == ["6.00 s", *times]
    assert rest
