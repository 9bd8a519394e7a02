"""A plan and its explanation in words."""

from moetune.cli.render import Screen, percent, plural, seconds_span
from moetune.domain.model import MODELS
from moetune.domain.plan import Plan
from moetune.domain.terms import PhaseTerms
from moetune.domain.units import format_bytes, format_seconds
from moetune.solve.layer.memory import total_bytes
from moetune.solve.layer.words import HOW
from moetune.workflows.explain import Explanation
from moetune.workflows.plan_view import SURE, WORTH_SAYING

_ORDERS = {"dispatch_first": "all dispatches first", "interleaved": "interleaved"}


def show_plan(screen: Screen, explanation: Explanation) -> None:
    """Print the answer, the times, and how sure it is."""
    plan = explanation.plan
    screen.say(title(explanation), style="bold")
    screen.say()
    screen.say(_decision(plan), indent=2)
    screen.say(_step(plan), indent=2)
    if is_one_chunk(plan) or plan.memory.strategy != "none":
        screen.say(plan.decision.why, indent=2)
    screen.say()
    _times(screen, explanation)
    screen.say(_memory(explanation), indent=2)
    screen.say()
    screen.say(how_sure(plan), indent=2)
    for warning in plan.warnings:
        screen.say(sentence(warning), indent=2)
    screen.say()


def title(explanation: Explanation) -> str:
    """Return what the plan is for: "GPT-XL MoE layer · 64 experts over 64 GPUs · …"."""
    inputs = explanation.plan.inputs
    layer = inputs.layer
    model = MODELS.get(inputs.model or "")
    name = model.title if model else f"MoE layer {layer.d_model} × {layer.d_hidden}"
    name += " layer" if name.endswith("MoE") else ""
    device = device_word(explanation)
    each = f"on every {device}" if is_tensor(explanation.plan) else f"per {device}"
    if explanation.plan.workload.sequence_parallel:
        each = f"in shards, one per {device}"
    return (
        f"{name} · {plural(layer.num_experts, 'expert')} over {plural(inputs.world_size, device)}"
        f" · {plural(inputs.tokens_per_rank, 'token')} {each} · {inputs.dtype}"
    )


def how_sure(plan: Plan) -> str:
    """Return the probability and the regret of the choice, and the next best."""
    verdict = plan.decision
    text = f"How sure: {_probability(verdict.probability_best)} that no other choice is better"
    if verdict.expected_regret >= WORTH_SAYING:
        text += f"; if wrong, {percent(verdict.expected_regret)} slower on average"
    if verdict.runner_up is None:
        return f"{text}. There is no other choice."
    next_best = verdict.runner_up
    step = plan.predicted.step_seconds
    slower = next_best.step_seconds / step - 1 if step else 0.0
    degrees = f"{next_best.forward_degree} and {next_best.backward_degree}"
    if next_best.strategy != plan.memory.strategy:
        degrees += f" with strategy {next_best.strategy}"
    return f"{text}. Next best: {degrees} (+{percent(slower)})."


def is_one_chunk(plan: Plan) -> bool:
    """Return whether nothing is cut, and so nothing hidden."""
    return plan.pipeline.forward_degree == plan.pipeline.backward_degree == 1


def is_tensor(plan: Plan) -> bool:
    """Return whether experts are summed inside a tensor-parallel group."""
    return plan.layout.expert_parallel == "tensor"


def sentence(text: str) -> str:
    """Return the text as a sentence."""
    start = text[:1].upper() if text[:2].isalpha() else text[:1]
    return start + text[1:] + ("" if text.endswith((".", "`")) else ".")


def memory_line(explanation: Explanation, num_bytes: int, parts: str) -> str:
    """Return what one device needs, of what, and what for."""
    limit = explanation.memory_limit_bytes
    of_limit = f" of {format_bytes(limit)}" if limit else ""
    return f"memory  {format_bytes(num_bytes)}{of_limit} per {device_word(explanation)}: {parts}"


def device_word(explanation: Explanation) -> str:
    """Return what a rank is called: "GPU" where the profile says so."""
    profile = explanation.profile
    return "GPU" if profile is not None and profile.machine.kind == "cuda" else "rank"


def _decision(plan: Plan) -> str:
    pipeline, strategy = plan.pipeline, plan.memory.strategy
    if is_tensor(plan):
        return _tensor_decision(plan)
    kept = "keep all activations (strategy none)"
    if strategy != "none":
        kept = f"reuse memory with strategy {strategy}: {HOW[strategy]}"
    if is_one_chunk(plan):
        return f"Leave the tokens in one chunk, forward and backward, and {kept}."
    order = (
        ""
        if pipeline.order == "dispatch_first" or strategy != "none"
        else f", {_ORDERS[pipeline.order]}"
    )
    forward = plural(pipeline.forward_degree, "chunk")
    return (
        f"Cut the tokens into {forward} forward and {pipeline.backward_degree} backward"
        f"{order}, and {kept}."
    )


def _tensor_decision(plan: Plan) -> str:
    in_shards = plan.workload.sequence_parallel
    if is_one_chunk(plan):
        exchanges = "one all-gather and one reduce-scatter" if in_shards else "one all-reduce"
        return f"Leave the tokens in one chunk, forward and backward: {exchanges} each way."
    forward = plural(plan.pipeline.forward_degree, "chunk")
    how = "each chunk's all-reduce travels"
    if in_shards:
        how = "behind one all-gather each way, each chunk's reduce-scatter travels"
    return (
        f"Cut the tokens into {forward} forward and {plan.pipeline.backward_degree} backward: "
        f"{how} behind the next one's experts."
    )


def _step(plan: Plan) -> str:
    times = plan.predicted
    span = seconds_span(times.step_seconds, times.p05_step_seconds, times.p95_step_seconds)
    text = f"One step of the layer: {span}"
    reuses = plan.memory.strategy != "none"
    if not is_one_chunk(plan) and times.step_seconds and not reuses:
        text += f", {times.sequential_step_seconds / times.step_seconds:.2f} × as fast as one chunk"
    return f"{text}. {plan.decision.binding.capitalize()} binds."


def _times(screen: Screen, explanation: Explanation) -> None:
    times = explanation.plan.predicted
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
        overhead = format_seconds(times.overhead_seconds)
        around = "gate" if is_tensor(explanation.plan) else "gate, sorting"
        if explanation.plan.workload.gathers:
            around = "gate, choices"
        rows.append((around, overhead, overhead, ""))
    header = ("phase", "one chunk", "planned", "exposed communication")
    screen.table(header, rows, right=(1, 2, 3))


def _phase(
    name: str, one_chunk: float, planned: float, terms: PhaseTerms | None
) -> tuple[str, ...]:
    exposed = "" if terms is None else format_seconds(terms.exposed_communication_seconds)
    return name, format_seconds(one_chunk), format_seconds(planned), exposed


def _memory(explanation: Explanation) -> str:
    memory = explanation.plan.memory
    return memory_line(
        explanation,
        total_bytes(memory),
        f"states {format_bytes(memory.state_bytes)}, "
        f"activations {format_bytes(memory.activation_bytes)}, "
        f"buffers {format_bytes(memory.buffer_bytes)}",
    )


def _probability(share: float) -> str:
    """Return the share of a hundred fits; that all of them agree is not certainty."""
    return "over 99 %" if share >= SURE else f"{100 * share:.0f} %"
