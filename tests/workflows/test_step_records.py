"""Steps of layers measured beside their operations: in a profile, in its file, and in plans."""

import math
import random
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from moetune.domain.constraints import Bounds, Constraints
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.model import Transformer
from moetune.domain.plan import Plan
from moetune.domain.profile import LinkBurst, Profile, profile_from_document
from moetune.domain.request import PlanRequest
from moetune.domain.samples import GemmPoint, Sample, StepPoint, TurnsPoint
from moetune.domain.training import BatchSplit
from moetune.fit.costs import costs_of
from moetune.fit.scaled import Speeds, scale_profile
from moetune.solve.model.in_turns import turns_seconds
from moetune.workflows.explain import Explanation
from moetune.workflows.files import profile_to_toml
from moetune.workflows.plan import make_plan
from moetune.workflows.profiles import FoundProfile
from moetune.workflows.step_records import with_steps
from moetune.workflows.views.explanation import reasons
from moetune.workflows.views.profile import profile_page, profile_report, profile_sections
from tests.report.lab import lab_profile

LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=8, top_k=2)
TOKENS = 1024


def load_of(profile: Profile) -> Workload:
    return Workload(
        layer=LAYER, world_size=profile.machine.num_devices, tokens_per_rank=TOKENS,
        dtype="float32",
    )  # fmt: skip


def planned(profile: Profile, degree: int = 1) -> Plan:
    bounds = Bounds(forward_degree=degree, backward_degree=degree, strategy="none")
    request = PlanRequest(
        layer=LAYER, world_size=profile.machine.num_devices, tokens_per_rank=TOKENS,
        dtype="float32", constraints=Constraints(bounds=bounds, allow_modelled=True),
    )  # fmt: skip
    return make_plan(request, profile=profile)


def with_step(profile: Profile, factor: float, degree: int = 1) -> Profile:
    """Return the profile with visits of a step that takes `factor` times its prediction."""
    point = StepPoint(workload=load_of(profile), degree=degree)
    seconds = factor * planned(profile, degree).predicted.step_seconds
    visits = (Sample(point=point, seconds=(seconds,) * 4),) * 2
    disturbed = Sample(point=point, seconds=(3 * seconds,) * 4)
    return with_steps(replace(profile, samples=(*profile.samples, *visits, disturbed)))


@pytest.fixture(scope="module")
def lab() -> Profile:
    return lab_profile()


def test_a_measured_step_is_what_a_plan_predicts_and_narrows_its_range(lab: Profile) -> None:
    slow = with_step(lab, 1.15)
    (record,) = slow.steps
    assert record.residual == pytest.approx(math.log(1.15), abs=0.02)
    before, after = planned(lab).predicted, planned(slow).predicted
    assert after.step_seconds / before.step_seconds == pytest.approx(1.15, rel=0.02)
    widths = [
        (one.p95_step_seconds - one.p05_step_seconds) / one.step_seconds for one in (before, after)
    ]
    assert widths[1] < 0.75 * widths[0]


def test_the_plan_its_parts_and_its_timeline_agree(lab: Profile) -> None:
    predicted = planned(with_step(lab, 1.15, degree=4), 4).predicted
    parts = predicted.forward_seconds + predicted.backward_seconds + predicted.overhead_seconds
    assert parts == pytest.approx(predicted.step_seconds)


def test_a_faster_machine_keeps_the_ratio_of_steps_to_their_operations(lab: Profile) -> None:
    slow = with_step(lab, 1.15)
    speeds = Speeds(computation=2.0, communication=2.0)
    faster = scale_profile(slow, speeds)
    assert faster.steps == slow.steps
    assert planned(faster).predicted.step_seconds == pytest.approx(
        planned(slow).predicted.step_seconds / 2, rel=1e-6
    )


def with_turns(
    profile: Profile,
    factor: float,
    split: BatchSplit = "sequences",
    visits: Sequence[Sequence[float]] = ((1.0,) * 4,) * 2,
) -> Profile:
    """Return the profile with visits of blocks in turns that take `factor` times their timeline.

    Args:
        visits: how many times as long each run of them takes.
    """
    model = Transformer(moe=LAYER, num_layers=4, num_heads=8, length=128, vocab_size=1, moe_every=1)
    point = TurnsPoint(
        model=model, world_size=profile.machine.num_devices, sequences=4, dtype="float32", degree=1,
        split=split,
    )  # fmt: skip
    seconds = factor * turns_seconds(
        point, costs=costs_of(profile, allow_modelled=True),
        per_node=profile.machine.devices_per_node,
    )  # fmt: skip
    samples = (
        Sample(point=point, seconds=tuple(seconds * one for one in visit)) for visit in visits
    )
    return with_steps(replace(profile, samples=(*profile.samples, *samples)))


def test_blocks_in_turns_are_kept_beside_their_timeline_whatever_the_machines_speed(
    lab: Profile,
) -> None:
    slow = with_turns(lab, 1.2)
    (record,) = slow.turns
    assert record.residual == pytest.approx(math.log(1.2))
    faster = scale_profile(slow, Speeds(computation=2.0))
    assert faster.turns == slow.turns
    assert slow.digest != lab.digest
    for marks, left in ((("busy",), ()), (("unstable", "busy"), ()), (("unstable",), slow.turns)):
        marked = tuple(
            replace(one, marks=marks) if isinstance(one.point, TurnsPoint) else one
            for one in slow.samples
        )
        assert with_steps(replace(slow, samples=marked)).turns == left
    only = tuple(one for one in slow.samples if isinstance(one.point, TurnsPoint))
    assert with_steps(replace(slow, gemm=(), samples=only)).turns == ()


def test_runs_that_scatter_leave_a_record_uncertain(lab: Profile) -> None:
    generator = random.Random(3)
    (exact,) = with_turns(lab, 1.2).turns
    found: list[float] = []
    for _ in range(30):
        runs = [math.exp(generator.gauss(0, 0.1)) for _ in range(10)]
        (one,) = with_turns(lab, 1.2, visits=[runs[:5], runs[5:]]).turns
        assert one.measured_seconds == pytest.approx(
            1.2 * one.predicted_seconds * statistics.median(runs)
        )
        found.append(one.standard_error)
    medians = [statistics.median(generator.gauss(0, 0.1) for _ in range(10)) for _ in range(2000)]
    assert statistics.fmean(found) == pytest.approx(statistics.stdev(medians), rel=0.15)
    (single,) = with_turns(lab, 1.2, visits=[[1.0]]).turns
    assert exact.standard_error == single.standard_error == 0


def test_halves_of_positions_have_records_of_their_own(lab: Profile) -> None:
    both = with_turns(with_turns(lab, 1.2), 1.5, "positions")
    found = {one.point.split: one.residual for one in both.turns}
    assert found == pytest.approx({"sequences": math.log(1.2), "positions": math.log(1.5)})
    again = profile_from_document(tomllib.loads(profile_to_toml(both)))
    assert again.turns == both.turns
    sections = profile_sections(FoundProfile(profile=both, source="store"))
    (turns,) = (one for one in sections if one.name == "turns")
    names = [row[0].text for row in turns.tables[0].rows]
    assert sum("halves of positions" in name for name in names) == 1


def test_steps_whose_operations_were_not_measured_have_no_record(lab: Profile) -> None:
    point = StepPoint(workload=load_of(lab), degree=1)
    only = tuple(one for one in lab.samples if isinstance(one.point, GemmPoint))
    bare = replace(lab, collective=(), samples=(*only, Sample(point=point, seconds=(1.0,))))
    assert with_steps(bare).steps == ()


def test_a_profile_file_has_every_field(lab: Profile) -> None:
    burst = LinkBurst(op="all_to_all", group_size=2, seconds=1e-3)
    full = replace(with_turns(with_step(lab, 1.1), 1.2), bursts=(burst,))
    again = profile_from_document(tomllib.loads(profile_to_toml(full)))
    for field in fields(Profile):
        assert getattr(again, field.name) == getattr(full, field.name)


def test_a_profile_shows_its_steps_and_blocks_beside_what_operations_say(lab: Profile) -> None:
    found = FoundProfile(profile=with_turns(with_step(lab, 1.15), 1.2), source="store")
    for sections in (profile_sections(found), profile_page(found), profile_report(found)):
        (steps,) = (one for one in sections if one.name == "steps")
        (row,) = steps.tables[0].rows
        assert row[-1].value == pytest.approx(1 / 1.15 - 1, abs=0.02)
        assert row[-2].value == pytest.approx(1.15 * float(row[-3].value or 0), rel=0.02)
        (turns,) = (one for one in sections if one.name == "turns")
        (row,) = turns.tables[0].rows
        assert row[-3].value == pytest.approx(1.2 * float(row[-4].value or 0))


def test_an_explanation_says_what_measured_steps_change(lab: Profile) -> None:
    slow = with_step(lab, 1.15)
    plan = planned(slow)
    terms = plan.terms
    assert terms is not None
    explanation = Explanation(
        plan=plan, forward=terms.forward, backward=terms.backward, strategies=(), profile=slow,
        note="",
    )  # fmt: skip
    (section,) = (one for one in reasons(explanation) if one.name == "terms")
    assert any("Times 1.13" in note or "Times 1.14" in note for note in section.tables[0].notes)
    plain = replace(explanation, profile=lab)
    (section,) = (one for one in reasons(plain) if one.name == "terms")
    assert not any("sum of their operations" in note for note in section.tables[0].notes)


def test_a_step_that_was_disturbed_at_every_visit_has_no_record(lab: Profile) -> None:
    slow = with_step(lab, 1.15)
    samples = tuple(
        replace(one, marks=("busy",)) if isinstance(one.point, StepPoint) else one
        for one in slow.samples
    )
    assert with_steps(replace(slow, samples=samples)).steps == ()
