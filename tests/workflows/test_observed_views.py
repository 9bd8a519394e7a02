"""Sections of measured steps, a verification's and those over time, against their numbers."""

import re
from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.constraints import Strategy
from moetune.domain.records import Stored
from moetune.domain.throughput import throughput_of
from moetune.report.observed import Seen, seen
from moetune.report.section import Section
from moetune.workflows.verify import Verification, VerifiedStep
from moetune.workflows.views.observed import (
    observed_figures,
    observed_sections,
    verdict,
    verification_sections,
)
from tests.report.lab import lab_plan, observations

PLAN = lab_plan()


def step(
    forward: int, backward: int, *, seconds: float, predicted: float | None = 1.0,
    planned: bool = False, strategy: Strategy = "none",
) -> VerifiedStep:  # fmt: skip
    return VerifiedStep(
        forward_degree=forward, backward_degree=backward, strategy=strategy, is_planned=planned,
        predicted_seconds=predicted, forward_seconds=seconds / 3, backward_seconds=seconds / 2,
        step_seconds=seconds, raw_step_seconds=(seconds,), deviation=forward * 1e-7,
    )  # fmt: skip


def verification(*steps: VerifiedStep) -> Verification:
    return Verification(plan_id=PLAN.id, steps=steps, tolerance=1e-5, imbalance=1.25)


def words(found: Verification) -> str:
    (section,) = verification_sections(PLAN, found)
    (text,) = section.paragraphs
    return text


PLANNED = step(2, 3, seconds=1.25, planned=True)
ALONE = step(1, 1, seconds=2.5, predicted=3.0)


def test_a_verification_shows_every_decision_with_its_error() -> None:
    unknown = step(4, 5, seconds=2.0, predicted=None)
    (section,) = verification_sections(PLAN, verification(ALONE, PLANNED, unknown))
    (table,) = section.tables
    shown = [tuple(cell.value for cell in row[:7]) for row in table.rows]
    assert shown == [
        ("", "none", 1, 1, 3.0, 2.5, pytest.approx(0.2)),
        ("plan", "none", 2, 3, 1.0, 1.25, pytest.approx(-0.2)),
        ("", "none", 4, 5, None, 2.0, None),
    ]
    predicted = throughput_of(PLAN)
    assert predicted is not None
    flops = predicted.flops_per_second * PLAN.predicted.step_seconds
    assert [row[7].value for row in table.rows] == [
        pytest.approx(flops / one.step_seconds) for one in (ALONE, PLANNED, unknown)
    ]
    assert [row[6].text for row in table.rows[:2]] == ["+20.0 %", "-20.0 %"]
    # The largest deviation of all decisions, and the busiest rank's rows.
    assert re.findall(r"[\d.]+e-\d+|\d\.\d\d ×", table.notes[0]) == ["4.0e-07", "1.25 ×"]


def test_a_verification_compares_with_one_chunk_with_its_prediction_and_with_the_fastest() -> None:
    faster = step(4, 5, seconds=1.0)
    reusing = step(6, 7, seconds=0.5, strategy="S4")
    figures = re.compile(r"\d+\.\d\d ×|[+-]?\d+\.\d ?%|\d+ and \d+")
    assert figures.findall(words(verification(ALONE, PLANNED, faster, reusing))) == [
        "2.00 ×", "-20.0 %", "4 and 5", "25.0 %",
    ]  # fmt: skip
    assert figures.findall(words(verification(ALONE, PLANNED))) == ["2.00 ×", "-20.0 %"]
    unknown = replace(PLANNED, predicted_seconds=None)
    assert figures.findall(words(verification(ALONE, unknown))) == ["2.00 ×"]


@pytest.mark.parametrize(
    ("changes", "alone", "holds", "says"),
    [
        ({}, 2.5, True, "holds here: its step of 1.25 s is inside its range of 1.00 s to 2.00 s"),
        ({"range_seconds": None}, 2.5, True, "takes 1.25 s, and it promised no range"),
        ({"range_seconds": (2.0, 3.0)}, 2.5, False, "missed its own range of 2.00 s to 3.00 s"),
        ({}, 1.0, False, "lost to one chunk, which is 25.0 % faster than its 1.25 s"),
        ({}, 1.24, True, "holds here"),
        ({"tolerance": 1e-9}, 2.5, False, "changed the numbers"),
    ],
)
def test_a_verification_ends_in_a_sentence(
    changes: dict[str, Any], alone: float, says: str, *, holds: bool
) -> None:
    ranged = replace(
        verification(replace(ALONE, step_seconds=alone), PLANNED), range_seconds=(1, 2)
    )
    found = replace(ranged, **changes)
    assert found.holds is holds
    assert says in verdict(PLAN, found)
    assert found.document["is_inside"] is not ("missed" in says)
    assert found.document["has_lost"] is ("lost" in says)


def test_a_verification_is_of_the_plan_whose_id_begins_so() -> None:
    assert re.findall(r"\b[0-9a-f]{4,}\b", words(verification(ALONE, PLANNED)))[0] == PLAN.id[:6]


def rows(count: int = 30) -> tuple[Seen, ...]:
    made = observations(PLAN, count)
    return seen(
        [
            Stored(id=at, created_at=f"2026-03-{1 + at:02}T04:05:06.789", value=one)
            for at, one in enumerate(made)
        ]
    )


def highlights(section: Section) -> dict[str, object]:
    return {one.name: one.cell.value for one in section.highlights}


def test_observed_steps_are_summed_up_by_their_medians() -> None:
    found = rows()
    drift, table = observed_sections(found, found[::-1], is_all=True)
    signed = [PLAN.predicted.step_seconds / one.seconds - 1 for one in found]
    errors = sorted(map(abs, signed))
    assert highlights(drift) == {
        "Observations": 30,
        "Typical error": pytest.approx((errors[14] + errors[15]) / 2),
        "Drift": pytest.approx(sorted(signed[-21:])[10]),
        "Latest": "2026-03-30 04:05",
    }
    assert len(drift.figures) == 2
    newest = table.tables[0].rows[0]
    assert [cell.value for cell in newest] == [
        "2026-03-30 04:05:06", PLAN.id, "training", PLAN.inputs.tokens_per_rank,
        f"{PLAN.pipeline.forward_degree} and {PLAN.pipeline.backward_degree}", 3,
        PLAN.predicted.step_seconds, found[-1].seconds, pytest.approx(signed[-1]), None,
    ]  # fmt: skip
    assert newest[1].text == PLAN.id[:6]


def test_lists_that_are_cut_linked_empty_of_several_plans_or_without_time() -> None:
    found = rows()
    for is_all, address in ((True, "/plans/"), (False, "")):
        drift, table = observed_sections(found, found, is_all=is_all, plans=address)
        assert ("total" in drift.highlights[0].note) is is_all
        links = {row[1].href for row in table.tables[0].rows}
        assert links == {f"{address}{PLAN.id}" if address else ""}
    drift, table = observed_sections((), (), is_all=True)
    assert (drift.highlights, drift.figures, table.tables[0].rows) == ((), (), ())
    other = replace(found[0], observation=replace(found[0].observation, plan_id="f" * 64))
    assert [one.name for one in observed_figures(found)] == ["observed", "drift"]
    assert [one.name for one in observed_figures((*found, other))] == ["drift"]
    still = [replace(one, seconds=0.0) for one in found[:3]]
    (drift, _) = observed_sections(still, still, is_all=True)
    assert {highlights(drift)[name] for name in ("Typical error", "Drift")} == {0.0}
