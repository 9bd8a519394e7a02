"""Reasons that a plan gives, on steps whose every second is set by hand."""

import re

import pytest

from moetune.domain.constraints import Strategy
from moetune.domain.costs import Estimate
from moetune.domain.interference import Interference
from moetune.fit.interference import speeds_of
from moetune.report.reasons import explain_choice, explain_loss
from moetune.solve.layer.times import PhaseTime, StepTime


def step(*, degree: int, seconds: float, chunk_seconds: float) -> StepTime:
    """Return a step of two equal phases, whose chunk has two transfers and a computation."""
    part = Estimate(seconds=chunk_seconds, trust="measured")
    phase = PhaseTime(degree=degree, seconds=seconds, transfer=part, compute=part, num_transfers=2)
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
def test_chunks_are_chosen_for_what_they_hide_and_what_smaller_chunks_save(
    seconds: float, chunk_seconds: float, times: tuple[str, ...]
) -> None:
    why = explain_choice(
        step=step(degree=2, seconds=seconds, chunk_seconds=chunk_seconds),
        sequential=IN_ONE,
        runner_up=None,
        speeds=speeds_of(Interference()),
    )
    first, _, rest = why.partition(". ")
    assert re.findall(r"[\d.]+ m?s", first) == ["6.00 s", *times]
    assert rest


BEST = step(degree=2, seconds=2.0, chunk_seconds=0.4)
"""Chunks that add up to 2 · 2 · 3 · 0.4 s = 4.8 s, of which 0.8 s are hidden, in 4 s."""


@pytest.mark.parametrize(
    ("seconds", "chunk_seconds", "figures"),
    [
        # Work of 12 chunk_seconds, of which what is beyond 2 seconds is hidden.
        (2.0, 0.4, []),
        (1.9, 0.4, ["-5.0 %"]),
        (2.2, 0.4, ["+10.0 %", "400 ms"]),  # as much work, 0.4 s less hidden
        (2.2, 0.3, ["+10.0 %", "1.20 s", "1.60 s"]),  # 1.2 s less work, 1.6 s less hidden
        (2.2, 0.5, ["+10.0 %", "1.20 s", "800 ms"]),  # 1.2 s more work, 0.8 s more hidden
        (3.0, 0.5, ["+50.0 %", "1.20 s", "800 ms"]),  # 1.2 s more work, 0.8 s less hidden
        (2.6, 0.5, ["+30.0 %", "1.20 s"]),  # 1.2 s more work, as much hidden
    ],
)
def test_a_lost_choice_names_its_work_and_overlap_against_the_best(
    seconds: float, chunk_seconds: float, figures: list[str]
) -> None:
    other = step(degree=2, seconds=seconds, chunk_seconds=chunk_seconds)
    durations_and_shares = r"[+-]?\d[\d.,]*(?: [mµn]?s\b| ?%)"
    assert re.findall(durations_and_shares, explain_loss(rival=other, best=BEST)) == figures


@pytest.mark.parametrize(
    ("transfer", "compute", "copies", "strategy", "binding"),
    [
        # Four transfers and two products of two chunks each way; copies count where they are made.
        (0.4, 0.1, 0.0, "none", "communication"),
        (0.1, 0.4, 0.0, "none", "computation"),
        (0.1, 0.2, 9.0, "none", "computation"),
        (0.4, 0.1, 0.1, "S1", "communication"),
        (0.1, 0.4, 0.1, "S1", "computation"),
        (0.1, 0.4, 0.5, "S1", "copies"),
        (0.1, 0.2, 0.2, "S1", "computation"),
        (0.4, 0.1, 0.9, "S1", "copies"),
    ],
)
def test_what_binds_is_what_the_step_waits_for_or_with_reuse_the_busiest(
    transfer: float, compute: float, copies: float, strategy: Strategy, binding: str
) -> None:
    parts = [Estimate(seconds=seconds, trust="measured") for seconds in (transfer, compute, copies)]
    phase = PhaseTime(
        degree=2, seconds=1.0, transfer=parts[0], compute=parts[1], copies=parts[2],
        num_transfers=2,
    )  # fmt: skip
    time = StepTime(
        forward=phase, backward=phase, overhead=Estimate(seconds=0.0, trust="measured"),
        strategy=strategy,
    )  # fmt: skip
    assert time.binding == binding
