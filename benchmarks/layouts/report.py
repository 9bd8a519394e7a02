"""Layouts of the lab as a table."""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.layouts.experiment import CaseResult, Outcome
from moetune.domain.layout import Layout
from moetune.domain.prediction_error import prediction_error

_REGRET, _RATIO = 0.05, 0.15


def report(results: Sequence[CaseResult]) -> str:
    """Return the page: a summary, and every layout of every case."""
    lines = ["# Layouts in the network lab", "", _INTRODUCTION, ""]
    lines += _summary(results)
    for result in results:
        lines += ["", *_case(result)]
    return "\n".join([*lines, ""])


_INTRODUCTION = (
    "Two nodes of two ranks each, unlimited inside a node, one link between the nodes; a node "
    "has one core, which its ranks share. `python -m benchmarks.layouts` profiles the lab for "
    "each model, asks the solver for every layout, and trains a few steps under each, in jobs of "
    "their own that come twice in random order (medians). float32, gloo. Inside one case "
    "everything is from one run."
)


def median_seconds(outcome: Outcome) -> float:
    """Return the measured step."""
    return statistics.median(outcome.seconds)


def regret(result: CaseResult) -> float:
    """Return by how much the solver's first choice is slower than the best measured one."""
    times = [median_seconds(one) for one in result.outcomes]
    return times[0] / min(times) - 1


def ratios(result: CaseResult) -> tuple[float, float]:
    """Return how much faster tensor layouts inside nodes are than exchanges across them.

    The best of each, predicted and measured.
    """
    inside = [one for one in result.outcomes if is_inside(one.layout)]
    across = [one for one in result.outcomes if is_across(one.layout)]
    predicted = min(one.predicted_seconds for one in across) / min(
        one.predicted_seconds for one in inside
    )
    measured = min(map(median_seconds, across)) / min(map(median_seconds, inside))
    return predicted, measured


def is_inside(layout: Layout) -> bool:
    """Return whether experts lie in tensor-parallel groups inside nodes of two."""
    return layout.expert_parallel == "tensor" and layout.tp == 2  # noqa: PLR2004 - a node


def is_across(layout: Layout) -> bool:
    """Return whether tokens are exchanged between nodes."""
    return layout.expert_parallel == "all_to_all" and layout.ep == 4  # noqa: PLR2004 - all ranks


def name(layout: Layout) -> str:
    """Return a short name: the sizes above one."""
    sizes = (("dp", layout.dp), ("ep", layout.ep), ("tp", layout.tp), ("pp", layout.pp))
    return " ".join(f"{what} {size}" for what, size in sizes if size > 1)


def _summary(results: Sequence[CaseResult]) -> Iterator[str]:
    yield (
        "| model | first choice | slower than the best measured | tensor inside ÷ all-to-all "
        "across, predicted | measured | off by | median error of a step |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|"
    for result in results:
        predicted, measured = ratios(result)
        errors = [
            abs(prediction_error(one.predicted_seconds, median_seconds(one)))
            for one in result.outcomes
        ]
        lost, off = regret(result), prediction_error(predicted, measured)
        yield (
            f"| {_model(result)} | {name(result.outcomes[0].layout)} "
            f"| {100 * lost:.1f} %{_missed(lost, _REGRET)} | {predicted:.2f} | {measured:.2f} "
            f"| {100 * off:+.0f} %{_missed(abs(off), _RATIO)} "
            f"| {100 * statistics.median(errors):.0f} % |"
        )


def _missed(value: float, limit: float) -> str:
    return " (missed)" if value > limit else ""


def _model(result: CaseResult) -> str:
    moe = result.case.transformer.moe
    return (
        f"M {moe.d_model}, H {moe.d_hidden}, E {moe.num_experts}, "
        f"T {result.case.tokens_per_rank}, {result.rate_mbit:g} Mbit/s"
    )


def _case(result: CaseResult) -> Iterator[str]:
    model = result.case.transformer
    yield f"## {_model(result)}"
    yield ""
    yield (
        f"{model.num_layers} blocks, experts in every {model.moe_every}., {model.num_heads} heads, "
        f"sequences of {model.length}, vocabulary {model.vocab_size}."
    )
    yield ""
    yield (
        "| layout | experts | micro-batches | chunks | predicted | measured | error | imbalance "
        "| largest parts, predicted |"
    )
    yield "|---|---|---:|---|---:|---:|---:|---:|---|"
    for one in result.outcomes:
        seconds = median_seconds(one)
        decision = one.decision
        yield (
            f"| {name(one.layout)} | {one.layout.expert_parallel} | {one.num_micro_batches} "
            f"| {decision.forward_degree}/{decision.backward_degree} "
            f"| {1e3 * one.predicted_seconds:.0f} ms | {1e3 * seconds:.0f} ms "
            f"| {100 * prediction_error(one.predicted_seconds, seconds):+.0f} % "
            f"| {one.imbalance:.2f} "
            f"| {_largest(one)} |"
        )


def _largest(outcome: Outcome) -> str:
    parts = sorted(outcome.parts.items(), key=lambda part: part[1], reverse=True)[:3]
    return ", ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in parts)
