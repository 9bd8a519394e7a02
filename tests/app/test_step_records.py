"""Steps of layers measured beside their operations: in a profile, in its file, and in plans."""

import math
from dataclasses import replace

import pytest

from moetune.app.plan import make_plan
from moetune.app.profile import with_steps
from moetune.domain.document import encode
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.question import Question
from moetune.domain.samples import Sample, StepPoint
from moetune.fit.speeds import Speeds, scale_profile
from tests.report.lab import lab_profile

LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=8, top_k=2)
TOKENS = 1024


def planned(profile: Profile, degree: int = 1) -> Plan:
    question = Question(
        **encode(LAYER), world_size=profile.machine.num_devices, tokens=TOKENS, dtype="float32",
        forward_degree=degree, strategy="none", allow_modelled=True,
    )  # fmt: skip
    return make_plan(question, profile=profile)


def with_step(profile: Profile, factor: float, degree: int = 1) -> Profile:
    """Return the profile with visits of a step that takes `factor` times its prediction."""
    load = Workload(layer=LAYER, world_size=profile.machine.num_devices, tokens_per_rank=TOKENS,
                    dtype="float32")  # fmt: skip
    point = StepPoint(workload=load, degree=degree)
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
    widths = [(p.p95_step_seconds - p.p05_step_seconds) / p.step_seconds for p in (before, after)]
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
