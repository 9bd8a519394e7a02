"""Plans from requests and profiles: their terms, and what they lack."""

from dataclasses import replace

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.plan import make_plan
from moetune.domain.cluster import DeviceKind
from moetune.domain.constraints import Order
from moetune.domain.document import encode
from moetune.domain.errors import ProfileError
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.layer import LayerShape
from moetune.domain.model import MODELS
from moetune.domain.profile import GemmLine, Profile
from moetune.domain.question import Question
from moetune.domain.request import default_dtype
from moetune.domain.samples import CollectivePoint, Sample
from tests.report.lab import LAYER as LAB_LAYER
from tests.report.lab import lab_profile

pytestmark = pytest.mark.unmeasured

LAYER = LayerShape(d_model=64, d_hidden=128, num_experts=64)
FLOAT64 = GemmLine(dtype="float64", alpha_seconds=1e-5, beta_seconds_per_mac=1e-12)
BFLOAT16 = replace(FLOAT64, dtype="bfloat16")
FLOAT32 = replace(FLOAT64, dtype="float32")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile_file(bundled_profiles()["rtx2080ti-x64"])


LAYERS = list(MODELS)


@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.parametrize("order", ["dispatch_first", "interleaved"])
def test_a_plan_has_the_terms_it_was_made_from(profile: Profile, model: str, order: Order) -> None:
    plan = make_plan(Question(model=model, order=order), profile=profile)
    phases = plan.terms
    assert phases is not None
    assert phases.forward.seconds == plan.predicted.forward_seconds
    assert phases.backward.seconds == plan.predicted.backward_seconds
    for terms in (phases.forward, phases.backward):
        work = terms.total_transfer_seconds + terms.total_compute_seconds
        assert terms.hidden_seconds == pytest.approx(work - terms.seconds, abs=1e-12)
        hidden = terms.total_transfer_seconds - terms.exposed_communication_seconds
        assert terms.hidden_seconds == pytest.approx(hidden, abs=1e-12)


def test_what_is_missing_is_measured_on_the_nodes_of_the_plans_ranks() -> None:
    request = Question(**encode(LAB_LAYER), tokens=2**15, dtype="float32")
    meet = "--rdzv-backend c10d --rdzv-endpoint NODE0:29500"
    for ranks, launch in (
        (8, f"torchrun --nnodes 2 --nproc-per-node 4 {meet} -m moetune profile"),
        (4, "moetune profile --nproc 4"),
    ):
        asked = replace(request, world_size=ranks, allow_modelled=True)
        *_, last = make_plan(asked, profile=lab_profile()).warnings
        assert f"measure what is missing:  {launch} --name lab --resume --d-model 512" in last


def test_the_same_request_makes_the_same_plan(profile: Profile) -> None:
    request = Question(model="bert-l", tokens=3000)
    assert make_plan(request, profile=profile) == make_plan(request, profile=profile)


def test_interference_reaches_the_plan(profile: Profile) -> None:
    slow = Interference(comm=CommSpeed(comp=0.5), comp=CompSpeed(comm=0.5))
    request = Question(model="gpt-xl", dtype="float16")
    free = make_plan(request, profile=profile)
    disturbed = make_plan(request, profile=replace(profile, interference=slow))
    assert free.pipeline.backward_degree > 1
    assert disturbed.predicted.step_seconds > free.predicted.step_seconds
    assert disturbed.id != free.id


@pytest.mark.parametrize(("kind", "lines", "expected"), [
    ("cuda", (FLOAT32, BFLOAT16), "bfloat16"), ("cuda", (FLOAT64, FLOAT32), "float32"),
    ("cuda", (FLOAT64,), "float64"), ("cpu", (BFLOAT16, FLOAT32), "float32"),
    ("cpu", (BFLOAT16, FLOAT64), "bfloat16"), ("cpu", (), "float32"),
])  # fmt: skip
def test_the_default_dtype_is_what_the_machine_is_for(
    profile: Profile, kind: DeviceKind, lines: tuple[GemmLine, ...], expected: str
) -> None:
    machine = replace(profile.machine, kind=kind)
    assert default_dtype(replace(profile, machine=machine, gemm=lines)) == expected


def test_a_stand_in_group_size_is_named_only_where_it_stands_in(profile: Profile) -> None:
    request = Question(**encode(LAYER), tokens=512, world_size=32, allow_modelled=True)
    plan = make_plan(request, profile=profile)
    named = "not measured: all_to_all of 32 ranks; all_to_all of 64 ranks stands in"
    assert [text for text in plan.warnings if "stands in" in text] == [named]
    there = make_plan(replace(request, world_size=64), profile=profile)
    assert not any("stands in" in text for text in there.warnings)
    point = CollectivePoint(op="all_to_all", group_size=32, num_bytes=2**20)
    samples = (Sample(point=point, seconds=(1e-3,)),)
    sampled = make_plan(request, profile=replace(profile, samples=samples))
    assert not any("stands in" in text for text in sampled.warnings)
    with pytest.raises(ProfileError, match="for 32 ranks"):
        make_plan(replace(request, allow_modelled=None), profile=profile)
