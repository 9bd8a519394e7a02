"""The page: the joint plan and what it is compared with, predicted beside measured."""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.gradients.ranks import variant_parts
from benchmarks.joint.experiment import Cell, Outcome

_WAY = {
    "end": "gradients at the end",
    "default": "gradients between exchanges",
    "two": "two batches in turns",
    "positions": "halves of positions in turns",
}


def report(cells: Sequence[Cell], *, machine: str) -> str:
    """Return the page."""
    return "\n".join(_lines(cells, machine)) + "\n"


def _lines(cells: Sequence[Cell], machine: str) -> Iterator[str]:
    yield from ("# The joint plan of a step in the network lab", "", machine, "")
    yield _method(cells[0])
    for cell in cells:
        yield from ("", f"## {cell.rate_mbit:g} Mbit/s", "")
        yield from _summary(cell)
        heads = (
            "way | chunks | predicted | measured | spread | error | profiled after | against DDP"
        )
        yield from ("", f"| | {heads} |")
        yield "|---|---|---:|---:|---:|---|---:|---:|---:|"
        ranked = sorted(cell.outcomes, key=lambda one: (not one.role, _median(one)))
        yield from (_row(cell, one) for one in ranked)


def _method(cell: Cell) -> str:
    shape, moe = cell.case.transformer, cell.case.transformer.moe
    rounds = len(cell.outcomes[0].seconds)
    return (
        f"A language model of {shape.num_layers} blocks with experts, d_model {moe.d_model}, "
        f"d_hidden {moe.d_hidden}, {moe.num_experts} experts, top-{moe.top_k}, "
        f"{cell.case.sequences} x {shape.length} tokens a rank, float32; two ranks, each with the "
        "whole model but for the experts, which they share. The lab was profiled, the solver "
        f"planned from the profile, and every row was measured in one process in turns: a figure "
        f"is the median of {rounds} rounds of the slower rank, the spread their least and most. "
        "Forward and backward pass with reduced gradients, without an optimizer. Error: predicted "
        "over measured, minus one; profiled after: the same from a profile that was measured after "
        "the rounds. Against DDP: how many times as fast as "
        "DistributedDataParallel (25 MB buckets) with layers in one chunk. Rows without a name "
        "are random plans."
    )


def _summary(cell: Cell) -> Iterator[str]:
    joint = next(one for one in cell.outcomes if one.role == "joint plan")
    others = [one for one in cell.outcomes if one is not joint]
    best = min(others, key=_median)
    errors, later = _errors(cell.outcomes), _errors(cell.outcomes, after=True)
    yield (
        f"Exchanges are {100 * cell.exchange_share:.0f} % of a step in one chunk (predicted). The "
        f"joint plan takes {1e3 * _median(joint):.0f} ms, predicted {_percent(_error(joint))}: "
        f"{_against(cell, joint)} times as fast as DDP, and {_median(best) / _median(joint):.2f} "
        f"times as fast as the best of the others ({_name(best)}). Predictions of all "
        f"{len(errors)} plans are off by {100 * statistics.median(errors):.1f} % in the median, "
        f"{100 * max(errors):.1f} % at most; those from the profile after the rounds by "
        f"{100 * statistics.median(later):.1f} % and {100 * max(later):.1f} %."
    )


def _row(cell: Cell, one: Outcome) -> str:
    way, degrees = variant_parts(one.variant)
    chunks = f"{degrees[0]}" if degrees[0] == degrees[1] else f"{degrees[0]}/{degrees[1]}"
    predicted = "" if one.predicted_seconds is None else f"{1e3 * one.predicted_seconds:.0f} ms"
    spread = f"{1e3 * min(one.seconds):.0f} to {1e3 * max(one.seconds):.0f}"
    return (
        f"| {one.role} | {_WAY.get(way, 'DistributedDataParallel')} | {chunks} | {predicted} | "
        f"{1e3 * _median(one):.0f} ms | {spread} | "
        f"{_percent(_error(one))} | {_percent(_error(one, after=True))} | {_against(cell, one)} |"
    )


def _name(one: Outcome) -> str:
    way, degrees = variant_parts(one.variant)
    return f"{one.role or 'random'}: {_WAY.get(way, 'DDP')}, {degrees[0]}/{degrees[1]} chunks"


def _median(one: Outcome) -> float:
    return statistics.median(one.seconds)


def _error(one: Outcome, *, after: bool = False) -> float | None:
    predicted = one.predicted_after_seconds if after else one.predicted_seconds
    return None if predicted is None else predicted / _median(one) - 1


def _errors(outcomes: Sequence[Outcome], *, after: bool = False) -> list[float]:
    found = (_error(one, after=after) for one in outcomes)
    return [abs(error) for error in found if error is not None]


def _percent(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f} %"


def _against(cell: Cell, one: Outcome) -> str:
    reference = next(each for each in cell.outcomes if each.variant == "ddp25:1")
    return f"{_median(reference) / _median(one):.2f}"
