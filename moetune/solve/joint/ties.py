"""The leading layouts of a job: those that tie, and the order among them."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moetune.domain.pipeline import SCHEDULES
from moetune.domain.training import TOKEN_DISPATCHERS, FoldedLayout
from moetune.solve.training.memory import RankMemory
from moetune.solve.training.step import StepSeconds

NUM_ALTERNATIVES = 5
NOISE = 0.01
"""Steps within it of each other tie: one that leaves memory free is taken, then the simpler one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayout:
    """A layout with its step and its fullest pipeline rank.

    Args:
        saved_seconds: of the step, by hidden exchanges; only of a search's answers.
        saved_by_graphs_seconds: as against launching each kernel; only of a search's answers.
        mean_parts: of the step, on the mean of the pipeline ranks; only of a search's answers
            with a pipeline.
    """

    layout: FoldedLayout
    step: StepSeconds
    memory: RankMemory
    saved_seconds: float = 0.0
    saved_by_graphs_seconds: float = 0.0
    mean_parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Leaders:
    """The fastest layouts of each of the sizes that lead, with those that tie with them.

    Args:
        roomy_bytes: that a layout takes at most where it wins a tie.
        limit: seconds above which no layout changes the answer.
        tie_limit: seconds above which no layout ties with the best.
    """

    roomy_bytes: float
    found: dict[tuple[int, ...], list[PricedLayout]] = field(default_factory=dict)
    limit: float = float("inf")
    tie_limit: float = float("inf")

    def limit_of(self, layout: FoldedLayout) -> float:
        """Return the seconds above which a layout does not tie with the best of its sizes."""
        tied = self.found.get(_ranks(layout))
        return float("inf") if tied is None else tied[0].step.seconds * (1 + NOISE)

    def add(self, one: PricedLayout) -> None:
        """Take a layout among those of its sizes, if it ties with them or is faster."""
        key = _ranks(one.layout)
        tied = _tied([*self.found.get(key, ()), one])
        self.found[key] = sorted(tied, key=_seconds)
        fastest = heapq.nsmallest(
            1 + NUM_ALTERNATIVES, (_seconds(tied[0]) for tied in self.found.values())
        )
        self.tie_limit = fastest[0] * (1 + NOISE)
        if len(fastest) > NUM_ALTERNATIVES:
            self.limit = fastest[-1] * (1 + NOISE)

    def ranked(self) -> list[PricedLayout]:
        """Return the simplest of those that tie with the best, and the best of other sizes."""
        near = dict(self.found)
        first = min(_tied([one for tied in near.values() for one in tied]), key=self._order)
        del near[_ranks(first.layout)]
        others = (min(tied, key=self._order) for tied in near.values())
        return [first, *heapq.nsmallest(NUM_ALTERNATIVES, others, key=_seconds)]

    def _order(self, one: PricedLayout) -> tuple[float, ...]:
        return (
            on_host(one.layout) > 0, one.memory.peak_bytes > self.roomy_bytes, *_complexity(one)
        )  # fmt: skip


def _seconds(one: PricedLayout) -> float:
    return one.step.seconds


def on_host(layout: FoldedLayout) -> float:
    """Return the shares that are in host memory."""
    return layout.offload_activations + layout.offload_optimizer


def _ranks(layout: FoldedLayout) -> tuple[int, ...]:
    """Return what layouts share that differ in stages, dispatcher, overlap and recomputation."""
    return layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, layout.micro_batch


def _tied(among: Sequence[PricedLayout]) -> list[PricedLayout]:
    """Return those within noise of the fastest."""
    limit = min(map(_seconds, among)) * (1 + NOISE)
    return [one for one in among if one.step.seconds <= limit]


def _complexity(one: PricedLayout) -> tuple[float, ...]:
    """Return how much a layout has that can be left out, the heaviest first; then its time."""
    layout = one.layout
    return (
        on_host(layout), layout.zero, len(layout.recompute), layout.overlap != "none",
        TOKEN_DISPATCHERS.index(layout.dispatcher), SCHEDULES.index(layout.order), layout.vpp,
        layout.stages is not None,
        sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp)),
        one.step.seconds,
    )  # fmt: skip
