"""A plan in words: each figure is there where it applies, and only there."""

import re
from dataclasses import replace

import pytest

from moetune.app.subjects import LayerSubject
from moetune.app.views.layer import memory_words
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.report.section import chance
from moetune.report.why_not import placed_otherwise
from moetune.report.words import device_word, plan_scope
from tests.golden.pages import placed
from tests.report.lab import MACHINE, lab_plan, lab_profile


@pytest.mark.parametrize(
    ("share", "number"), [(0.0, "1"), (0.5, "50"), (0.994, "99"), (0.995, "99"), (1.0, "99")]
)
def test_a_chance_is_never_0_nor_100_percent(share: float, number: str) -> None:
    assert re.findall(r"\d+", chance(share)) == [number]


def test_memory_is_compared_with_the_plans_limit_else_the_devices() -> None:
    def limits(plan: Plan, profile: Profile | None = None) -> list[str]:
        """Return the limit, and what it leaves free."""
        words = memory_words(LayerSubject(plan=plan, profile=profile))
        return re.findall(r"(?:MiB of|leaves) ([\d.]+ [KMG]iB)", words)

    plan, profile = lab_plan(), lab_profile()
    # What 92 % of a GPU leave free is said where nobody set the limit.
    assert limits(plan, profile) == ["942 MiB", "81.9 MiB"]
    inputs = replace(plan.inputs, constraints={"memory-taken": str(42 * 2**20)})
    taken = replace(plan, id=inputs.plan_id, inputs=inputs)
    assert limits(taken, profile)[0] == "900 MiB"
    cpu = replace(profile, machine=replace(profile.machine, kind="cpu"))
    assert limits(plan, cpu) == ["1.00 GiB"]
    limited = lab_plan(memory_limit_bytes=120 * 2**20)
    assert limits(limited, profile) == limits(limited) == ["120 MiB"]
    assert limits(plan) == []


def test_a_rank_is_a_gpu_where_the_machine_has_them() -> None:
    cpu = replace(lab_profile(), machine=replace(MACHINE, kind="cpu"))
    words = [device_word(profile) for profile in (None, cpu, lab_profile())]
    assert words == ["rank", "rank", "GPU"]
    plan = lab_plan()
    assert "8 GPUs" in plan_scope(plan, profile=lab_profile())
    assert "8 ranks" in plan_scope(plan)


def test_another_choice_says_where_its_experts_are_placed_otherwise() -> None:
    natural, planned = placed()
    assert [*placed_otherwise(natural, natural)] == [*placed_otherwise(planned, planned)] == []
    [words] = placed_otherwise(natural, planned)
    assert words.startswith("with this choice experts are placed by their loads, and not as")
