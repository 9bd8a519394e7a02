"""The experts' kernel in plans: the fastest one measured, against plans of each kernel alone."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from moetune.app.files import load_profile_file, profile_to_toml, write_text
from moetune.app.plan import make_plan
from moetune.app.subjects import LayerSubject
from moetune.app.views.plan import explanation_sections
from moetune.domain.document import encode
from moetune.domain.errors import ProfileError
from moetune.domain.kernels import KernelName
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.question import Question, read_texts
from moetune.domain.samples import GemmPoint, Point, Sample
from moetune.measure.points import PointScope
from tests.fit.measured import fitted
from tests.fit.test_disturbed import MACHINE, true_seconds

pytestmark = pytest.mark.unmeasured

SAME = 2e-3
"""Curves of all kernels start at the α of the dtype's line, which is the usual kernel's."""
LAYER = LayerShape(d_model=256, d_hidden=1024, num_experts=4, activation="gelu")


def points(*kernels: KernelName) -> tuple[Point, ...]:
    scope = PointScope(
        machine=MACHINE, dtypes=("float32",), group_sizes=(2,), layers=(LAYER,), max_tokens=2048,
        kernels_of=lambda _: kernels,  # type: ignore[arg-type, return-value] # never the usual one
    )  # fmt: skip
    return scope.points().needed


def seconds(point: Point, factors: Mapping[KernelName, float]) -> float:
    factor = factors[point.kernel] if isinstance(point, GemmPoint) else 1.0
    return true_seconds(point) * factor


def profile(factors: Mapping[KernelName, float]) -> Profile:
    """Return a profile whose kernels take so many times as long as the usual one of before."""
    others = tuple(kernel for kernel in factors if kernel)
    samples = [
        Sample(point=point, seconds=(seconds(point, factors),) * 5) for point in points(*others)
    ]
    return fitted(samples, MACHINE)


def plan(machine: Profile, **constraints: str) -> Plan:
    asked = encode(LAYER) | {"world_size": 2, "tokens": 2048} | read_texts(constraints)
    return make_plan(Question(**asked), profile=machine)


def alone(factors: Mapping[KernelName, float], kernel: KernelName) -> float:
    """Return the step where that kernel is the only one, measured at its own points alone."""
    samples = [
        Sample(
            point=dataclasses.replace(point, kernel="") if isinstance(point, GemmPoint) else point,
            seconds=(seconds(point, factors),) * 5,
        )
        for point in points(*({kernel} - {""}))
        if not isinstance(point, GemmPoint) or point.kernel == kernel
    ]
    return plan(fitted(samples, MACHINE)).step_seconds


@pytest.mark.parametrize("best", ["liger", ""])
def test_the_fastest_kernel_is_taken_at_the_step_that_it_has_alone(best: KernelName) -> None:
    factors: dict[KernelName, float] = {"": 1.0, "grouped_mm": 1.3, "liger": 1.6}
    factors[best] = 0.7
    chosen = plan(profile(factors))
    assert chosen.kernel is not None
    assert chosen.kernel.name == (best or "loop")
    assert chosen.step_seconds == pytest.approx(alone(factors, best), rel=SAME)
    by_name = {other.name: other.step_seconds for other in chosen.kernel.others}
    for kernel in factors:
        if kernel != best:
            assert by_name[kernel or "loop"] == pytest.approx(alone(factors, kernel), rel=SAME)
    assert list(by_name.values()) == sorted(by_name.values())
    assert chosen.decide(100).kernel == chosen.kernel.name
    sections = explanation_sections(_subject(chosen, factors))
    assert chosen.kernel.why in [text for section in sections for text in section.paragraphs]


def _subject(made: Plan, factors: Mapping[KernelName, float]) -> LayerSubject:
    assert made.terms is not None  # of the plan's kernel, not of the usual one
    assert made.terms.forward.seconds == pytest.approx(made.predicted.forward_seconds)
    return LayerSubject(plan=made, profile=profile(factors))


def test_ties_keep_the_usual_kernel_and_a_pin_takes_another() -> None:
    near = profile({"": 1.0, "grouped_mm": 0.995})
    assert plan(near).kernel.name == "loop"  # type: ignore[union-attr] # it is there
    pinned = plan(near, expert_kernel="grouped_mm").kernel
    assert (pinned.name, pinned.why) == ("grouped_mm", "grouped_mm was asked for.")  # type: ignore[union-attr]
    on_gpu = plan(profile({"": 1.0, "loop": 3.0, "liger": 1.2})).kernel
    assert (on_gpu.name, on_gpu.is_usual) == ("grouped_mm", True)  # type: ignore[union-attr]


def test_profiles_of_before_plan_as_before_and_refuse_a_kernel_they_lack(tmp_path: Path) -> None:
    before = profile({"": 1.0})
    assert plan(before).kernel is None
    assert "kernel" not in plan(before).text
    with_kernels = profile({"": 1.0, "grouped_mm": 1.3})
    # A slower kernel changes no other number: it is in no line, fit or blend of the usual one.
    assert with_kernels.gemm == before.gemm
    assert plan(with_kernels).predicted == plan(before).predicted
    with pytest.raises(ProfileError, match="the kernel liger was not measured for a rank"):
        plan(with_kernels, expert_kernel="liger")
    write_text(tmp_path / "with.toml", profile_to_toml(with_kernels))
    assert load_profile_file(tmp_path / "with.toml").samples == with_kernels.samples
