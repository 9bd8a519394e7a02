"""Plans from requests and profiles: their terms, and what they lack."""

from dataclasses import replace

import pytest

from moetune.domain.cluster import DeviceKind
from moetune.domain.constraints import Bounds, Constraints, Order
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.layer import LayerShape
from moetune.domain.model import MODELS
from moetune.domain.profile import GemmLine, Profile
from moetune.domain.request import PlanRequest, default_dtype
from moetune.domain.samples import CollectivePoint, GemmPoint, Sample
from moetune.workflows.explain import explain_plan
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.plan import make_plan
from moetune.workflows.profiles import compare_profiles
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
def test_the_terms_of_a_plan_are_those_it_was_made_from(
    profile: Profile, model: str, order: Order
) -> None:
    _check_terms(profile, model, order)


def _check_terms(profile: Profile, model: str, order: Order) -> None:
    plan = make_plan(
        PlanRequest(model=model, constraints=Constraints(bounds=Bounds(order=order))),
        profile=profile,
    )
    found = explain_plan(plan, profile=profile)
    assert found.forward is not None
    assert found.backward is not None
    assert found.forward.seconds == plan.predicted.forward_seconds
    assert found.backward.seconds == plan.predicted.backward_seconds
    for terms in (found.forward, found.backward):
        work = terms.total_transfer_seconds + terms.total_compute_seconds
        assert terms.hidden_seconds == pytest.approx(work - terms.seconds, abs=1e-12)
        hidden = terms.total_transfer_seconds - terms.exposed_communication_seconds
        assert terms.hidden_seconds == pytest.approx(hidden, abs=1e-12)


def test_what_is_missing_is_measured_on_the_nodes_of_the_plans_ranks() -> None:
    request = PlanRequest(layer=LAB_LAYER, tokens_per_rank=2**15, dtype="float32")
    meet = "--rdzv-backend c10d --rdzv-endpoint NODE0:29500"
    for ranks, launch in (
        (8, f"torchrun --nnodes 2 --nproc-per-node 4 {meet} -m moetune profile"),
        (4, "moetune profile --nproc 4"),
    ):
        asked = replace(request, world_size=ranks, constraints=Constraints(allow_modelled=True))
        *_, last = make_plan(asked, profile=lab_profile()).warnings
        assert f"measure what is missing:  {launch} --name lab --resume --d-model 512" in last


def test_the_same_request_makes_the_same_plan(profile: Profile) -> None:
    request = PlanRequest(model="bert-l", tokens_per_rank=3000)
    assert make_plan(request, profile=profile) == make_plan(request, profile=profile)


def test_interference_reaches_the_plan(profile: Profile) -> None:
    slow = Interference(comm=CommSpeed(comp=0.5), comp=CompSpeed(comm=0.5))
    request = PlanRequest(model="gpt-xl", dtype="float16")
    free = make_plan(request, profile=profile)
    disturbed = make_plan(request, profile=replace(profile, interference=slow))
    assert free.pipeline.backward_degree > 1
    assert disturbed.predicted.step_seconds > free.predicted.step_seconds
    assert disturbed.id != free.id


@pytest.mark.parametrize(
    ("kind", "lines", "expected"),
    [
        ("cuda", (FLOAT32, BFLOAT16), "bfloat16"),
        ("cuda", (FLOAT64, FLOAT32), "float32"),
        ("cuda", (FLOAT64,), "float64"),
        ("cpu", (BFLOAT16, FLOAT32), "float32"),
        ("cpu", (BFLOAT16, FLOAT64), "bfloat16"),
        ("cpu", (), "float32"),
    ],
)
def test_the_default_dtype_is_what_the_machine_is_for(
    profile: Profile, kind: DeviceKind, lines: tuple[GemmLine, ...], expected: str
) -> None:
    machine = replace(profile.machine, kind=kind)
    assert default_dtype(replace(profile, machine=machine, gemm=lines)) == expected


def test_a_dtype_that_was_only_sampled_is_known(profile: Profile) -> None:
    point = GemmPoint(dtype="bfloat16", rows=1, d_in=1, d_out=1)
    sampled = replace(profile, gemm=(), samples=(Sample(point=point, seconds=(1.0,)),))
    assert default_dtype(sampled) == "bfloat16"


def test_defaults_come_from_the_model_and_the_profile(profile: Profile) -> None:
    inputs = PlanRequest(model="rm-2").inputs_for(profile)
    assert (inputs.world_size, inputs.tokens_per_rank, inputs.dtype) == (64, 128, "float32")
    assert inputs.layer == MODELS["rm-2"].layer(64)
    assert inputs.profile_fingerprint == profile.digest
    assert inputs.constraints == {}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, "nothing to plan for"),
        ({"model": "gpt-s", "layer": LAYER, "tokens_per_rank": 1}, "a model and a layer"),
        ({"layer": LAYER}, "number of tokens is missing"),
        ({"model": "gpt-5"}, "'gpt-5' is unknown"),
        ({"model": "gpt-s", "world_size": 0}, "--world-size must be at least 1, got 0"),
        ({"model": "gpt-s", "tokens_per_rank": -1}, "--tokens must be at least 1"),
        ({"model": "gpt-s", "memory_limit_bytes": 0}, "--memory-limit must be at least 1"),
    ],
)
def test_a_request_that_says_too_little_or_too_much_is_refused(
    wrong: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        PlanRequest(**wrong)  # type: ignore[arg-type]  # the wrong arguments are the test


def test_a_stand_in_group_size_is_named_only_where_one_stands_in(profile: Profile) -> None:
    request = PlanRequest(
        layer=LAYER,
        tokens_per_rank=512,
        world_size=32,
        constraints=Constraints(allow_modelled=True),
    )
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
        make_plan(replace(request, constraints=Constraints()), profile=profile)


def test_profiles_differ_in_what_was_changed_and_in_nothing_else(profile: Profile) -> None:
    assert compare_profiles(profile, replace(profile, name="other")) == ()
    slower = replace(profile.gemm[0], alpha_seconds=2 * profile.gemm[0].alpha_seconds)
    found = compare_profiles(profile, replace(profile, gemm=(slower, *profile.gemm[1:])))
    assert [(one.key, one.ratio) for one in found] == [("gemm float32 alpha_seconds", 2.0)]
