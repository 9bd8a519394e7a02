"""A whole model's plan in words and tables."""

from moetune.cli.plan_view import device_word, is_one_chunk, memory_line, sentence
from moetune.cli.render import Screen, percent, plural
from moetune.domain.layout import Layout
from moetune.domain.model import MODELS
from moetune.domain.plan import Alternative, Chunks, Part, Plan, TransformerPlan
from moetune.domain.units import format_bytes, format_seconds
from moetune.solve.layout.words import WORDS, kinds_of, name_memory
from moetune.workflows.explain import Explanation

HEADER = ("dp", "ep", "tp", "pp", "experts", "step", "tokens/s", "memory", "because")


def show_model_plan(screen: Screen, explanation: Explanation) -> None:
    """Print the layout, its time beside other layouts', and what its step consists of."""
    plan = explanation.plan
    whole = plan.transformer
    assert whole is not None  # noqa: S101 - the caller has looked
    screen.say(model_title(explanation), style="bold")
    screen.say()
    screen.say(_decision(plan, whole), indent=2)
    screen.say(_step(explanation, whole), indent=2)
    if plan.chunks is not None:
        screen.say(_chunks(plan.chunks), indent=2)
    if whole.moe_every:
        screen.say(_layer(plan), indent=2)
    screen.say()
    show_layouts(screen, plan, whole)
    screen.say()
    show_parts(screen, whole)
    memory = whole.memory
    screen.say(memory_line(explanation, memory.total_bytes, name_memory(memory)), indent=2)
    screen.say()
    for warning in plan.warnings:
        screen.say(sentence(warning), indent=2)
    screen.say()


def model_title(explanation: Explanation) -> str:
    """Return what the plan is for: "GPT-3 Medium with experts · 24 layers, …"."""
    plan = explanation.plan
    inputs, whole = plan.inputs, plan.transformer
    model = MODELS.get(inputs.model or "")
    name = model.title if model else f"Transformer {inputs.layer.d_model} wide"
    layers = ""
    if whole is not None:
        layers = f" · {plural(whole.num_layers, 'layer')}"
        if whole.moe_every:
            layers += f", {_every(whole.moe_every)} with experts"
            layers += f" · {plural(inputs.layer.num_experts, 'expert')}"
    device = device_word(explanation)
    return (
        f"{name}{layers} · "
        f"{plural(inputs.world_size, device)} · {plural(inputs.tokens_per_rank, 'token')} per "
        f"{device} · {inputs.dtype}"
    )


def show_layouts(screen: Screen, plan: Plan, whole: TransformerPlan) -> None:
    """Print the chosen layout and those that lost, as a table."""
    chosen = _row(plan.layout, whole.step_seconds, plan, whole.memory.total_bytes, "chosen")
    lost = [_lost(one, plan) for one in plan.alternatives if one.layout is not None]
    screen.table(HEADER, [chosen, *lost], right=(0, 1, 2, 3, 5, 6, 7))


def show_parts(screen: Screen, whole: TransformerPlan) -> None:
    """Print what the step consists of on the slowest stage, forward and in all."""
    forward = sum(part.forward_seconds for part in whole.parts)
    rows = [_part(part, forward) for part in whole.parts]
    rows.append(("all", "", format_seconds(forward), "100 %", *_whole(whole.step_seconds)))
    header = ("part", "one layer", "forward", "share", "step", "share")
    screen.table(header, rows, right=range(1, 6))
    screen.say(
        "On the slowest stage. one layer: the forward pass of one micro-batch; forward: of all "
        "micro-batches; step: backward passes besides, with what runs again.",
        indent=2,
    )
    screen.say()


def _part(part: Part, forward: float) -> tuple[str, ...]:
    if not part.forward_seconds:
        return part.name, "", "", "", format_seconds(part.seconds), percent(part.share)
    return (
        part.name,
        format_seconds(part.layer_seconds),
        format_seconds(part.forward_seconds),
        percent(part.forward_seconds / forward),
        format_seconds(part.seconds),
        percent(part.share),
    )


def _whole(seconds: float) -> tuple[str, str]:
    return format_seconds(seconds), "100 %"


def _lost(one: Alternative, plan: Plan) -> tuple[str, ...]:
    assert one.layout is not None  # noqa: S101 - the caller has looked
    return _row(one.layout, one.step_seconds, plan, one.memory_bytes, one.lost_because)


def _row(
    layout: Layout, seconds: float, plan: Plan, memory_bytes: int | None, because: str
) -> tuple[str, ...]:
    return (
        *(str(size) for size in (layout.dp, layout.ep, layout.tp, layout.pp)),
        layout.expert_parallel,
        format_seconds(seconds),
        f"{plan.inputs.tokens_per_rank / seconds:,.0f}",
        "" if memory_bytes is None else format_bytes(memory_bytes),
        because,
    )


def _decision(plan: Plan, whole: TransformerPlan) -> str:
    layout = plan.layout
    replicas = f"{plural(layout.dp, 'replica')} (dp)"
    stages = "no stages" if layout.pp == 1 else f"{plural(layout.pp, 'stage')} (pp)"
    tensor = "whole layers" if layout.tp == 1 else f"layers cut over {layout.tp} ranks (tp)"
    experts = ""
    if not whole.moe_every:
        tensor = f"and {tensor}"
    elif layout.expert_parallel == "tensor":
        experts = "the experts shared by the same ranks, whose outputs are added"
    elif layout.ep == 1:
        experts = "all experts on every rank"
    else:
        experts = f"experts exchanged among {layout.ep} replicas (ep)"
    size = plural(whole.micro_batch_sequences, "sequence")
    ways = [
        f"{plural(whole.num_micro_batches, 'micro-batch').replace('batchs', 'batches')} of {size}"
    ]
    if whole.zero and plan.chunks is None:
        ways.append("optimizer states sharded (ZeRO)")
    if whole.recompute:
        ways.append("blocks run forward again before their backward pass")
    shared = f", and {experts}" if experts else ""
    return f"Take {replicas}, {stages}, {tensor}{shared}. Run {', '.join(ways)}."


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


def _step(explanation: Explanation, whole: TransformerPlan) -> str:
    kinds = kinds_of(whole.parts)
    share = kinds.get(whole.binding, 0.0) / whole.step_seconds
    binds = f"{WORDS[whole.binding].capitalize()} binds"
    if share:
        binds += f", {share:.0%} of the step"
    return (
        f"One step of the model: {format_seconds(whole.step_seconds)}, "
        f"{whole.tokens_per_second_per_rank:,.0f} tokens a second and {device_word(explanation)}. "
        f"{binds}."
    )


def _layer(plan: Plan) -> str:
    pipeline = plan.pipeline
    if is_one_chunk(plan):
        return "In each MoE layer leave a micro-batch in one chunk."
    return (
        f"In each MoE layer cut a micro-batch into {plural(pipeline.forward_degree, 'chunk')} "
        f"forward and {pipeline.backward_degree} backward."
    )


def _every(number: int) -> str:
    if number == 1:
        return "all"
    ending = {2: "nd", 3: "rd"}.get(number, "th")
    return f"every {number}{ending}"
