"""Sensitivity of a whole model's plan: its layout under other costs."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from moetune.domain.constraints import LayoutPins
from moetune.domain.errors import InfeasiblePlanError, InputError, ProfileError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.fit.slowed import PARTS, Slowdown, slowed
from moetune.solve.layout.candidates import Candidate
from moetune.solve.layout.choose import ChosenLayout, LayoutProblem, choose_layout, search_layouts
from moetune.solve.layout.uncertainty import timed_under
from moetune.solve.layout.words import name_layout, name_setting
from moetune.workflows.plan import layout_problem
from moetune.workflows.plan_changes import step_seconds
from moetune.workflows.sensitivity import GIB, KnobEffect, check_same

_HALF, _TWICE = 0.5, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSubject:
    """A whole model's plan, searched again with its profile.

    Raises:
        InputError: this version of moetune takes another layout, or predicts another step.
    """

    plan: Plan
    profile: Profile
    chosen: ChosenLayout = field(init=False)

    def __post_init__(self) -> None:
        plan, profile = self.plan, self.profile
        whole = plan.inputs.request.whole
        assert whole is not None  # noqa: S101 - of a whole model's plan
        found = choose_layout(layout_problem(plan.inputs, whole, profile))
        if found.found.best[0].layout != plan.layout:
            raise InputError(
                f"this version of moetune takes another layout than plan {plan.id[:6]}",
                "make the plan again",
            )
        object.__setattr__(self, "chosen", found)
        check_same(plan.id, now=found.found.best[0].seconds, then=step_seconds(plan))

    @property
    def plan_id(self) -> str:
        """The plan's id."""
        return self.plan.id

    @property
    def name(self) -> str:
        """The layout and its micro-batches."""
        return _name(self._own)

    @property
    def parts(self) -> tuple[str, ...]:
        """Every part."""
        return PARTS

    def step(self, slowdown: Slowdown | None) -> float:
        """Return the seconds of the plan's own layout."""
        search = self.chosen.search
        return timed_under(search, self._own, slowed(search.prices.costs, slowdown)).seconds

    def knobs(self) -> Iterator[KnobEffect]:
        """Yield half and twice each size of the layout and of the micro-batch, and more memory."""
        layout, setting = self._own.layout, self._own.setting
        sizes = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
        for knob, size in {**sizes, "micro-batch": setting.sequences}.items():
            for factor in (_HALF, _TWICE):
                moved = size * factor
                if moved >= 1 and moved == int(moved):
                    yield self._moved(knob, int(moved))
        yield self._memory()

    def _moved(self, knob: str, size: int) -> KnobEffect:
        layout = self._own.layout
        pins = LayoutPins(
            tp=layout.tp, pp=layout.pp, ep=layout.ep, expert_parallel=layout.expert_parallel,
            zero=self.chosen.problem.pins.zero, offload=self.chosen.problem.pins.offload,
        )  # fmt: skip
        moved: dict[str, Any] = {knob.replace("-", "_"): size}
        pins = replace(pins, **moved)
        words = f"{knob} {size}"
        try:
            return self._effect(knob, words, replace(self.chosen.problem, pins=pins))
        except (InputError, InfeasiblePlanError, ProfileError) as error:
            return KnobEffect(knob=knob, choice=words, note=error.what)

    def _memory(self) -> KnobEffect:
        problem = self.chosen.problem
        limit = problem.limit_bytes + problem.inputs.pinned.memory_taken_bytes
        roomy = replace(problem.inputs, memory_limit_bytes=limit + GIB)
        words = "1 GiB more memory"
        return self._effect("memory-limit", words, replace(problem, inputs=roomy))

    def _effect(self, knob: str, words: str, problem: LayoutProblem) -> KnobEffect:
        _, found = search_layouts(replace(problem, resamples=()))
        step = self.step(None)
        seconds = found.best[0].seconds - step
        return KnobEffect(
            knob=knob, choice=f"{words}: {_name(found.best[0])}", seconds=seconds,
            share=seconds / step,
        )  # fmt: skip

    @property
    def _own(self) -> Candidate:
        return self.chosen.found.best[0]


def _name(one: Candidate) -> str:
    return f"{name_layout(one.layout)}, {name_setting(one.setting)}"
