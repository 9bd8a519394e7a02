"""The page: every way to train the model, predicted and measured, on each link."""

import statistics
from collections.abc import Iterator

from benchmarks.rivals.experiment import Alone, Cell, Result
from benchmarks.rivals.predicted import Planned

_WORDS = {
    "transformers": "transformers' `all_to_all`, FSDP2 for the rest",
    "transformers-ddp": "transformers' `all_to_all`, DDP for the rest",
    "deepspeed": "DeepSpeed's engine and MoE layer",
    "tutel": "Tutel's MoE layer, DDP for the rest",
    "fsdp2": "FSDP2, no expert parallelism",
    "ddp": "DDP, no expert parallelism",
}
_SAME_LOSS = 1e-3
_TARGET = 1.3
_THIRD = 1 / 3
_MIB = 2**20


def report(result: Result, *, machine: str, note: str = "") -> str:
    """Return the page.

    Args:
        note: on what is missing.
    """
    return "\n".join(_lines(result, machine, note)) + "\n"


def best_rival(cell: Cell) -> str:
    """Return the fastest of the others on a link."""
    ours = {way.variant for way in cell.ways}
    return min((one for one in cell.seconds if one not in ours), key=lambda one: median(cell, one))


def median(cell: Cell, variant: str) -> float:
    """Return a variant's measured step."""
    return statistics.median(cell.seconds[variant])


def sent_share(result: Result, cell: Cell, variant: str) -> float:
    """Return the share of a step that the link costs: what it takes longer than on loopback."""
    alone = statistics.median(_alone(result, variant).seconds)
    return max(0.0, 1 - alone / median(cell, variant))


def largest_difference(result: Result) -> float:
    """Return the largest relative difference of any loss of two variants in one step."""
    known = [one.losses for one in result.alone if one.losses]
    ratios: list[float] = [max(step) / min(step) for step in zip(*known, strict=True)]
    return max(ratios) - 1


def _lines(result: Result, machine: str, note: str) -> Iterator[str]:
    yield from ("# One Qwen3-MoE, trained in every way on two ranks", "", machine, "")
    yield from (_method(result), "")
    yield _losses(result)
    if note:
        yield from ("", note)
    for cell in result.cells:
        yield from ("", f"## {cell.rate_mbit:g} Mbit/s", "")
        yield _summary(result, cell)
        yield ""
        yield (
            "| | predicted | measured | spread | error | link's share | plan is faster by "
            "| peak memory | loss |"
        )
        yield "|---|---:|---:|---|---:|---:|---:|---:|---:|"
        yield from (_our_row(result, cell, way) for way in cell.ways)
        ours = {way.variant for way in cell.ways}
        for one in result.alone:
            if one.variant in cell.seconds and one.variant not in ours:
                yield _row(result, cell, one.variant, _WORDS[one.variant])
            elif one.error:
                yield f"| {_WORDS[one.variant]} | | could not train: {one.error} | | | | | | |"


def _method(result: Result) -> str:
    case, shape = result.case, result.case.transformer
    moe, rounds = shape.moe, len(next(iter(result.cells[0].seconds.values())))
    return (
        f"transformers' Qwen3MoeForCausalLM, randomly initialised: {shape.num_layers} blocks, "
        f"d_model {moe.d_model}, {moe.num_experts} experts of d_hidden {moe.d_hidden}, "
        f"top-{moe.top_k}, {shape.num_heads} heads, vocabulary {shape.vocab_size}; "
        f"{case.sequences} sequences of {shape.length} tokens a rank, float32, AdamW, the same "
        "batch in every step, all gradients averaged over both ranks. Routers are drawn so that in "
        f"the first step the busiest expert of any block gets {result.imbalance:.2f} times the "
        "mean; the learning rate is so low that they stay so. On each link the lab is profiled, "
        "the solver plans, and all variants take turns in one process a rank, each in every round; "
        "a step is the slower rank's, with the optimizer's, and a figure the "
        f"median of {rounds} rounds, the spread their least and most. Error: predicted over "
        "measured, minus one. The link's share is what a step takes longer than the same variant "
        "alone on loopback without a limit; peak memory is the larger resident set of the two "
        "processes there. DeepSpeed's and Tutel's layers have a router of their own with this "
        "one's weights and the same formula, and pad every expert to the busiest one's tokens."
    )


def _losses(result: Result) -> str:
    found, steps = largest_difference(result), max(len(one.losses) for one in result.alone)
    verdict = "compute the same" if found <= _SAME_LOSS else "**do not compute the same**"
    return (
        f"All variants that train {verdict}: over {steps} steps from the same weights, no two "
        f"losses of one step differ by more than {found:.1e} of them."
    )


def _summary(result: Result, cell: Cell) -> str:
    rival, plan = best_rival(cell), _plan(cell)
    ratio = median(cell, rival) / median(cell, plan.variant)
    share = sent_share(result, cell, rival)
    is_met = ratio >= (_TARGET if share >= _THIRD else 1)
    wanted = f"{_TARGET} where the link takes a third" if share >= _THIRD else "no slower"
    return (
        f"The plan is {ratio:.2f} times as fast as the best of the others ({_WORDS[rival]}), "
        f"{100 * share:.0f} % of whose step the link takes. Target ({wanted}): "
        f"{'met' if is_met else '**missed**'}."
    )


def _our_row(result: Result, cell: Cell, way: Planned) -> str:
    words = f"moetune, {way.words}{': **the plan**' if way.is_plan else ''}"
    predicted = way.predicted_seconds
    return _row(result, cell, way.variant, words, predicted=predicted)


def _row(
    result: Result, cell: Cell, variant: str, words: str, *, predicted: float | None = None
) -> str:
    seconds, alone = cell.seconds[variant], _alone(result, variant)
    middle = median(cell, variant)
    told = "" if predicted is None else f"{1e3 * predicted:.0f} ms"
    error = "" if predicted is None else f"{100 * (predicted / middle - 1):+.1f} %"
    return (
        f"| {words} | {told} | {1e3 * middle:.0f} ms "
        f"| {1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f} | {error} "
        f"| {100 * sent_share(result, cell, variant):.0f} % "
        f"| {middle / median(cell, _plan(cell).variant):.2f} "
        f"| {alone.peak_bytes / _MIB:.0f} MiB | {alone.losses[-1]:.5f} |"
    )


def _plan(cell: Cell) -> Planned:
    return next(way for way in cell.ways if way.is_plan)


def _alone(result: Result, variant: str) -> Alone:
    return next(one for one in result.alone if one.variant == variant)
