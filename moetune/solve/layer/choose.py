"""The number of chunks (degree) of a layer with one memory strategy: the table, and the choice."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from moetune.domain.constraints import Bounds, Order, Strategy
from moetune.domain.layer import PHASES, Phase
from moetune.domain.plan import Memory
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.memory import MemoryBudget
from moetune.solve.layer.times import StepTime, price_phase, step_time

NOISE = 0.01
"""Relative difference of times that measured costs cannot resolve; fewer chunks are then safer."""
WORTH = 0.05
"""Share of a step that chunks must promise to save if costs are measured.

It is about the error of a step predicted from such costs (`docs/results/netlab.md`). Steps of
several chunks share most of that error, so `NOISE` is enough between them.
"""
FEW_CHUNKS = 3
"""Largest number of chunks that the ring buffers hold."""
NUM_CONTENDERS, NUM_ALTERNATIVES = 4, 5
HOPELESS = 1.2
"""Ratio to the best nominal time above which no refit makes a degree the best."""

Seconds = Mapping[int, float]
"""Seconds of a phase by its number of chunks, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeChooser:
    """The best degree for any number of tokens.

    Args:
        strategy: a strategy that reuses memory needs several chunks.
        budget: memory that the peak of a step has to fit into; None without a bound.
    """

    costs: LayerCosts
    bounds: Bounds
    strategy: Strategy = "none"
    budget: MemoryBudget | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the costs come from measurements, which have noise, and not from lines."""
        return self.costs.costs.is_measured(self.costs.dtype)

    def bounded(self, tokens: int) -> range:
        """Return the degrees that the bounds and a pin allow for `tokens`, ascending."""
        pinned = self.bounds.degree
        if pinned is not None:
            return range(min(pinned, tokens), min(pinned, tokens) + 1)
        return range(1, self.bounds.largest(tokens) + 1)

    def fits(self, tokens: int, degree: int) -> bool:
        """Return whether a step of `degree` chunks may be chosen and fits in memory."""
        if self.strategy != "none" and degree == 1:
            return False
        budget = self.budget
        return budget is None or budget.fits(strategy=self.strategy, degree=degree, tokens=tokens)

    def least(self, tokens: int) -> int:
        """Return the degree whose step takes the least memory; the fewest chunks if they tie.

        One chunk sums no gradients in float32. Rings hold buffers for at most three chunks, so from
        there on more chunks take less.
        """
        budget, degrees = self.budget, self.bounded(tokens)
        assert budget is not None  # noqa: S101 - asked where memory binds
        few = {*range(1, FEW_CHUNKS + 1), degrees[-1]} & {*degrees}
        if self.strategy != "none":
            few = few - {1} or few
        peaks: dict[int, int] = {
            degree: budget.peak(strategy=self.strategy, degree=degree, tokens=tokens).device_bytes
            for degree in sorted(few)
        }
        return min(peaks, key=peaks.__getitem__)

    def table(self, tokens: int) -> "DegreeTable":
        """Return the table of degrees for a number of tokens."""
        (table,) = self.tables([(tokens, tokens)])
        return table

    def tables(self, spans: Sequence[tuple[int, int]]) -> "list[DegreeTable]":
        """Return the tables of token spans, timed at geometric means, fitting the last size."""
        forward, backward = (self._seconds(phase, spans) for phase in PHASES)
        return [
            DegreeTable(
                chooser=self, tokens=_middle(span), most_tokens=span[1], forward=ahead,
                backward=back,
            )
            for span, ahead, back in zip(spans, forward, backward, strict=True)
        ]  # fmt: skip

    def degree(self, tokens: int) -> int | None:
        """Return the best degree for `tokens` that fits; None if none fits."""
        return self.table(tokens).best()

    def _seconds(self, phase: Phase, spans: Sequence[tuple[int, int]]) -> list[Seconds]:
        """Return the phase's seconds by number of chunks for each span, all computed at once."""
        order = self.bounds.chosen_order
        sizes = [_middle(span) for span in spans]
        ranges = [self.bounded(fewest) for fewest, _ in spans]

        def seconds() -> list[Seconds]:
            lengths = list(map(len, ranges))
            with np.errstate(over="ignore", invalid="ignore"):
                times = price_phase(
                    costs=self.costs, phase=phase, order=order, strategy=self.strategy,
                    tokens=np.repeat(sizes, lengths), degree=np.concatenate(ranges),
                ).seconds  # fmt: skip
            if not np.isfinite(times).all():
                raise ArithmeticError("the times of a phase are no finite numbers")
            parts = np.split(times, np.cumsum(lengths)[:-1])
            return [
                dict(zip(degrees, part.tolist(), strict=True))
                for degrees, part in zip(ranges, parts, strict=True)
            ]

        key = ("seconds", phase, self.strategy, order, tuple(zip(sizes, ranges, strict=True)))
        return self.costs.remembered(key, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeTable:
    """Seconds of both phases at every allowed degree, for a number of tokens.

    Args:
        tokens: tokens per rank that are timed.
        most_tokens: tokens per rank that have to fit in memory.
        forward, backward: seconds by number of chunks.
    """

    chooser: DegreeChooser
    tokens: int
    most_tokens: int
    forward: Seconds
    backward: Seconds

    def fits(self, degree: int) -> bool:
        """Return whether `degree` chunks may be chosen and fit in memory."""
        return self.chooser.fits(self.most_tokens, degree)

    def best(self) -> int | None:
        """Return the fewest chunks within noise of the fastest step that fits in memory.

        With measured costs, several chunks without reuse must save at least `WORTH`. A single rank
        sends nothing, and takes the fewest chunks that fit. None if nothing fits.
        """
        chooser = self.chooser
        keeps_all = chooser.strategy == "none"
        if chooser.costs.world_size == 1 and keeps_all:
            return next(filter(self.fits, self.forward), None)
        if chooser.budget is not None and not self.fits(chooser.least(self.most_tokens)):
            return None
        seconds = self._seconds()
        fastest = next(filter(self.fits, sorted(seconds, key=seconds.__getitem__)), None)
        if fastest is None:
            return None  # only one chunk is left, and it reuses no memory
        limit = seconds[fastest] * (1 + (NOISE if chooser.is_measured else TIE))
        ties = (degree for degree in seconds if seconds[degree] <= limit)
        best = next(filter(self.fits, ties))
        if chooser.is_measured and keeps_all:
            fewest, around = next(filter(self.fits, seconds)), self._overhead_seconds
            if around + seconds[fastest] > (around + seconds[fewest]) * (1 - WORTH):
                return fewest
        return best

    def next_best(self, chosen: int, num: int) -> list[int]:
        """Return the fastest other degrees that fit; fewer chunks come first if they tie."""
        seconds, around = self._seconds(), self._overhead_seconds
        ordered = sorted(seconds, key=lambda degree: (rounded(around + seconds[degree]), degree))
        rivals = (degree for degree in ordered if degree != chosen and self.fits(degree))
        return [*islice(rivals, num)]

    def contenders(self, chosen: int) -> tuple[int, ...]:
        """Return the chosen degree, its nearest rivals that fit, and promising powers of two."""
        seconds = self._seconds()
        limit = seconds[chosen] * HOPELESS
        order = sorted(seconds, key=lambda degree: (rounded(seconds[degree]), degree))
        hopeful = (degree for degree in order if seconds[degree] <= limit)
        rivals = [degree for degree in hopeful if degree != chosen and self.fits(degree)]
        far = (degree for degree in rivals[NUM_CONTENDERS:] if degree.bit_count() == 1)
        return chosen, *rivals[:NUM_CONTENDERS], *far

    def step(self, degree: int) -> StepTime:
        """Return the step with `degree` chunks."""
        costs, strategy = self.chooser.costs, self.chooser.strategy
        order = self.chooser.bounds.chosen_order
        return costs.remembered(
            ("step", self.tokens, degree, order, strategy),
            lambda: step_time(
                costs=costs, tokens=self.tokens, degree=degree, order=order, strategy=strategy,
                seconds=(self.forward[degree], self.backward[degree]),
            ),
        )  # fmt: skip

    def _seconds(self) -> Seconds:
        """Return the seconds of both phases together, by degree."""
        return {degree: self.forward[degree] + self.backward[degree] for degree in self.forward}

    @property
    def _overhead_seconds(self) -> float:
        return self.chooser.costs.overhead(tokens=self.tokens).seconds.item()


def _middle(span: tuple[int, int]) -> int:
    return math.isqrt(span[0] * span[1])


def rounded(seconds: float) -> float:
    """Return the time without its last digits, which the order of a sum may change."""
    return float(f"{seconds:.11e}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The degree chosen with one strategy, and the table that it was chosen from.

    Args:
        strategy: the plan's strategy; one chunk reuses no memory and has the chooser of "none".
        chooser: chooser for other numbers of tokens.
        table: table that the degree was chosen from.
        sequential: step in one chunk, allowed or not.
        fits: whether the degree fits in memory; if none fits, it is the fastest degree.
    """

    strategy: Strategy
    budget: MemoryBudget
    chooser: DegreeChooser
    table: DegreeTable
    sequential: StepTime
    degree: int
    fits: bool = True

    @property
    def step(self) -> StepTime:
        """The chosen step."""
        return self.in_chunks(self.degree)

    @property
    def memory(self) -> Memory:
        """The memory of the chosen step."""
        return self.budget.memory(strategy=self.strategy, degree=self.degree)

    @property
    def order(self) -> Order:
        """The link's order of the chunks; buffers of reused memory require interleaving."""
        return self.chooser.bounds.chosen_order if self.strategy == "none" else "interleaved"

    @property
    def wanted(self) -> StepTime:
        """The step that this strategy would choose with unlimited memory."""
        degree = replace(self.chooser, budget=None).degree(self.table.tokens)
        return self.in_chunks(degree or self.degree)

    @property
    def memory_forced(self) -> bool:
        """Whether memory alone prevents another degree; False for strategies that reuse memory."""
        if self.strategy != "none":
            return False
        return not self.budget.fits(strategy="none", degree=self.wanted.degree)

    @property
    def has_one_chunk(self) -> bool:
        """Whether one chunk may be chosen without reuse of memory."""
        return 1 in self.table.forward and self.table.fits(1)

    def in_chunks(self, degree: int) -> StepTime:
        """Return the step in `degree` chunks."""
        step = self.sequential if degree == 1 else self.table.step(degree)
        return replace(step, strategy=self.strategy)

    def in_one_chunk(self) -> "Ranking":
        """Return the ranking with one chunk as the choice, for any number of tokens."""
        chooser = replace(self.chooser, bounds=replace(self.chooser.bounds, max_degree=1))
        return replace(self, degree=1, chooser=chooser)

    def alternatives(self) -> list[StepTime]:
        """Return the next fastest choices, with one chunk among them if it is allowed."""
        steps = list(map(self.in_chunks, self.table.next_best(self.degree, NUM_ALTERNATIVES)))
        if self.degree == 1 or not self.has_one_chunk:
            return steps
        several = [step for step in steps if step.degree > 1]
        nearest = [*several[: NUM_ALTERNATIVES - 1], self.sequential]
        return sorted(nearest, key=lambda step: (rounded(step.seconds), step.degree))


def rank_degrees(
    *, costs: LayerCosts, bounds: Bounds, budget: MemoryBudget, strategy: Strategy
) -> Ranking | None:
    """Return the best degree within the bounds and the memory for that strategy.

    None if nothing fits. None also if only one chunk is left to a strategy that reuses memory,
    because one chunk reuses none; a strategy that the caller pinned is accepted.
    """
    tokens = budget.workload.tokens_per_rank
    chooser = DegreeChooser(costs=costs, bounds=bounds, strategy=strategy, budget=budget)
    table = chooser.table(tokens)
    degree = table.best()
    if degree is None and strategy != "none" and bounds.strategy == strategy:
        chooser = replace(chooser, bounds=replace(bounds, max_degree=1), strategy="none")
        table = chooser.table(tokens)
        degree = 1 if table.best() == 1 else None
    if degree is None:
        return None
    sequential = step_time(costs=costs, tokens=tokens, degree=1, order=bounds.chosen_order)
    return Ranking(
        strategy=strategy, budget=budget, chooser=chooser, table=table, degree=degree,
        sequential=sequential,
    )  # fmt: skip
