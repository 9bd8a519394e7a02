"""A layer's plan as sections: the decision, its time and memory, and its uncertainty."""

from collections.abc import Iterator

from moetune.app.subjects import LayerSubject
from moetune.app.views.words import (
    LEAST_REGRET,
    device_word,
    memory_words,
    mfu_words,
    plan_scope,
    probability_words,
    routing_words,
    speed_cell,
    speed_words,
    sure_words,
    suspect_words,
    trust_words,
)
from moetune.domain.plan import Memory, PhaseTerms, Plan
from moetune.domain.profile import Profile
from moetune.domain.samples import LAUNCHES, RowsPoint
from moetune.domain.units import format_bytes, format_seconds
from moetune.report.section import (
    EMPTY,
    Cell,
    Highlight,
    Section,
    Table,
    percent,
    plural,
    seconds_span,
    sentence,
)
from moetune.solve.layer.words import STRATEGY_WORDS

_ORDERS = {"dispatch_first": "all dispatches first", "interleaved": "interleaved"}


def answer_section(subject: LayerSubject, *, has_reasons: bool = False) -> Section:
    """Return the plan's workload, its decision, and the predicted times and bytes.

    Args:
        has_reasons: whether a section with the reason follows, so that it is omitted here.
    """
    plan = subject.plan
    is_odd = is_one_chunk(plan) or plan.memory.strategy != "none"
    why = (plan.decision.why,) if is_odd and not has_reasons else ()
    return Section(
        name="answer",
        title=plan.name,
        scope=plan_scope(plan, profile=subject.profile),
        doubts=_suspect(plan),
        paragraphs=(plan_decision(plan), *routing_words(plan), *why),
        highlights=tuple(_layer_highlights(subject)),
        summary=_layer_summary(subject),
        tables=(_phases(subject),),
    )


def _suspect(plan: Plan) -> tuple[str, ...]:
    return tuple(suspect_words(plan.inputs.profile, plan.profile_quality))


def uncertainty_section(plan: Plan) -> Section:
    """Return the probability that the choice is best, and the plan's warnings."""
    notes = map(sentence, (*plan.warnings, *_too_fast(plan)))
    return Section(name="uncertainty", paragraphs=(how_sure(plan),), notes=tuple(notes))


def _too_fast(plan: Plan) -> Iterator[str]:
    """Yield that the profile's products are faster than the device can be."""
    speed = plan.throughput
    if speed is not None and speed.mfu is not None and speed.mfu > 1:
        yield (
            f"an MFU above 100 %: the profile {plan.inputs.profile!r} multiplies in "
            f"{plan.inputs.dtype} faster than the data sheet's peak, and may have been measured in "
            "another element type"
        )


def _layer_highlights(subject: LayerSubject) -> Iterator[Highlight]:
    plan = subject.plan
    times, verdict = plan.predicted, plan.decision
    step, regret = times.step_seconds, verdict.expected_regret
    gain = times.sequential_step_seconds / step if step else None
    low, high = map(format_seconds, (times.p05_step_seconds, times.p95_step_seconds))
    yield Highlight(name="One step of the layer", cell=Cell.seconds(step), note=f"{low} to {high}")
    yield Highlight(
        name="Against one chunk",
        cell=Cell(text=f"{gain:.2f} ×" if gain else "–", value=gain),
        note="as fast",
    )
    yield from _speed_highlight(plan)
    yield _memory_highlight(subject, plan.needed_bytes)
    binds = Cell.words(verdict.binding.capitalize())
    yield Highlight(name="What binds", cell=binds, note=f"{trust_words(plan)} costs")
    yield _sure_highlight("choice", verdict.probability_best, regret)


def _sure_highlight(what: str, probability: float, regret: float) -> Highlight:
    slower = f"; {percent(regret)} slower on average" if regret >= LEAST_REGRET else ""
    return Highlight(
        name="How sure",
        cell=Cell(text=probability_words(probability), value=probability, unit="1"),
        note=f"that no other {what} is better{slower}",
    )


def _memory_highlight(subject: LayerSubject, num_bytes: int) -> Highlight:
    limit = subject.memory_limit_bytes
    return Highlight(
        name="Memory of one device",
        cell=Cell.size(num_bytes),
        note=f"of {format_bytes(limit)}" if limit else "",
    )


def _layer_summary(subject: LayerSubject) -> str:
    plan, times = subject.plan, subject.plan.predicted
    span = seconds_span(times.step_seconds, times.p05_step_seconds, times.p95_step_seconds)
    text = f"One step of the layer: {span}"
    reuses = plan.memory.strategy != "none"
    if not is_one_chunk(plan) and times.step_seconds and not reuses:
        text += f", {times.sequential_step_seconds / times.step_seconds:.2f} × as fast as one chunk"
    binding = plan.decision.binding
    text += _speed(subject)
    return f"{text}. {binding.capitalize()} {'bind' if binding == 'copies' else 'binds'}."


def _speed(subject: LayerSubject) -> str:
    """Return ", 423 TFLOP/s a GPU, MFU 42.8 %"; of a step of no time an empty text."""
    speed = subject.plan.throughput
    return f", {speed_words(speed, device_word(subject.profile))}" if speed else ""


def _speed_highlight(plan: Plan) -> Iterator[Highlight]:
    speed = plan.throughput
    if speed is not None:
        note = f"on each device, {mfu_words(speed)}"
        yield Highlight(name="Model FLOP/s", cell=speed_cell(speed), note=note)


def _phases(subject: LayerSubject) -> Table:
    plan, times = subject.plan, subject.plan.predicted
    rows = [
        _phase("forward", times.sequential_forward_seconds, times.forward_seconds, subject.forward),
        _phase(
            "backward",
            times.sequential_backward_seconds,
            times.backward_seconds,
            subject.backward,
        ),
    ]
    if times.overhead_seconds:
        around = "gate" if plan.kind == "tensor" else "gate, sorting"
        around = "gate, choices" if plan.workload.gathers else around
        has_launches = subject.profile is not None and _launches_known(subject.profile)
        name = Cell.words(f"{around}, launches" if has_launches else around)
        overhead = Cell.seconds(times.overhead_seconds)
        rows.append((name, overhead, overhead, EMPTY))
    return Table(
        name="phases",
        header=("phase", "one chunk", "planned", "exposed communication"),
        rows=tuple(rows),
        notes=(memory_words(subject, plan.needed_bytes, _memory_parts(plan.memory)),),
        is_narrow=True,
    )


def _launches_known(profile: Profile) -> bool:
    ops = {one.op for one in profile.rows}
    ops |= {one.point.op for one in profile.samples if isinstance(one.point, RowsPoint)}
    return not ops.isdisjoint(LAUNCHES)


def _memory_parts(memory: Memory) -> str:
    """Return what the bytes are; an older plan has the papers' formulas alone."""
    parts = (
        f"states {format_bytes(memory.state_bytes)}, "
        f"activations {format_bytes(memory.activation_bytes)}, "
        f"buffers {format_bytes(memory.buffer_bytes)}"
    )
    if memory.peak_bytes is None:
        return parts
    return f"the peak of a step as the layer runs it; by the papers' formulas {parts}"


def _phase(
    name: str, one_chunk: float, planned: float, terms: PhaseTerms | None
) -> tuple[Cell, ...]:
    exposed = None if terms is None else terms.exposed_communication_seconds
    return Cell.words(name), Cell.seconds(one_chunk), Cell.seconds(planned), Cell.seconds(exposed)


def plan_decision(plan: Plan) -> str:
    """Return the decision in one or two sentences."""
    if plan.kind == "tensor":
        return _tensor_decision(plan)
    pipeline, strategy = plan.pipeline, plan.memory.strategy
    memory = "keep all activations (strategy none)"
    if strategy != "none":
        memory = f"reuse memory with strategy {strategy}: {STRATEGY_WORDS[strategy]}"
    if is_one_chunk(plan):
        return f"Leave the tokens in one chunk, forward and backward, and {memory}."
    is_usual = pipeline.order == "dispatch_first" or strategy != "none"
    order = "" if is_usual else f", {_ORDERS[pipeline.order]}"
    return f"Cut the tokens into {degrees_words(plan)}{order}, and {memory}."


def how_sure(plan: Plan) -> str:
    """Return the probability and the regret of the layer's choice, and the next best one."""
    verdict, next_best = plan.decision, plan.decision.runner_up
    text = sure_words("choice", verdict.probability_best, verdict.expected_regret)
    if next_best is None:
        return f"{text}. There is no other choice."
    step = plan.predicted.step_seconds
    slower = next_best.step_seconds / step - 1 if step else 0.0
    degrees = f"{next_best.forward_degree} and {next_best.backward_degree}"
    if next_best.strategy != plan.memory.strategy:
        degrees += f" with strategy {next_best.strategy}"
    return f"{text}. Next best: {degrees} ({percent(slower, sign=True)})."


def degrees_words(plan: Plan) -> str:
    """Return "2 chunks forward and 5 backward"."""
    pipeline = plan.pipeline
    forward = plural(pipeline.forward_degree, "chunk")
    return f"{forward} forward and {pipeline.backward_degree} backward"


def is_one_chunk(plan: Plan) -> bool:
    """Return whether both phases run one chunk, and so hide no communication."""
    return plan.pipeline.forward_degree == plan.pipeline.backward_degree == 1


def _tensor_decision(plan: Plan) -> str:
    in_shards = plan.workload.sequence_parallel
    if is_one_chunk(plan):
        exchanges = "one all-gather and one reduce-scatter" if in_shards else "one all-reduce"
        return f"Leave the tokens in one chunk, forward and backward: {exchanges} each way."
    how = "each chunk's all-reduce travels"
    if in_shards:
        how = "behind one all-gather each way, each chunk's reduce-scatter travels"
    return f"Cut the tokens into {degrees_words(plan)}: {how} behind the next one's experts."
