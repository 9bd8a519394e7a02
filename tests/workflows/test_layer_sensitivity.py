"""The quick choice behind turning points is the choice of the solver."""

from dataclasses import replace
from pathlib import Path

import pytest

from moetune.domain.constraint_texts import decode_constraints
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import LayerShape
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.fit.slowed import Slowdown
from moetune.solve.layer.candidates import choose_quickly
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.layer_sensitivity import LayerSubject
from moetune.workflows.plan import make_plan
from tests.solve.clusters import cluster_profile

LAYER = LayerShape(d_model=1024, d_hidden=4096, num_experts=64, top_k=2, activation="gelu")
LAB = Path(__file__).parents[1] / "golden" / "lab.toml"
MIB = 2**20


def published() -> Profile:
    return load_profile_file(bundled_profiles()["rtx2080ti-x64"])


@pytest.mark.parametrize(
    ("limit", "pins"),
    [
        (None, {}),
        (None, {"order": "interleaved"}),
        (None, {"strategy": "S4", "forward-degree": "3"}),
        (None, {"max-degree": "2"}),
        (700 * MIB, {}),
        (560 * MIB, {"max-degree": "8"}),
        (None, {"expert-parallel": "tensor"}),
    ],
)
def test_the_quick_choice_is_the_plans(limit: int | None, pins: dict[str, str]) -> None:
    profile = cluster_profile() if "expert-parallel" in pins else published()
    request = PlanRequest(
        layer=LAYER, tokens_per_rank=4096, dtype="float16", memory_limit_bytes=limit,
        constraints=decode_constraints({"allow-modelled": "true", **pins}),
    )  # fmt: skip
    plan = make_plan(request, profile=profile)
    subject = LayerSubject(plan=plan, profile=profile)
    assert subject.best(None) == subject.best(Slowdown(part="copies", factor=1.0)) == subject.name


def test_nothing_that_fits_is_refused_as_by_the_solver() -> None:
    profile = published()
    request = PlanRequest(
        layer=LAYER, tokens_per_rank=4096, dtype="float16", memory_limit_bytes=MIB
    )
    plan = make_plan(replace(request, memory_limit_bytes=None), profile=profile)
    subject = LayerSubject(plan=plan, profile=profile)
    for solve in (
        lambda: make_plan(request, profile=profile),
        lambda: choose_quickly(
            inputs=request.inputs_for(profile), costs=subject.costs, resamples=(),
            device_memory_bytes=MIB,
        ),
    ):  # fmt: skip
        with pytest.raises(InfeasiblePlanError, match="memory binds"):
            solve()


def test_the_quick_choice_of_a_measured_layer_is_the_plans() -> None:
    profile = load_profile_file(LAB)
    layer = LayerShape(d_model=256, d_hidden=1024, num_experts=4, top_k=1, activation="gelu")
    for tokens in (256, 1024):
        plan = make_plan(
            PlanRequest(
                layer=layer, tokens_per_rank=tokens,
                constraints=decode_constraints({"max-degree": "8"}),
            ),
            profile=profile,
        )  # fmt: skip
        subject = LayerSubject(plan=plan, profile=profile)
        assert subject.best(None) == subject.name
