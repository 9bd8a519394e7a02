"""A plan's decision in words, and how sure it is."""

from moetune.domain.plan import Confidence, Plan
from moetune.domain.training import LayoutRequest
from moetune.domain.training_document import TrainingDocument
from moetune.report.section import percent, plural
from moetune.solve.layer.words import STRATEGY_WORDS

LEAST_REGRET = 5e-4
_CERTAIN = 0.995
"""Share of refits from which a probability reads "over 99 %": agreement of all is not certainty."""
_ORDERS = {"dispatch_first": "all dispatches first", "interleaved": "interleaved"}


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
    text = _sure("choice", verdict.probability_best, verdict.expected_regret)
    if next_best is None:
        return f"{text}. There is no other choice."
    step = plan.predicted.step_seconds
    slower = next_best.step_seconds / step - 1 if step else 0.0
    degrees = f"{next_best.forward_degree} and {next_best.backward_degree}"
    if next_best.strategy != plan.memory.strategy:
        degrees += f" with strategy {next_best.strategy}"
    return f"{text}. Next best: {degrees} ({percent(slower, sign=True)})."


def how_sure_of_layout(confidence: Confidence, what: str = "layout") -> str:
    """Return the probability and the regret of a model's layout.

    Args:
        what: it was chosen among.
    """
    return f"{_sure(what, confidence.probability_best, confidence.expected_regret)}."


def how_sure_of_training(plan: TrainingDocument) -> str:
    """Return the probability and the regret of a layout among those that its pins leave."""
    if plan.inputs.pins == LayoutRequest():
        return how_sure_of_layout(plan.confidence)
    if not plan.alternatives:
        return "The pins leave no other sizes to choose among."
    return how_sure_of_layout(plan.confidence, "layout with these pins")


def degrees_words(plan: Plan) -> str:
    """Return "2 chunks forward and 5 backward"."""
    pipeline = plan.pipeline
    forward = plural(pipeline.forward_degree, "chunk")
    return f"{forward} forward and {pipeline.backward_degree} backward"


def probability_words(share: float) -> str:
    """Return "84 %", but never 100."""
    return "over 99 %" if share >= _CERTAIN else f"{100 * share:.0f} %"


def is_one_chunk(plan: Plan) -> bool:
    """Return whether both phases run one chunk, and so hide no communication."""
    return plan.pipeline.forward_degree == plan.pipeline.backward_degree == 1


def _sure(what: str, probability: float, regret: float) -> str:
    text = f"How sure: {probability_words(probability)} that no other {what} is better"
    if regret >= LEAST_REGRET:
        text += f"; on average {percent(regret)} slower than the best"
    return text


def _tensor_decision(plan: Plan) -> str:
    in_shards = plan.workload.sequence_parallel
    if is_one_chunk(plan):
        exchanges = "one all-gather and one reduce-scatter" if in_shards else "one all-reduce"
        return f"Leave the tokens in one chunk, forward and backward: {exchanges} each way."
    how = "each chunk's all-reduce travels"
    if in_shards:
        how = "behind one all-gather each way, each chunk's reduce-scatter travels"
    return f"Cut the tokens into {degrees_words(plan)}: {how} behind the next one's experts."
