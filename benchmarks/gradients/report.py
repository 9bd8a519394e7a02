"""The table of a link: each way to reduce gradients, predicted beside measured."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gradients.ranks import Prediction, Work

_WORDS = {
    "end": "all at the end of the backward pass",
    "default": "moetune.replicate, no plan",
    "planned": "moetune.replicate, planned",
    "two": "moetune.BatchOverlap, two halves of the sequences in flight",
    "positions": "moetune.BatchOverlap, first and last positions in flight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One link.

    Args:
        seconds: raw step times by variant, in the order of the rounds.
        predicted: of the planned variants.
    """

    rate_mbit: float
    work: Work
    seconds: Mapping[str, tuple[float, ...]]
    predicted: Mapping[str, Prediction]


def report(cells: Sequence[Cell], *, machine: str) -> str:
    """Return the page."""
    return "\n".join(_lines(cells, machine)) + "\n"


def _lines(cells: Sequence[Cell], machine: str) -> Iterator[str]:
    yield from ("# Gradients between the exchanges", "", machine, "", _method(cells[0]))
    for cell in cells:
        yield from ("", f"## {cell.rate_mbit:g} Mbit/s", "")
        yield "| chunks | dense gradients | step | spread | predicted | against DDP |"
        yield "|---:|---|---:|---|---:|---:|"
        for variant, seconds in cell.seconds.items():
            yield _row(cell, variant, seconds)


def _method(cell: Cell) -> str:
    shape, moe = cell.work.transformer, cell.work.transformer.moe
    rounds = len(next(iter(cell.seconds.values())))
    gradients = [one.gradient_bytes for one in cell.predicted.values()]
    every = "every one" if shape.moe_every == 1 else f"one of {shape.moe_every}"
    size = f", {gradients[0] / 1e6:.0f} MB of dense gradients" if gradients else ""
    return (
        f"A language model of {shape.num_layers} blocks, experts in {every}, "
        f"d_model {moe.d_model}, d_hidden {moe.d_hidden}, {moe.num_experts} experts, top-"
        f"{moe.top_k}, {cell.work.sequences * shape.length} tokens a rank, float32{size}. "
        "Forward and backward pass with reduced gradients, without an optimizer. Variants take "
        "turns in one process; a step is the maximum over the ranks, a figure the median of "
        f"{rounds} rounds, the spread its quartiles. The plan is made of three recorded steps; "
        "predicted is the measured step with all gradients at the end, less what the simulated "
        "backward pass saves. Against DDP: how many times as fast as DistributedDataParallel with "
        "its own buckets (25 MB) in as many chunks."
    )


def _row(cell: Cell, variant: str, seconds: tuple[float, ...]) -> str:
    way, _, degree = variant.partition(":")
    words = _WORDS.get(way) or f"DistributedDataParallel, {way[3:]} MB buckets"
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    reference = cell.seconds.get(f"ddp25:{degree}")
    ratio = "" if reference is None else f"{statistics.median(reference) / median:.2f}"
    one, end = cell.predicted.get(variant), cell.seconds.get(f"end:{degree}")
    predicted = ""
    if one is not None and end is not None:
        saved = one.at_end_seconds - one.seconds
        predicted = f"{1e3 * (statistics.median(end) - saved):.0f} ms"
    return (
        f"| {degree} | {words} | {1e3 * median:.0f} ms | {1e3 * low:.0f}–{1e3 * high:.0f} | "
        f"{predicted} | {ratio} |"
    )
