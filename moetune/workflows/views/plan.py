"""A plan as sections: what to do, the time, the memory, and how sure that is."""

from collections.abc import Iterator

from moetune.domain.model import MODELS
from moetune.domain.plan import Chunks, Plan, TransformerPlan
from moetune.domain.profile import Profile
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
from moetune.solve.layer.memory import total_bytes
from moetune.solve.layer.words import HOW
from moetune.solve.layout.words import WORDS, kinds_of, name_memory
from moetune.workflows.explain import Explanation, PhaseTerms
from moetune.workflows.views.layouts import layouts_section, parts_section

_CERTAIN = 0.995
"""Share of refits from which on a probability is "over 99 %": that all agree is not certainty."""
_LEAST_REGRET = 5e-4
_ORDERS = {"dispatch_first": "all dispatches first", "interleaved": "interleaved"}


def plan_sections(explanation: Explanation) -> tuple[Section, ...]:
    """Return what to do, what it takes, what it was chosen from, and how sure that is."""
    plan = explanation.plan
    answer, doubts = answer_section(explanation), _doubts(plan)
    if plan.transformer is None:
        return answer, doubts
    return answer, layouts_section(explanation), parts_section(plan), doubts


def page_sections(explanation: Explanation) -> tuple[Section, ...]:
    """Return the same for a page that goes on with `reasons`, which have the layouts and why."""
    return answer_section(explanation, has_reasons=True), _doubts(explanation.plan)


def answer_section(explanation: Explanation, *, has_reasons: bool = False) -> Section:
    """Return what the plan is for, what to do, and the times and bytes of it.

    Args:
        has_reasons: whether a section about why follows anyway.
    """
    plan = explanation.plan
    if plan.transformer is not None:
        return _model_answer(explanation, plan.transformer)
    is_odd = is_one_chunk(plan) or plan.memory.strategy != "none"
    why = (plan.decision.why,) if is_odd and not has_reasons else ()
    return Section(
        name="answer",
        title=plan_name(plan),
        scope=plan_scope(plan, profile=explanation.profile),
        paragraphs=(plan_decision(plan), *why),
        highlights=tuple(_layer_highlights(explanation)),
        summary=_layer_summary(plan),
        tables=(_phases(explanation),),
    )


def plan_name(plan: Plan) -> str:
    """Return "GPT-XL MoE layer", or what a layer or model without a name is."""
    model, layer = MODELS.get(plan.inputs.model or ""), plan.inputs.layer
    if plan.transformer is not None:
        return model.title if model else f"Transformer {layer.d_model} wide"
    name = model.title if model else f"MoE layer {layer.d_model} × {layer.d_hidden}"
    return name + (" layer" if name.endswith("MoE") else "")


def plan_scope(plan: Plan, *, profile: Profile | None = None) -> str:
    """Return "64 experts over 64 GPUs · 8,192 tokens per GPU · bfloat16".

    Args:
        profile: says what a rank is.
    """
    inputs, whole, device = plan.inputs, plan.transformer, device_word(profile)
    tokens, devices = plural(inputs.tokens_per_rank, "token"), plural(inputs.world_size, device)
    experts = plural(inputs.layer.num_experts, "expert")
    if whole is not None:
        layers = plural(whole.num_layers, "layer")
        if whole.moe_every:
            layers += f", {_every(whole.moe_every)} with experts · {experts}"
        return f"{layers} · {devices} · {tokens} per {device} · {inputs.dtype}"
    each = f"on every {device}" if is_tensor(plan) else f"per {device}"
    if plan.workload.sequence_parallel:
        each = f"in shards, one per {device}"
    return f"{experts} over {devices} · {tokens} {each} · {inputs.dtype}"


def plan_decision(plan: Plan) -> str:
    """Return what to do, in one sentence or two."""
    if plan.transformer is not None:
        return _model_decision(plan, plan.transformer)
    if is_tensor(plan):
        return _tensor_decision(plan)
    pipeline, strategy = plan.pipeline, plan.memory.strategy
    kept = "keep all activations (strategy none)"
    if strategy != "none":
        kept = f"reuse memory with strategy {strategy}: {HOW[strategy]}"
    if is_one_chunk(plan):
        return f"Leave the tokens in one chunk, forward and backward, and {kept}."
    is_usual = pipeline.order == "dispatch_first" or strategy != "none"
    order = "" if is_usual else f", {_ORDERS[pipeline.order]}"
    return f"Cut the tokens into {_degrees(plan)}{order}, and {kept}."


def how_sure(plan: Plan) -> str:
    """Return the probability and the regret of the choice, and the next best."""
    verdict, next_best = plan.decision, plan.decision.runner_up
    text = f"How sure: {_probability(verdict.probability_best)} that no other choice is better"
    if verdict.expected_regret >= _LEAST_REGRET:
        text += f"; if wrong, {percent(verdict.expected_regret)} slower on average"
    if next_best is None:
        return f"{text}. There is no other choice."
    step = plan.predicted.step_seconds
    slower = next_best.step_seconds / step - 1 if step else 0.0
    degrees = f"{next_best.forward_degree} and {next_best.backward_degree}"
    if next_best.strategy != plan.memory.strategy:
        degrees += f" with strategy {next_best.strategy}"
    return f"{text}. Next best: {degrees} ({percent(slower, sign=True)})."


def is_one_chunk(plan: Plan) -> bool:
    """Return whether nothing is cut, and so nothing hidden."""
    return plan.pipeline.forward_degree == plan.pipeline.backward_degree == 1


def is_tensor(plan: Plan) -> bool:
    """Return whether the experts are shared by a tensor-parallel group."""
    return plan.layout.expert_parallel == "tensor"


def device_word(profile: Profile | None) -> str:
    """Return what a rank is called: "GPU" where the profile says so."""
    return "GPU" if profile is not None and profile.machine.kind == "cuda" else "rank"


def _doubts(plan: Plan) -> Section:
    """Return how sure the choice is; of a model without experts nothing was drawn."""
    whole = plan.transformer
    paragraphs = (how_sure(plan),) if whole is None else ()
    return Section(name="doubts", paragraphs=paragraphs, notes=tuple(map(sentence, plan.warnings)))


def _layer_highlights(explanation: Explanation) -> Iterator[Highlight]:
    plan = explanation.plan
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
    yield _memory_highlight(explanation, total_bytes(plan.memory))
    binds = Cell.words(verdict.binding.capitalize())
    yield Highlight(name="What binds", cell=binds, note=f"{times.trust} costs")
    sure = verdict.probability_best
    yield Highlight(
        name="No other choice is better",
        cell=Cell(text=_probability(sure), value=sure, unit="1"),
        note=f"if wrong, {percent(regret)} slower"
        if regret >= _LEAST_REGRET
        else "of refits agree",
    )


def _memory_highlight(explanation: Explanation, num_bytes: int) -> Highlight:
    limit = explanation.memory_limit_bytes
    return Highlight(
        name="Memory of one device",
        cell=Cell.size(num_bytes),
        note=f"of {format_bytes(limit)}" if limit else "",
    )


def _layer_summary(plan: Plan) -> str:
    times = plan.predicted
    span = seconds_span(times.step_seconds, times.p05_step_seconds, times.p95_step_seconds)
    text = f"One step of the layer: {span}"
    reuses = plan.memory.strategy != "none"
    if not is_one_chunk(plan) and times.step_seconds and not reuses:
        text += f", {times.sequential_step_seconds / times.step_seconds:.2f} × as fast as one chunk"
    binding = plan.decision.binding
    return f"{text}. {binding.capitalize()} {'bind' if binding == 'copies' else 'binds'}."


def _phases(explanation: Explanation) -> Table:
    plan, times = explanation.plan, explanation.plan.predicted
    rows = [
        _phase(
            "forward", times.sequential_forward_seconds, times.forward_seconds, explanation.forward
        ),
        _phase(
            "backward",
            times.sequential_backward_seconds,
            times.backward_seconds,
            explanation.backward,
        ),
    ]
    if times.overhead_seconds:
        around = "gate" if is_tensor(plan) else "gate, sorting"
        name = Cell.words("gate, choices" if plan.workload.gathers else around)
        overhead = Cell.seconds(times.overhead_seconds)
        rows.append((name, overhead, overhead, EMPTY))
    memory = plan.memory
    parts = (
        f"states {format_bytes(memory.state_bytes)}, "
        f"activations {format_bytes(memory.activation_bytes)}, "
        f"buffers {format_bytes(memory.buffer_bytes)}"
    )
    return Table(
        name="phases",
        header=("phase", "one chunk", "planned", "exposed communication"),
        rows=tuple(rows),
        notes=(_memory_words(explanation, total_bytes(memory), parts),),
        is_narrow=True,
    )


def _phase(
    name: str, one_chunk: float, planned: float, terms: PhaseTerms | None
) -> tuple[Cell, ...]:
    exposed = None if terms is None else terms.exposed_communication_seconds
    return Cell.words(name), Cell.seconds(one_chunk), Cell.seconds(planned), Cell.seconds(exposed)


def _memory_words(explanation: Explanation, num_bytes: int, parts: str) -> str:
    """Return what one device needs, of what, and what for."""
    limit = explanation.memory_limit_bytes
    of_limit = f" of {format_bytes(limit)}" if limit else ""
    device = device_word(explanation.profile)
    return f"Memory: {format_bytes(num_bytes)}{of_limit} per {device}: {parts}."


def _tensor_decision(plan: Plan) -> str:
    in_shards = plan.workload.sequence_parallel
    if is_one_chunk(plan):
        exchanges = "one all-gather and one reduce-scatter" if in_shards else "one all-reduce"
        return f"Leave the tokens in one chunk, forward and backward: {exchanges} each way."
    how = "each chunk's all-reduce travels"
    if in_shards:
        how = "behind one all-gather each way, each chunk's reduce-scatter travels"
    return f"Cut the tokens into {_degrees(plan)}: {how} behind the next one's experts."


def _degrees(plan: Plan) -> str:
    pipeline = plan.pipeline
    forward = plural(pipeline.forward_degree, "chunk")
    return f"{forward} forward and {pipeline.backward_degree} backward"


def _probability(share: float) -> str:
    return "over 99 %" if share >= _CERTAIN else f"{100 * share:.0f} %"


def _model_answer(explanation: Explanation, whole: TransformerPlan) -> Section:
    plan, memory = explanation.plan, whole.memory
    chunks = () if plan.chunks is None else (_chunks(plan.chunks),)
    layer = (_layer_in_model(plan),) if whole.moe_every else ()
    return Section(
        name="answer",
        title=plan_name(plan),
        scope=plan_scope(plan, profile=explanation.profile),
        paragraphs=(
            plan_decision(plan),
            *chunks,
            *layer,
            _memory_words(explanation, memory.total_bytes, name_memory(memory)),
        ),
        highlights=tuple(_model_highlights(explanation, whole)),
        summary=_model_summary(explanation, whole),
    )


def _model_highlights(explanation: Explanation, whole: TransformerPlan) -> Iterator[Highlight]:
    speed = whole.tokens_per_second_per_rank
    yield Highlight(name="One step of the model", cell=Cell.seconds(whole.step_seconds))
    yield Highlight(
        name="Tokens a second", cell=Cell(text=f"{speed:,.0f}", value=speed), note="on each rank"
    )
    yield _memory_highlight(explanation, whole.memory.total_bytes)
    yield Highlight(name="What binds", cell=Cell.words(WORDS[whole.binding].capitalize()))
    yield Highlight(
        name="Micro-batches",
        cell=Cell.count(whole.num_micro_batches),
        note=f"of {plural(whole.micro_batch_sequences, 'sequence')}",
    )


def _model_summary(explanation: Explanation, whole: TransformerPlan) -> str:
    share = kinds_of(whole.parts).get(whole.binding, 0.0) / whole.step_seconds
    binds = f"{WORDS[whole.binding].capitalize()} binds"
    if share:
        binds += f", {share:.0%} of the step"
    return (
        f"One step of the model: {format_seconds(whole.step_seconds)}, "
        f"{whole.tokens_per_second_per_rank:,.0f} tokens a second and "
        f"{device_word(explanation.profile)}. {binds}."
    )


def _model_decision(plan: Plan, whole: TransformerPlan) -> str:
    layout = plan.layout
    replicas = f"{plural(layout.dp, 'replica')} (dp)"
    stages = "no stages" if layout.pp == 1 else f"{plural(layout.pp, 'stage')} (pp)"
    tensor = "whole layers" if layout.tp == 1 else f"layers cut over {layout.tp} ranks (tp)"
    experts = ""
    if not whole.moe_every:
        tensor = f"and {tensor}"
    elif layout.expert_parallel == "tensor":
        experts = ", and the experts shared by the same ranks, whose outputs are added"
    elif layout.ep == 1:
        experts = ", and all experts on every rank"
    else:
        experts = f", and experts exchanged among {layout.ep} replicas (ep)"
    batches = plural(whole.num_micro_batches, "micro-batch", "micro-batches")
    ways = [f"{batches} of {plural(whole.micro_batch_sequences, 'sequence')}"]
    if whole.zero and plan.chunks is None:
        ways.append("optimizer states sharded (ZeRO)")
    if whole.recompute:
        ways.append("blocks run forward again before their backward pass")
    return f"Take {replicas}, {stages}, {tensor}{experts}. Run {', '.join(ways)}."


def _chunks(chunks: Chunks) -> str:
    size = format_bytes(chunks.chunk_bytes)
    if not chunks.scatter:
        return f"Keep model states whole on every rank, and reduce gradients in chunks of {size}."
    where = "on the host (offload)" if chunks.offload else "in shards, one on each replica"
    places = chunks.cache_bytes // chunks.chunk_bytes
    return (
        f"Keep model states in chunks of {size} {where}, {plural(places, 'chunk')} "
        f"({format_bytes(chunks.cache_bytes)}) at a time in the cache."
    )


def _layer_in_model(plan: Plan) -> str:
    if is_one_chunk(plan):
        return "In each MoE layer leave a micro-batch in one chunk."
    return f"In each MoE layer cut a micro-batch into {_degrees(plan)}."


def _every(number: int) -> str:
    if number == 1:
        return "all"
    ending = {2: "nd", 3: "rd"}.get(number, "th")
    return f"every {number}{ending}"
