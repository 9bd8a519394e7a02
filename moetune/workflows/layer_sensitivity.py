"""Sensitivity of a layer's plan: its step under slower and faster parts."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from moetune.domain.costs import Costs
from moetune.domain.plan import Decision, Plan
from moetune.domain.profile import Profile
from moetune.domain.request import PlanInputs
from moetune.fit.costs import costs_of
from moetune.fit.slowed import PARTS, Slowdown, slowed
from moetune.solve.layer.memory import limit_of
from moetune.solve.layer.strategies import RankedLayer, choose_safely, rank_layer
from moetune.solve.predict import plan_step
from moetune.workflows.compared import degrees_name
from moetune.workflows.plan import drawn_costs
from moetune.workflows.sensitivity import GIB, KnobEffect, check_same


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSubject:
    """A layer's plan and its profile.

    Raises:
        InputError: this version of moetune predicts another step.
    """

    plan: Plan
    profile: Profile
    costs: Costs = field(init=False)
    resamples: tuple[Costs, ...] = field(init=False)

    def __post_init__(self) -> None:
        modelled = self.plan.inputs.pinned.allow_modelled
        object.__setattr__(self, "costs", costs_of(self.profile, allow_modelled=modelled))
        drawn = drawn_costs(self.profile, allow_modelled=modelled)
        object.__setattr__(self, "resamples", drawn)
        check_same(self.plan.id, now=self.step(None), then=self.plan.predicted.step_seconds)

    @property
    def plan_id(self) -> str:
        """The plan's id."""
        return self.plan.id

    @property
    def name(self) -> str:
        """The plan's degrees and strategy."""
        return degrees_name(self.decision)

    @property
    def decision(self) -> Decision:
        """The plan's decision."""
        return self.plan.decide(self.plan.inputs.tokens_per_rank)

    @property
    def parts(self) -> tuple[str, ...]:
        """Every part."""
        return PARTS

    def step(self, slowdown: Slowdown | None) -> float:
        """Return the seconds of the plan's own choice."""
        return self._seconds(self.decision, slowed(self.costs, slowdown))

    def knobs(self) -> Iterator[KnobEffect]:
        """Yield one chunk more and less of each phase, other strategies, and more memory."""
        ranked = self._ranked(self.plan.inputs)
        yield from self._degrees(is_paired=ranked.best.chooser.is_paired)
        yield from self._strategies(ranked)
        yield self._memory()

    def _degrees(self, *, is_paired: bool) -> Iterator[KnobEffect]:
        own, inputs = self.decision, self.plan.inputs
        largest = inputs.pinned.bounds.largest(inputs.tokens_per_rank)
        phases = ("forward_degree", "backward_degree")
        for knobs in [phases] if is_paired else [(one,) for one in phases]:
            flag = "degree" if is_paired else knobs[0].replace("_", "-")
            for change in (-1, 1):
                moved = {one: getattr(own, one) + change for one in knobs}
                if all(1 <= degree <= largest for degree in moved.values()):
                    yield self._knob(flag, replace(own, **moved))

    def _strategies(self, ranked: RankedLayer) -> Iterator[KnobEffect]:
        for one in ranked.contenders:
            if one.strategy == self.decision.strategy:
                continue
            forward, backward = one.degrees
            seconds = one.step.seconds - self.step(None)
            yield KnobEffect(
                knob="strategy",
                choice=f"{forward} and {backward} chunks, strategy {one.strategy}",
                seconds=seconds,
                share=seconds / self.step(None),
                note="" if one.fits else "does not fit",
            )

    def _memory(self) -> KnobEffect:
        """Return the best choice with one GiB more."""
        machine, inputs = self.profile.machine, self.plan.inputs
        limit = limit_of(inputs, device_memory_bytes=machine.plannable_bytes)
        taken = inputs.pinned.memory_taken_bytes
        roomy = replace(inputs, memory_limit_bytes=limit + taken + GIB)
        other = self._chosen(roomy)
        seconds = self._seconds(other, self.costs) - self.step(None)
        return KnobEffect(
            knob="memory-limit", choice=f"1 GiB more memory: {degrees_name(other)}",
            seconds=seconds, share=seconds / self.step(None),
        )  # fmt: skip

    def _knob(self, knob: str, other: Decision) -> KnobEffect:
        seconds = self._seconds(other, self.costs) - self.step(None)
        return KnobEffect(
            knob=knob, choice=degrees_name(other), seconds=seconds, share=seconds / self.step(None)
        )

    def _seconds(self, decision: Decision, costs: Costs) -> float:
        return plan_step(plan=self.plan, costs=costs, decision=decision).seconds

    def _ranked(self, inputs: PlanInputs) -> RankedLayer:
        """Return all candidates."""
        return rank_layer(
            inputs=inputs,
            costs=self.costs,
            bounds=inputs.pinned.bounds,
            device_memory_bytes=self.profile.machine.plannable_bytes,
            placement=self.plan.experts,
        )

    def _chosen(self, inputs: PlanInputs) -> Decision:
        found = choose_safely(self._ranked(inputs), self.resamples).best
        forward, backward = found.degrees
        return Decision(
            forward_degree=forward, backward_degree=backward, order=found.order,
            strategy=found.strategy,
        )  # fmt: skip
