"""A plan's choice, and those that it has kept beside it, as they are compared."""

from collections.abc import Iterator

from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE
from moetune.domain.layout import Layout
from moetune.domain.plan import Alternative, Decision, Plan
from moetune.domain.terms import LayerTerms, PhaseTerms
from moetune.solve.layout.words import BINDING_WORDS, name_layout, seconds_by_binding
from moetune.workflows.compared import ComparedChoice, degrees_name, is_same_step
from moetune.workflows.plan_changes import needed_bytes, step_seconds


def choice_of(plan: Plan) -> ComparedChoice:
    """Return the plan's own choice: of a model its layout, of a layer its degrees."""
    transformer, times, terms = plan.transformer, plan.predicted, plan.terms
    if transformer is not None:
        sure, kinds = transformer.confidence, seconds_by_binding(transformer.parts)
        return ComparedChoice(
            name=_layout_name(plan),
            decision=_layout_decision(plan.layout, transformer.micro_batch_sequences)
            | {"zero": str(transformer.zero).lower()} | _degrees_of(plan),
            step_seconds=transformer.step_seconds,
            p05_step_seconds=sure.p05_step_seconds if sure else None,
            p95_step_seconds=sure.p95_step_seconds if sure else None,
            parts={BINDING_WORDS[kind]: seconds for kind, seconds in kinds.items() if seconds},
            needed_bytes=needed_bytes(plan),
        )  # fmt: skip
    decision = plan.decide(plan.inputs.tokens_per_rank)
    return ComparedChoice(
        name=degrees_name(decision),
        decision=_layer_decision(decision),
        step_seconds=times.step_seconds,
        p05_step_seconds=times.p05_step_seconds,
        p95_step_seconds=times.p95_step_seconds,
        parts=_parts(plan, terms) if terms else {},
        work=_work(plan, terms) if terms else {},
        needed_bytes=needed_bytes(plan),
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


def _layout_name(plan: Plan) -> str:
    transformer = plan.transformer
    assert transformer is not None  # noqa: S101 - only whole models have a layout
    ways = [f"micro-batch {transformer.micro_batch_sequences}"]
    ways += ["ZeRO"] if transformer.zero else []
    ways += ["blocks recomputed"] if transformer.recompute else []
    degrees = plan.pipeline.forward_degree, plan.pipeline.backward_degree
    if transformer.moe_every and max(degrees) > 1:
        ways.append(f"{degrees[0]} and {degrees[1]} chunks")
    return " · ".join([name_layout(plan.layout), *ways])


def _layout_decision(layout: Layout, micro_batch: int | None = None) -> dict[str, str]:
    found = {name: str(getattr(layout, name)) for name in ("dp", "ep", "tp", "pp")}
    found["expert-parallel"] = layout.expert_parallel
    return found if micro_batch is None else {**found, "micro-batch": str(micro_batch)}


def _layer_decision(choice: Decision | Alternative) -> dict[str, str]:
    return {
        "forward-degree": str(choice.forward_degree),
        "backward-degree": str(choice.backward_degree),
        "strategy": choice.strategy, "order": choice.order,
    }  # fmt: skip


def _degrees_of(plan: Plan) -> dict[str, str]:
    return {
        "forward-degree": str(plan.pipeline.forward_degree),
        "backward-degree": str(plan.pipeline.backward_degree),
        "strategy": plan.memory.strategy,
    }


def kept_candidates(plan: Plan) -> Iterator[Alternative]:
    """Yield the plan's alternatives: of a model its layouts, of a layer all its choices."""
    if plan.transformer is not None:
        yield from (one for one in plan.alternatives if one.layout is not None)
        return
    yield from plan.alternatives
    for one in plan.terms.strategies if plan.terms else ():
        if not one.is_chosen:
            yield Alternative(
                forward_degree=one.forward_degree, backward_degree=one.backward_degree,
                order=plan.pipeline.order if one.strategy == "none" else "interleaved",
                strategy=one.strategy, step_seconds=one.step_seconds,
                lost_because=one.lost_because, memory_bytes=one.peak_bytes,
            )  # fmt: skip


def kept_choice(one: Alternative) -> ComparedChoice:
    """Return a candidate as far as a plan keeps it."""
    if one.layout is not None:
        return ComparedChoice(
            name=name_layout(one.layout), decision=_layout_decision(one.layout),
            step_seconds=one.step_seconds, needed_bytes=one.memory_bytes,
        )  # fmt: skip
    return ComparedChoice(
        name=degrees_name(one), decision=_layer_decision(one), step_seconds=one.step_seconds,
        needed_bytes=one.memory_bytes,
    )  # fmt: skip


def kept_like(plan: Plan, other: Plan) -> Alternative | None:
    """Return the candidate that the plan has kept of another plan's choice."""
    decision = choice_of(other).decision
    for one in kept_candidates(plan):
        kept = kept_choice(one)
        is_same = kept.decision.items() <= decision.items()
        if is_same and is_same_step(kept.step_seconds, step_seconds(other)):
            return one
    return None
