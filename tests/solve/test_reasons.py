"""Reasons that a plan gives, on steps whose every second is set by hand."""

import re
from dataclasses import replace

import pytest

from moetune.domain.constraints import Strategy
from moetune.domain.costs import Estimate, Trust
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.profile import Provenance
from moetune.solve.layer.times import PhaseTime, StepTime
from moetune.solve.layer.words import (
    binding_resource,
    explain_choice,
    explain_loss,
    explain_memory,
    explain_pin,
    explain_strategy,
    explain_strategy_loss,
    trust_warnings,
)


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


def times_in(text: str) -> list[str]:
    """Return every duration and percentage in a text, with its sign."""
    return re.findall(r"[+-]?\d[\d.,]*(?: [mµn]?s\b| ?%)", text)


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
    assert times_in(explain_loss(other=other, best=BEST)) == figures


@pytest.mark.parametrize(
    ("needed_bytes", "seconds", "figures"),
    [
        (2**30, 2.0, []),
        (2**30, 1.9, ["-5.0 %"]),
        (2**30, 2.2, ["+10.0 %"]),
        (2**30 + 2**20, 2.0, ["1.00 GiB", "1.00 MiB"]),
    ],
)
def test_a_lost_strategy_is_too_large_to_the_byte_or_slower(
    needed_bytes: int, seconds: float, figures: list[str]
) -> None:
    lost = explain_strategy_loss(
        other=step(degree=2, seconds=seconds, chunk_seconds=0.4), peak_bytes=needed_bytes,
        limit_bytes=2**30, best=BEST,
    )  # fmt: skip
    found = re.findall(r"[+-]?\d[\d.]* ?(?:%|[mn]?s\b|[GM]iB)", lost)
    assert found == figures


def test_a_faster_strategy_than_a_pinned_one_lost_because_of_the_pin() -> None:
    other = step(degree=2, seconds=1.9, chunk_seconds=0.4)
    free, pinned = (
        explain_strategy_loss(
            other=other, peak_bytes=1, limit_bytes=1, best=BEST, is_pinned=is_pinned
        )
        for is_pinned in (False, True)
    )
    assert "pinned" in pinned
    assert "pinned" not in free
    assert times_in(free) == times_in(pinned) == ["-5.0 %"]


def test_a_lost_strategy_names_each_kind_of_work_that_it_has_more_of() -> None:
    other = step(degree=2, seconds=2.2, chunk_seconds=0.4)
    phase = other.forward
    copies = Estimate(seconds=0.05, trust="measured")
    other = replace(other, forward=replace(phase, num_transfers=3, copies=copies))
    lost = explain_strategy_loss(other=other, peak_bytes=1, limit_bytes=1, best=BEST)
    # A third transfer of 0.4 s in each of two chunks, and a copy.
    assert times_in(lost) == ["+10.0 %", "800 ms", "100 ms"]
    compute = phase.compute._replace(seconds=phase.compute.seconds * (1 + 1e-15))
    rounded = replace(other, forward=replace(other.forward, compute=compute))
    assert explain_strategy_loss(other=rounded, peak_bytes=1, limit_bytes=1, best=BEST) == lost


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
        degree=2, seconds=1.0, transfer=parts[0], compute=parts[1], copies=parts[2]
    )  # fmt: skip
    found = StepTime(
        forward=phase, backward=phase, overhead=Estimate(seconds=0.0, trust="measured"),
        strategy=strategy,
    )  # fmt: skip
    assert binding_resource(found) == binding


@pytest.mark.parametrize(
    ("runner_up", "interference", "figures"),
    [
        (3.3, Interference(), ["6.60 s", "6.00 s", "+10.0 %"]),
        (
            3.3,
            Interference(comm=CommSpeed(comp=0.5), comp=CompSpeed(comm=0.25)),
            ["6.60 s", "6.00 s", "+10.0 %", "50 %", "25 %"],
        ),
        (2.97, Interference(), ["5.94 s", "6.00 s", "1.0 %"]),
    ],
)
def test_one_chunk_is_chosen_against_the_next_best(
    runner_up: float, interference: Interference, figures: list[str]
) -> None:
    why = explain_choice(
        step=IN_ONE, sequential=IN_ONE,
        runner_up=step(degree=2, seconds=runner_up, chunk_seconds=0.4), interference=interference,
    )  # fmt: skip
    found = times_in(why)
    assert [one for one in found if one in figures] == figures
    alone = explain_choice(
        step=IN_ONE, sequential=IN_ONE, runner_up=None, interference=interference
    )
    assert not times_in(alone)


@pytest.mark.parametrize(
    ("provenance", "trust", "assumed", "count"),
    [
        ("measured", "measured", True, 0),
        ("measured", "modelled", True, 1),
        ("measured", "extrapolated", True, 1),
        ("published", "measured", False, 1),
        ("published", "measured", True, 2),
        ("modelled", "modelled", True, 2),
    ],
)
def test_each_doubt_is_one_warning(
    provenance: Provenance,
    trust: Trust,
    assumed: bool,  # noqa: FBT001 - a case
    count: int,
) -> None:
    found = list(
        trust_warnings(trust=trust, provenance=provenance, profile="lab", assumed_spread=assumed)
    )
    assert len(found) == count
    assert len(set(found)) == count


def test_what_memory_forbids_is_named_with_its_peak_and_what_is_taken_instead() -> None:
    text = explain_memory(step=BEST, wanted=IN_ONE, wanted_bytes=3 * 2**30, limit_bytes=2**30)
    assert re.findall(r"[\d.]+ GiB", text) == ["3.00 GiB", "1.00 GiB"]
    assert re.findall(r"(\d+) chunks? forward", text) == ["1", "2"]


@pytest.mark.parametrize(
    ("transfer", "compute", "copies", "strategy", "figures"),
    [
        # The first dispatch and the last combine of each phase, and all experts.
        (0.1, 0.4, 0.0, "none", ["400 ms", "1.60 s"]),
        # Experts hide behind eight transfers.
        (0.4, 0.1, 0.0, "none", []),
        # All transfers, experts and copies: no closed form tells which of them hide.
        (0.1, 0.4, 0.05, "S1", ["800 ms", "1.60 s", "200 ms"]),
        (0.4, 0.1, 0.05, "S1", ["3.20 s", "400 ms", "200 ms"]),
    ],
)
def test_the_critical_path_has_the_seconds_that_nothing_hides(
    transfer: float, compute: float, copies: float, strategy: Strategy, figures: list[str]
) -> None:
    parts = [Estimate(seconds=seconds, trust="measured") for seconds in (transfer, compute, copies)]
    phase = PhaseTime(degree=2, seconds=1.0, transfer=parts[0], compute=parts[1], copies=parts[2])
    chosen = StepTime(
        forward=phase, backward=phase, overhead=Estimate(seconds=0.0, trust="measured"),
        strategy=strategy,
    )  # fmt: skip
    why = explain_choice(
        step=chosen, sequential=IN_ONE, runner_up=None, interference=Interference()
    )
    assert times_in(why.partition(". ")[2]) == figures


def test_where_memory_binds_nothing_else_is_said_to_bind() -> None:
    parts = [Estimate(seconds=seconds, trust="measured") for seconds in (0.4, 0.1, 0.05)]
    phase = PhaseTime(degree=2, seconds=1.0, transfer=parts[0], compute=parts[1], copies=parts[2])
    chosen = StepTime(
        forward=phase, backward=phase, overhead=Estimate(seconds=0.0, trust="measured"),
        strategy="S1",
    )  # fmt: skip
    tight = explain_strategy(best=chosen, peak_bytes=2**29, without_bytes=2**31, limit_bytes=2**30)
    assert tight.count("binds") == 1
    assert times_in(tight) == ["3.20 s", "400 ms", "200 ms"]
    assert re.findall(r"[\d.]+ [MG]iB", tight) == ["2.00 GiB", "1.00 GiB", "512 MiB"]


def test_a_pin_has_its_price() -> None:
    pin = explain_pin(phase="forward", pinned=7, best=2, slower=0.125)
    assert re.findall(r"\d[\d.]*(?: %)?", pin) == ["7", "12.5 %", "2"]
