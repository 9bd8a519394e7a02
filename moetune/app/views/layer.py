"""A layer's plan as sections: the decision, its time and memory, and its uncertainty."""

from collections.abc import Iterator

from moetune.app.subjects import LayerSubject
from moetune.domain.plan import Plan
from moetune.domain.samples import LAUNCHES, RowsPoint
from moetune.domain.units import format_bytes, format_chunks, format_seconds, format_share
from moetune.report.reasons import STRATEGY_WORDS
from moetune.report.section import (
    EMPTY,
    Cell,
    Highlight,
    Section,
    Table,
    chance,
    seconds_span,
    sentence,
)
from moetune.report.words import (
    LEAST_REGRET,
    device_word,
    kernel_words,
    mfu_words,
    plan_scope,
    routing_words,
    speed_cell,
    speed_words,
    sure_words,
    suspect_words,
    trust_words,
)

_ORDERS = {"dispatch_first": "all dispatches first", "interleaved": "interleaved"}


def answer_section(subject: LayerSubject, *, has_reasons: bool) -> Section:
    """Return a plan's workload, decision, times and bytes; omit the reason if `has_reasons`."""
    plan = subject.plan
    is_odd = is_one_chunk(plan) or plan.memory.strategy != "none"
    why = (plan.decision.why,) if is_odd and not has_reasons else ()
    return Section(
        name="answer",
        title=plan.name,
        scope=plan_scope(plan, profile=subject.profile),
        doubts=suspect_words(plan),
        paragraphs=(
            plan_decision(plan),
            *routing_words(plan),
            *kernel_words(plan),
            *why,
            how_sure(plan),
        ),
        highlights=tuple(_highlights(subject)),
        summary=_summary(subject, has_binding=not why),
        tables=(_phases(subject),),
        notes=tuple(map(sentence, (*plan.warnings, *_too_fast(plan)))),
    )


def _too_fast(plan: Plan) -> Iterator[str]:
    """Yield a warning if the profile's GEMMs exceed the device's peak."""
    speed = plan.throughput
    if speed is not None and speed.mfu is not None and speed.mfu > 1:
        yield (
            f"an MFU above 100 %: the profile {plan.inputs.profile!r} multiplies in "
            f"{plan.inputs.dtype} faster than the data sheet's peak, and may have been measured in "
            "another element type"
        )


def _highlights(subject: LayerSubject) -> Iterator[Highlight]:
    plan, limit = subject.plan, subject.memory_limit_bytes
    times, verdict, speed = plan.predicted, plan.decision, plan.throughput
    step, regret = times.step_seconds, verdict.expected_regret
    low, high = map(format_seconds, (times.p05_step_seconds, times.p95_step_seconds))
    yield Highlight("One step of the layer", Cell.seconds(step), f"{low} to {high}")
    gain = times.sequential_step_seconds / step if step else None
    against = Cell(text=f"{gain:.2f} ×" if gain else "–", value=gain)
    yield Highlight("Against one chunk", against, "as fast")
    if speed is not None:
        yield Highlight("Model FLOP/s", speed_cell(speed), f"on each device, {mfu_words(speed)}")
    of_limit = f"of {format_bytes(limit)}" if limit else ""
    yield Highlight("Memory of one device", Cell.size(plan.needed_bytes), of_limit)
    binds = Cell.words(verdict.binding.capitalize())
    yield Highlight("What binds", binds, f"{trust_words(plan)} costs")
    share = verdict.probability_best
    sure = Cell(text=chance(share), value=share, unit="1")
    slower = f"; {format_share(regret)} slower on average" if regret >= LEAST_REGRET else ""
    yield Highlight("How sure", sure, f"that no other choice is better{slower}")


def _summary(subject: LayerSubject, *, has_binding: bool) -> str:
    plan, times = subject.plan, subject.plan.predicted
    span = seconds_span(times.step_seconds, times.p05_step_seconds, times.p95_step_seconds)
    text = f"One step of the layer: {span}"
    if not is_one_chunk(plan) and times.step_seconds and plan.memory.strategy == "none":
        text += f", {times.sequential_step_seconds / times.step_seconds:.2f} × as fast as one chunk"
    if speed := plan.throughput:
        text += f", {speed_words(speed, device_word(subject.profile))}"
    binding = plan.decision.binding
    binds = f" {binding.capitalize()} {'bind' if binding == 'copies' else 'binds'}."
    return f"{text}.{binds if has_binding else ''}"


def _phases(subject: LayerSubject) -> Table:
    plan, times = subject.plan, subject.plan.predicted
    forward, backward = (plan.terms.forward, plan.terms.backward) if plan.terms else (None, None)
    phases = (
        ("forward", times.sequential_forward_seconds, times.forward_seconds, forward),
        ("backward", times.sequential_backward_seconds, times.backward_seconds, backward),
    )
    rows = [
        (
            Cell.words(name), Cell.seconds(one_chunk), Cell.seconds(planned),
            Cell.seconds(terms.exposed_communication_seconds if terms else None),
        )
        for name, one_chunk, planned, terms in phases
    ]  # fmt: skip
    if times.overhead_seconds:
        around = "gate" if plan.kind == "tensor" else "gate, sorting"
        ops = set[str]()
        if (profile := subject.profile) is not None:
            points = (sample.point for sample in profile.samples)
            ops = {row.op for row in profile.rows}
            ops |= {point.op for point in points if isinstance(point, RowsPoint)}
        name = Cell.words(around if ops.isdisjoint(LAUNCHES) else f"{around}, launches")
        overhead = Cell.seconds(times.overhead_seconds)
        rows.append((name, overhead, overhead, EMPTY))
    return Table(
        name="phases",
        header=("phase", "one chunk", "planned", "exposed communication"),
        rows=tuple(rows),
        notes=(memory_words(subject),),
        is_narrow=True,
    )


def memory_words(subject: LayerSubject) -> str:
    """Return the memory of a device, its limit, its parts, and what the limit leaves free."""
    plan, profile, limit = subject.plan, subject.profile, subject.memory_limit_bytes
    memory = plan.memory
    parts = (
        f"states {format_bytes(memory.state_bytes)}, "
        f"activations {format_bytes(memory.activation_bytes)}, "
        f"buffers {format_bytes(memory.buffer_bytes)}"
    )
    if memory.peak_bytes is not None:
        parts = f"the peak of a step as the layer runs it; by the papers' formulas {parts}"
    of_limit = f" of {format_bytes(limit)}" if limit else ""
    words = (
        f"Memory: {format_bytes(plan.needed_bytes)}{of_limit} per {device_word(profile)}: {parts}."
    )
    machine = None if profile is None else profile.machine
    free = machine.memory_bytes - machine.plannable_bytes if machine else 0
    if machine is None or not free or plan.inputs.memory_limit_bytes is not None:
        return words
    share = format_share(free / machine.memory_bytes, digits=0)
    return (
        f"{words} The limit leaves {format_bytes(free)} ({share}) free for the CUDA context, NCCL "
        "and fragmentation; a memory limit sets another."
    )


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
    return f"Cut the tokens into {_chunks(plan)}{order}, and {memory}."


def how_sure(plan: Plan) -> str:
    """Return the probability and the regret of the layer's choice, and the next best choice."""
    verdict, next_best = plan.decision, plan.decision.runner_up
    text = sure_words("choice", verdict.probability_best, verdict.expected_regret)
    if next_best is None:
        return f"{text}. There is no other choice."
    step = plan.predicted.step_seconds
    slower = next_best.step_seconds / step - 1 if step else 0.0
    chunks = format_chunks(next_best.forward_degree, next_best.backward_degree)
    if next_best.strategy != plan.memory.strategy:
        chunks += f" with strategy {next_best.strategy}"
    return f"{text}. Next best: {chunks} ({format_share(slower, sign=True)})."


def _chunks(plan: Plan) -> str:
    return format_chunks(plan.pipeline.forward_degree, plan.pipeline.backward_degree)


def is_one_chunk(plan: Plan) -> bool:
    """Return whether both phases run in one chunk, and so hide no communication."""
    return plan.pipeline.forward_degree == plan.pipeline.backward_degree == 1


def _tensor_decision(plan: Plan) -> str:
    if is_one_chunk(plan):
        return "Leave the tokens in one chunk, forward and backward: one all-reduce each way."
    return (
        f"Cut the tokens into {_chunks(plan)}: each chunk's all-reduce travels behind the next "
        "one's experts."
    )
