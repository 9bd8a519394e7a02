"""The plan of a layer, priced again with its profile."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from moetune.app.plan import changed_question, check_layer, drawn_costs, plan_again
from moetune.app.subjects.values import (
    GIB,
    Asked,
    Instead,
    LostChoice,
    Neighbour,
    PricedPlan,
    Timelines,
    WhyNot,
)
from moetune.domain.ask import LARGEST_BYTES
from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE
from moetune.domain.costs import Costs
from moetune.domain.document import encode
from moetune.domain.errors import InfeasiblePlanError, InputError
from moetune.domain.plan import Alternative, Decision, Plan
from moetune.domain.question import read_texts
from moetune.domain.spelling import AS_FLAGS, spelled
from moetune.domain.terms import LayerTerms, PhaseTerms, StrategyTerms
from moetune.domain.units import format_chunks, format_share
from moetune.fit.costs import costs_of
from moetune.fit.speeds import PARTS, Slowdown, slowed
from moetune.report.why_not import ComparedChoice, Refusal, placed_otherwise
from moetune.solve.layer.choose import NOISE, WORTH
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.uncertainty import LayerChoice, chance_of_faster
from moetune.solve.trace import layer_spans, overlap_share, plan_step, plan_timelines

EXPLANATION_SCHEMA = "moetune.explanation/1"
_RULE = (
    f"Gains below {format_share(WORTH, digits=0)} over one chunk or over keeping all activations "
    f"are not taken, nor below {format_share(NOISE, digits=0)} over fewer chunks: the errors of "
    "measured costs are as large. The plan's reason: {}"
)


@dataclass(frozen=True, kw_only=True)
class LayerSubject(PricedPlan):
    """A layer's plan that is priced again."""

    plan: Plan
    kind: ClassVar[Literal["layer"]] = "layer"

    @property
    def strategies(self) -> tuple[StrategyTerms, ...]:
        """Every memory strategy with its best degree; empty if the layout leaves no choice."""
        return self.plan.terms.strategies if self.plan.terms else ()

    @property
    def note(self) -> str:
        """Parts that cannot be shown, with reasons; empty if everything can be shown."""
        if self.plan.terms is None:
            return "plans of schema 1 have no terms behind their times: make the plan again"
        return "" if self.profile else f"{self.missing}: the timeline cannot be drawn"

    @property
    def memory_limit_bytes(self) -> int | None:
        """A device's limit, by plan or profile, minus the rest of the model; None if unknown."""
        inputs = self.plan.inputs
        machine_bytes = self.profile.machine.plannable_bytes if self.profile else None
        limit = inputs.memory_limit_bytes or machine_bytes
        return limit and limit - inputs.pinned.memory_taken_bytes

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune explain` and of the service."""
        phases = {name: getattr(self.plan.terms, name, None) for name in ("forward", "backward")}
        values = {"plan": self.plan, **phases, "strategies": self.strategies, "note": self.note}
        return {"schema": EXPLANATION_SCHEMA, **encode(values)}

    @property
    def choice(self) -> ComparedChoice:
        """The plan's degree and strategy."""
        return _choice_of(self.plan)

    @property
    def alternatives(self) -> tuple[LostChoice, ...]:
        """The candidates in the plan, then the best choice of each other memory strategy."""
        lost = {degree_name(row): _lost(row) for row in self.plan.alternatives}
        for row in self.strategies:
            if not row.is_chosen:
                choice = Alternative(
                    forward_degree=row.forward_degree, backward_degree=row.backward_degree,
                    order=self.plan.pipeline.order if row.strategy == "none" else "interleaved",
                    strategy=row.strategy, step_seconds=row.step_seconds,
                    lost_because=row.lost_because,
                )  # fmt: skip
                lost[degree_name(choice)] = _lost(choice, row.peak_bytes)
        return tuple(lost.values())

    @property
    def rule(self) -> str:
        """The rule by which a plan may prefer a slower choice."""
        return _RULE.format(self.plan.decision.why)

    def asked(self, question: WhyNot) -> Asked:
        """Return the question's degree and strategy; raise InputError if they are wrong."""
        if question.layout is not None:
            raise InputError(
                f"--layout is for whole models, and plan {self.plan.id[:6]} is of one layer",
                "ask with --degree or --strategy",
            )
        texts = question.degree_texts
        if question.strategy is not None:
            texts["strategy"] = question.strategy
        names = dict.fromkeys(("forward-degree", "backward-degree"), "--degree")
        with spelled(replace(AS_FLAGS, names={**AS_FLAGS.names, **names})):
            answers = read_texts({flag.replace("-", "_"): text for flag, text in texts.items()})
            check_layer(changed_question(self.plan.inputs, answers))
        return Asked(texts=texts, pins=answers)

    def instead(self, asked: Asked) -> Instead:
        """Return the plan with these pins, or the plan without a memory limit if none fits."""
        try:
            plan = self._changed(asked.pins)
        except (InputError, InfeasiblePlanError) as error:
            choice = None
            with suppress(InputError, InfeasiblePlanError):
                choice = _choice_of(self._changed({**asked.pins, "memory_limit": LARGEST_BYTES}))
            return Instead(choice=choice, refused=Refusal.of(error))
        warnings = [warning for warning in plan.warnings if warning not in self.plan.warnings]
        return Instead(
            choice=_choice_of(plan), probability_faster=self._chance(plan),
            notes=(*placed_otherwise(self.plan, plan), *warnings),
        )  # fmt: skip

    @property
    def parts(self) -> tuple[str, ...]:
        """The machine's parts that can change a layer's step."""
        return PARTS

    def seconds(self, slowdown: Slowdown | None = None) -> float:
        """Return the seconds of the plan's choice on its machine or on a slower machine."""
        return plan_step(plan=self.plan, costs=slowed(self.costs, slowdown)).seconds

    def neighbours(self) -> Iterator[Neighbour]:
        """Yield a chunk more and less, other strategies, and 1 GiB more memory."""
        yield from self._degrees()
        for row in self.strategies:
            if row.strategy != self.plan.memory.strategy:
                note = "" if row.fits else "does not fit"
                yield Neighbour("strategy", degree_name(row), row.step_seconds, note)
        limit = (self.memory_limit_bytes or 0) + self.plan.inputs.pinned.memory_taken_bytes + GIB
        roomy = _choice_of(self._changed({"memory_limit": limit}))
        yield Neighbour("memory-limit", f"1 GiB more memory: {roomy.name}", roomy.step_seconds)

    def timelines(self) -> Timelines:
        """Return the timelines of both phases' streams."""
        forward, backward = plan_timelines(plan=self.plan, costs=self.costs)
        spans = layer_spans(plan=self.plan, costs=self.costs, forward=forward, backward=backward)
        return Timelines(
            processes=(("predicted", spans),),
            overlap=(overlap_share(forward.spans), overlap_share(backward.spans)),
        )

    @cached_property
    def costs(self) -> Costs:
        """The operation costs that the plan was solved with."""
        return costs_of(self.machine, allow_modelled=self.plan.inputs.pinned.allow_modelled)

    def _degrees(self) -> Iterator[Neighbour]:
        tokens = self.plan.inputs.tokens_per_rank
        decision = self.plan.decide(tokens)
        largest = self.plan.inputs.pinned.bounds.largest(tokens)
        for degree in (decision.degree - 1, decision.degree + 1):
            if 1 <= degree <= largest:
                choice = decision.with_degree(degree)
                step = plan_step(plan=self.plan, costs=self.costs, decision=choice)
                yield Neighbour("degree", degree_name(choice), step.seconds)

    def _changed(self, answers: Mapping[str, object]) -> Plan:
        return plan_again(changed_question(self.plan.inputs, answers), self.machine)

    def _chance(self, plan: Plan) -> float:
        """Return the share of refits under which another plan's step is shorter."""
        allowed = plan.inputs.pinned.allow_modelled
        return chance_of_faster(
            self._priced(self.plan), self._priced(plan),
            resamples=drawn_costs(self.machine, allow_modelled=allowed),
            tokens=self.plan.inputs.tokens_per_rank,
        )  # fmt: skip

    def _priced(self, plan: Plan) -> LayerChoice:
        costs = costs_of(self.machine, allow_modelled=plan.inputs.pinned.allow_modelled)
        layer = layer_costs(workload=plan.workload, costs=costs)
        return layer, plan.decide(self.plan.inputs.tokens_per_rank)


def degree_name(choice: Decision | Alternative | StrategyTerms) -> str:
    """Return "8 chunks, strategy none"."""
    chunks = format_chunks(choice.forward_degree, choice.backward_degree)
    return f"{chunks}, strategy {choice.strategy}"


def _choice_of(plan: Plan) -> ComparedChoice:
    times, decision = plan.predicted, plan.decide(plan.inputs.tokens_per_rank)
    return ComparedChoice(
        name=degree_name(decision),
        decision=_decision_texts(decision),
        step_seconds=times.step_seconds,
        p05_step_seconds=times.p05_step_seconds,
        p95_step_seconds=times.p95_step_seconds,
        parts=_parts(plan, plan.terms) if plan.terms else {},
        work=_work(plan, plan.terms) if plan.terms else {},
        needed_bytes=plan.needed_bytes,
    )


def _lost(choice: Alternative, peak_bytes: int | None = None) -> LostChoice:
    lost = ComparedChoice(
        name=degree_name(choice), decision=_decision_texts(choice),
        step_seconds=choice.step_seconds, needed_bytes=peak_bytes,
    )  # fmt: skip
    return LostChoice(lost, choice.lost_because)


def _decision_texts(choice: Decision | Alternative) -> dict[str, str]:
    return {
        "forward-degree": str(choice.forward_degree),
        "backward-degree": str(choice.backward_degree),
        "strategy": choice.strategy, "order": choice.order,
    }  # fmt: skip


def _parts(plan: Plan, terms: LayerTerms) -> dict[str, float]:
    phases = terms.forward, terms.backward
    exposed = "exposed communication" + (" and copies" if _copies(plan) else "")
    computed = sum(phase.total_compute_seconds for phase in phases)
    return {
        "computation": computed,
        exposed: sum(phase.seconds for phase in phases) - computed,
        "gate and permutation": plan.predicted.overhead_seconds,
    }


def _work(plan: Plan, terms: LayerTerms) -> dict[str, float]:
    phases = terms.forward, terms.backward
    work = {"communication": sum(phase.total_transfer_seconds for phase in phases)}
    if _copies(plan):
        work["copies"] = sum(map(_copy_seconds, phases))
    return work


def _copies(plan: Plan) -> bool:
    return plan.memory.strategy in OFFLOADS_INPUT | OFFLOADS_MIDDLE


def _copy_seconds(phase: PhaseTerms) -> float:
    """Return the seconds of a phase's copies: its work without transfers and experts."""
    work = phase.seconds + phase.hidden_seconds
    return max(0.0, work - phase.total_transfer_seconds - phase.total_compute_seconds)
