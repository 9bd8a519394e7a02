"""The page: the joint plan and what it is compared with, predicted beside measured."""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.gradients.ranks import variant_parts
from benchmarks.joint.experiment import Cell, Outcome

_WAY = {
    "end": "gradients at the end",
    "default": "gradients between exchanges",
    "two": "two batches in turns",
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
        yield from ("", "| | way | chunks | predicted | measured | spread | error | against DDP |")
        yield "|---|---|---:|---:|---:|---|---:|---:|"
        ranked = sorted(cell.outcomes, key=lambda one: (not one.role, _median(one)))
        yield from (_row(cell, one) for one in ranked)


def _method(cell: Cell) -> str:
    shape, moe = cell.case.transformer, cell.case.transformer.moe
    rounds = len(cell.outcomes[0].seconds)
    return (
        f"A language model of {shape.num_layers} blocks with experts, d_model {moe.d_model}, "
        f"d_hidden {moe.d_hidden}, {moe.num_experts} experts, top-{moe.top_k}, "
        f"{cell.case.sequences * shape.length} tokens a rank, float32; two ranks, each with the "
        "whole model but for the experts, which they share. The lab was profiled, the solver "
        f"planned from the profile, and every row was measured in one process in turns: a figure "
        f"is the median of {rounds} rounds of the slower rank, the spread their least and most. "
        "Forward and backward pass with reduced gradients, without an optimizer. Error: predicted "
        "over measured, minus one. Against DDP: how many times as fast as "
        "DistributedDataParallel (25 MB buckets) with layers in one chunk. Rows without a name "
        "are random plans."
    )


def _summary(cell: Cell) -> Iterator[str]:
    joint = next(one for one in cell.outcomes if one.role == "joint plan")
    others = [one for one in cell.outcomes if one is not joint]
    best = min(others, key=_median)
    errors = [abs(error) for one in cell.outcomes if (error := _error(one)) is not None]
    yield (
        f"Exchanges are {100 * cell.exchange_share:.0f} % of a step in one chunk (predicted). The "
        f"joint plan takes {1e3 * _median(joint):.0f} ms, predicted {_off(joint)}: "
        f"{_against(cell, joint)} times as fast as DDP, and {_median(best) / _median(joint):.2f} "
        f"times as fast as the best of the others ({_name(best)}). Predictions of all "
        f"{len(errors)} plans are off by {100 * statistics.median(errors):.1f} % in the median, "
        f"{100 * max(errors):.1f} % at most."
    )


def _row(cell: Cell, one: Outcome) -> str:
    way, degrees = variant_parts(one.variant)
    chunks = f"{degrees[0]}" if degrees[0] == degrees[1] else f"{degrees[0]}/{degrees[1]}"
    predicted = "" if one.predicted_seconds is None else f"{1e3 * one.predicted_seconds:.0f} ms"
    error = _error(one)
    spread = f"{1e3 * min(one.seconds):.0f} to {1e3 * max(one.seconds):.0f}"
    return (
        f"| {one.role} | {_WAY.get(way, 'DistributedDataParallel')} | {chunks} | {predicted} | "
        f"{1e3 * _median(one):.0f} ms | {spread} | "
        f"{'' if error is None else f'{100 * error:+.1f} %'} | {_against(cell, one)} |"
    )


def _name(one: Outcome) -> str:
    way, degrees = variant_parts(one.variant)
    return f"{one.role or 'random'}: {_WAY.get(way, 'DDP')}, {degrees[0]}/{degrees[1]} chunks"


def _median(one: Outcome) -> float:
    return statistics.median(one.seconds)


def _error(one: Outcome) -> float | None:
    if one.predicted_seconds is None:
        return None
    return one.predicted_seconds / _median(one) - 1


def _off(one: Outcome) -> str:
    error = _error(one)
    return "" if error is None else f"{100 * error:+.1f} %"


def _against(cell: Cell, one: Outcome) -> str:
    reference = next(each for each in cell.outcomes if each.variant == "ddp25:1")
    return f"{_median(reference) / _median(one):.2f}"
