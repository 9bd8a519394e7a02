"""A plan's choice, and those that it has kept beside it, as they are compared."""

from collections.abc import Iterator
from dataclasses import dataclass

from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE
from moetune.domain.plan import Alternative, Decision, LayerTerms, PhaseTerms, Plan
from moetune.workflows.compared import ComparedChoice, degrees_name, is_same_step


def choice_of(plan: Plan) -> ComparedChoice:
    """Return the plan's own choice."""
    times, terms = plan.predicted, plan.terms
    decision = plan.decide(plan.inputs.tokens_per_rank)
    return ComparedChoice(
        name=degrees_name(decision),
        decision=_layer_decision(decision),
        step_seconds=times.step_seconds,
        p05_step_seconds=times.p05_step_seconds,
        p95_step_seconds=times.p95_step_seconds,
        parts=_parts(plan, terms) if terms else {},
        work=_work(plan, terms) if terms else {},
        needed_bytes=plan.needed_bytes,
    )


def _parts(plan: Plan, terms: LayerTerms) -> dict[str, float]:
    """Return seconds of a layer's step that add up to it."""
    phases = terms.forward, terms.backward
    exposed = "exposed communication"
    if plan.memory.strategy in OFFLOADS_INPUT | OFFLOADS_MIDDLE:
        exposed += " and copies"
    computed = sum(one.total_compute_seconds for one in phases)
    return {
        "computation": computed,
        exposed: sum(one.seconds for one in phases) - computed,
        "gate and permutation": plan.predicted.overhead_seconds,
    }


def _work(plan: Plan, terms: LayerTerms) -> dict[str, float]:
    phases = terms.forward, terms.backward
    found = {"communication": sum(one.total_transfer_seconds for one in phases)}
    if plan.memory.strategy in OFFLOADS_INPUT | OFFLOADS_MIDDLE:
        found["copies"] = sum(map(_copy_seconds, phases))
    return found


def _copy_seconds(phase: PhaseTerms) -> float:
    """Return a phase's copies: what its work has beside transfers and experts."""
    work = phase.seconds + phase.hidden_seconds
    return max(0.0, work - phase.total_transfer_seconds - phase.total_compute_seconds)


def _layer_decision(choice: Decision | Alternative) -> dict[str, str]:
    return {
        "forward-degree": str(choice.forward_degree),
        "backward-degree": str(choice.backward_degree),
        "strategy": choice.strategy, "order": choice.order,
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptChoice:
    """A candidate as far as a plan keeps it, and why it lost."""

    choice: ComparedChoice
    lost_because: str


def kept_choices(plan: Plan) -> Iterator[KeptChoice]:
    """Yield the plan's alternatives, and its memory strategies."""
    for one in plan.alternatives:
        yield _kept(one, None)
    for row in plan.terms.strategies if plan.terms else ():
        if not row.is_chosen:
            other = Alternative(
                forward_degree=row.forward_degree, backward_degree=row.backward_degree,
                order=plan.pipeline.order if row.strategy == "none" else "interleaved",
                strategy=row.strategy, step_seconds=row.step_seconds,
                lost_because=row.lost_because,
            )  # fmt: skip
            yield _kept(other, row.peak_bytes)


def _kept(one: Alternative, peak_bytes: int | None) -> KeptChoice:
    choice = ComparedChoice(
        name=degrees_name(one), decision=_layer_decision(one), step_seconds=one.step_seconds,
        needed_bytes=peak_bytes,
    )  # fmt: skip
    return KeptChoice(choice=choice, lost_because=one.lost_because)


def kept_because(plan: Plan, other: Plan) -> str:
    """Return why the plan says that another plan's choice lost; "" where it has not kept it."""
    decision = choice_of(other).decision
    for kept in kept_choices(plan):
        is_same = kept.choice.decision.items() <= decision.items()
        if is_same and is_same_step(kept.choice.step_seconds, other.step_seconds):
            return kept.lost_because
    return ""
