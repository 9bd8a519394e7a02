"""Degrees of a layer's phases with one memory strategy: a table of seconds and of what fits.

A `Ranking` is the choice from the table, and what it is compared with.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from moetune.domain.constraints import Bounds, Order, Strategy
from moetune.domain.layer import PHASES, Phase
from moetune.domain.plan import Memory
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.memory import Degrees, MemoryBudget
from moetune.solve.layer.times import PhaseTime, StepTime, phase_seconds, phase_time, step_time

NOISE = 0.01
"""Measured costs cannot tell times apart that differ by less: fewer chunks are then safer."""
WORTH = 0.05
"""Share of a step that chunks must promise to save where costs are measured.

About the error of a step predicted from them (`docs/results/netlab.md`). Steps of several
chunks share most of it, so that among them `NOISE` is enough.
"""
FEW_CHUNKS = 3
"""Rings have buffers for so many chunks at most."""
NUM_CONTENDERS, NUM_ALTERNATIVES = 4, 5
HOPELESS = 1.2
"""Times the nominal best above which no refit makes a degree the best one."""
ROUNDING = 1e-11
"""Share by which rounding errors of sums may move a time."""

Seconds = Mapping[int, float]
"""Of a phase, by its number of chunks, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeChooser:
    """The best degree of each phase for any number of tokens.

    Args:
        strategy: one that reuses memory needs several chunks.
        budget: memory that the peak of a step has to fit into; None without a bound.
    """

    costs: LayerCosts
    bounds: Bounds
    strategy: Strategy = "none"
    budget: MemoryBudget | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the costs come from measurements, with their noise, not from lines."""
        return self.costs.costs.is_measured(self.costs.dtype)

    @property
    def is_paired(self) -> bool:
        """Whether both phases get as many chunks: where costs are measured and no pins differ.

        The layer keeps rows for the backward pass by the pieces that the cuts of both phases make,
        f + b - gcd(f, b) of them. Its GEMMs run on pieces where a rank has several experts, and are
        then slower than those of a chunk (`LayerCosts.in_chunks`).
        """
        pins = {self.bounds.forward_degree, self.bounds.backward_degree}
        return self.is_measured and len(pins - {None}) <= 1

    @property
    def _costs(self) -> LayerCosts:
        """The costs in the numbers of chunks that are pinned for both phases."""
        forward, backward = self.bounds.forward_degree, self.bounds.backward_degree
        if forward is None or backward is None:
            return self.costs
        return self.costs.in_chunks(forward, backward)

    def pinned(self, phase: Phase) -> int | None:
        """Return the degree pinned for the phase, or for both by a pin of the other one."""
        pinned = self.bounds.pinned(phase)
        if pinned is None and self.is_paired:
            return self.bounds.forward_degree or self.bounds.backward_degree
        return pinned

    def bounded(self, phase: Phase, tokens: int) -> range:
        """Return the degrees that bounds and pins leave for so many tokens, ascending."""
        pinned = self.pinned(phase)
        if pinned is not None:
            pinned = min(pinned, tokens)
            return range(pinned, pinned + 1)
        return range(1, self.bounds.largest(tokens) + 1)

    def fits(self, tokens: int, degrees: Degrees) -> bool:
        """Return whether a step in so many chunks may be chosen, and fits into the memory."""
        if self.strategy != "none" and max(degrees) == 1:
            return False
        budget = self.budget
        return budget is None or budget.fits(strategy=self.strategy, degrees=degrees, tokens=tokens)

    def least(self, tokens: int) -> Degrees:
        """Return the degrees whose step takes the least memory, of equal ones the fewest chunks.

        Equal degrees need rows in one order, one chunk sums no gradients in float32, and rings have
        buffers for three chunks at most: from there on more chunks take less. All are tried with a
        pinned degree of the other phase.
        """
        budget = self.budget
        assert budget is not None  # noqa: S101 - asked where memory binds
        forward, backward = (self.bounded(phase, tokens) for phase in PHASES)
        few = {*range(1, FEW_CHUNKS + 1), forward[-1]} & {*forward}
        if len(forward) == 1 or len(backward) == 1:
            pairs = [*product(forward, backward)]
        elif self.is_paired:
            pairs = [(degree, degree) for degree in few]
        else:
            pairs = [pair for most in few for pair in ((most, most), (most, 1), (1, most))]
        if self.strategy != "none":
            pairs = [pair for pair in pairs if max(pair) > 1] or pairs
        peaks = {
            pair: budget.peak(strategy=self.strategy, degrees=pair, tokens=tokens).device_bytes
            for pair in pairs
        }
        return min(peaks, key=lambda pair: (peaks[pair], pair))

    def table(self, tokens: int) -> "DegreeTable":
        """Return the degrees of a number of tokens."""
        (table,) = self.tables([(tokens, tokens)])
        return table

    def tables(self, spans: Sequence[tuple[int, int]]) -> "list[DegreeTable]":
        """Return the degrees that hold for spans of tokens, timed for their geometric means.

        Args:
            spans: (fewest, most) tokens: the former bound the degrees, the latter have to fit.
        """
        forward, backward = (self._seconds(phase, spans) for phase in PHASES)
        return [
            DegreeTable(
                chooser=self, tokens=_middle(span), most_tokens=span[1], forward=ahead,
                backward=back,
            )
            for span, ahead, back in zip(spans, forward, backward, strict=True)
        ]  # fmt: skip

    def degrees(self, tokens: int) -> Degrees | None:
        """Return the best degrees for so many tokens that fit; None where none do."""
        return self.table(tokens).best()

    def time(self, phase: Phase, tokens: int, degree: int) -> PhaseTime:
        """Return the phase's time at a degree."""
        seconds = None
        if self.strategy != "none":
            (simulated,) = self._seconds(phase, [(tokens, tokens)])
            seconds = simulated.get(degree)
        return phase_time(
            costs=self._costs, phase=phase, tokens=tokens, degree=degree,
            order=self.bounds.chosen_order, strategy=self.strategy, seconds=seconds,
        )  # fmt: skip

    def _seconds(self, phase: Phase, spans: Sequence[tuple[int, int]]) -> list[Seconds]:
        """Return the phase's seconds in every number of chunks, of all spans worked out at once."""
        order = self.bounds.chosen_order
        sizes = [_middle(span) for span in spans]
        ranges = [self.bounded(phase, fewest) for fewest, _ in spans]

        def seconds() -> list[Seconds]:
            lengths = list(map(len, ranges))
            times = phase_seconds(
                costs=self._costs, phase=phase, order=order, strategy=self.strategy,
                tokens=np.repeat(sizes, lengths), degrees=np.concatenate(ranges),
            )  # fmt: skip
            parts = np.split(times, np.cumsum(lengths)[:-1])
            return [
                dict(zip(degrees, part.tolist(), strict=True))
                for degrees, part in zip(ranges, parts, strict=True)
            ]

        key = ("seconds", phase, self.strategy, order, tuple(zip(sizes, ranges, strict=True)))
        return self._costs.remembered(key, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeTable:
    """Seconds of both phases in every number of chunks that is allowed, for some tokens.

    Args:
        tokens: that are timed.
        most_tokens: that have to fit.
        forward, backward: seconds by number of chunks.
    """

    chooser: DegreeChooser
    tokens: int
    most_tokens: int
    forward: Seconds
    backward: Seconds

    def fits(self, degrees: Degrees) -> bool:
        """Return whether so many chunks may be chosen, and fit into the memory."""
        return self.chooser.fits(self.most_tokens, degrees)

    def pairs(self) -> Iterator[tuple[float, Degrees]]:
        """Yield the degrees of both phases behind their seconds, ascending."""
        first, second = list(self.forward), list(self.backward)
        if self.chooser.is_paired:
            shared = [(degree, degree) for degree in first if degree in self.backward]
            yield from sorted((self._seconds(degrees), degrees) for degrees in shared)
            return
        sums = np.add.outer([*self.forward.values()], [*self.backward.values()]).ravel()
        for place in np.argsort(sums, kind="stable").tolist():
            yield float(sums[place]), (first[place // len(second)], second[place % len(second)])

    def best(self) -> Degrees | None:
        """Return the fewest chunks that tie with the fastest that fit, or are within noise of them.

        Where costs are measured, several chunks without reuse have to be worth it. One rank, which
        sends nothing, has the fewest that fit.
        """
        chooser = self.chooser
        if chooser.costs.world_size == 1 and chooser.strategy == "none":
            return next(filter(self.fits, self._few()), None)
        if chooser.budget is not None and not self.fits(chooser.least(self.most_tokens)):
            return None
        near: list[Degrees] = []
        limit = math.inf
        for seconds, degrees in self.pairs():
            if seconds > limit:
                break
            if self.fits(degrees):
                limit = min(limit, seconds * (1 + (NOISE if chooser.is_measured else TIE)))
                near.append(degrees)
        if not near:
            return None  # one chunk each way alone, which reuses no memory
        if chooser.is_measured and chooser.strategy == "none":
            fewest = next(filter(self.fits, self._few()))
            around = chooser.costs.overhead(tokens=self.tokens).seconds
            best = around + min(map(self._seconds, near))
            if best > (around + self._seconds(fewest)) * (1 - WORTH):
                return fewest
        return min(near, key=lambda degrees: (sum(degrees), degrees))

    def next_best(self, chosen: Degrees, num: int) -> list[Degrees]:
        """Return the fastest other degrees that fit, of ties those with fewer chunks first."""
        others: list[tuple[float, Degrees]] = []
        for seconds, degrees in self.pairs():
            if len(others) >= num and seconds > others[num - 1][0] * (1 + 2 * ROUNDING):
                break
            if degrees != chosen and self.fits(degrees):
                others.append((seconds, degrees))
        around = self.chooser.costs.overhead(tokens=self.tokens).seconds
        others.sort(key=lambda pair: (rounded(pair[0] + around), pair[1]))
        return [degrees for _, degrees in others[:num]]

    def contenders(self, phase: Phase, chosen: Degrees) -> tuple[int, ...]:
        """Return a phase's chosen degree, then its nearest rivals and the powers of two.

        Rivals fit with the other phase's choice, and are not hopeless.
        """
        place = PHASES.index(phase)
        seconds = self.backward if place else self.forward
        limit = seconds[chosen[place]] * HOPELESS

        def fits(degree: int) -> bool:
            degrees = (chosen[0], degree) if place else (degree, chosen[1])
            return self.fits((degree, degree) if self.chooser.is_paired else degrees)

        order = sorted(seconds, key=lambda degree: (rounded(seconds[degree]), degree))
        hopeful = (degree for degree in order if seconds[degree] <= limit)
        rivals = [degree for degree in hopeful if degree != chosen[place] and fits(degree)]
        far = (degree for degree in rivals[NUM_CONTENDERS:] if degree.bit_count() == 1)
        return chosen[place], *rivals[:NUM_CONTENDERS], *far

    def _few(self) -> Iterator[Degrees]:
        """Yield degrees from the fewest chunks on, as many in both phases where they may be."""
        forward, backward = ([*phase] for phase in (self.forward, self.backward))
        for place in range(max(len(forward), len(backward))):
            yield (
                forward[min(place, len(forward) - 1)], backward[min(place, len(backward) - 1)]
            )  # fmt: skip

    def _seconds(self, degrees: Degrees) -> float:
        return self.forward[degrees[0]] + self.backward[degrees[1]]


def _middle(span: tuple[int, int]) -> int:
    return math.isqrt(span[0] * span[1])


def rounded(seconds: float) -> float:
    """Return the time without its last digits, which rounding errors of sums may change."""
    return float(f"{seconds:.11e}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The degrees chosen with one strategy, and the table that they were chosen from.

    Args:
        strategy: the plan's. One chunk each way reuses no memory: the chooser is then that of
            "none", whatever the strategy.
        budget: the memory that the choice has to fit into.
        chooser: of other numbers of tokens.
        table: that the degrees were chosen from.
        sequential: one chunk each way, allowed or not.
        degrees: the chosen ones.
        fits: whether they fit into the memory; where none do, they are the fastest.
    """

    strategy: Strategy
    budget: MemoryBudget
    chooser: DegreeChooser
    table: DegreeTable
    sequential: StepTime
    degrees: Degrees
    fits: bool = True

    @property
    def step(self) -> StepTime:
        """The chosen step."""
        return self.in_chunks(self.degrees)

    @property
    def memory(self) -> Memory:
        """The memory of the chosen step."""
        return self.budget.memory(strategy=self.strategy, degrees=self.degrees)

    @property
    def order(self) -> Order:
        """The link's order of the chunks; reused memory has buffers for the interleaved one."""
        return self.chooser.bounds.chosen_order if self.strategy == "none" else "interleaved"

    @property
    def wanted(self) -> StepTime:
        """The step that would be chosen with this strategy if there were more memory."""
        degrees = replace(self.chooser, budget=None).degrees(self.table.tokens)
        return self.in_chunks(degrees or self.degrees)

    @property
    def memory_forced(self) -> bool:
        """Whether other degrees would be chosen, without reuse, if there were more memory."""
        if self.strategy != "none":
            return False
        return not self.budget.fits(strategy="none", degrees=self.wanted.degrees)

    @property
    def has_one_chunk(self) -> bool:
        """Whether one chunk each way may be chosen without reuse."""
        phases = self.table.forward, self.table.backward
        return all(1 in seconds for seconds in phases) and self.table.fits((1, 1))

    def in_chunks(self, degrees: Degrees) -> StepTime:
        """Return the step in so many chunks."""
        if max(degrees) == 1:
            return replace(self.sequential, strategy=self.strategy)
        forward, backward = map(self.table.chooser.time, PHASES, [self.table.tokens] * 2, degrees)
        return replace(self.sequential, forward=forward, backward=backward, strategy=self.strategy)

    def in_one_chunk(self) -> "Ranking":
        """Return the ranking with one chunk each way as its choice, for any number of tokens."""
        chooser = replace(self.chooser, bounds=replace(self.chooser.bounds, max_degree=1))
        return replace(self, degrees=(1, 1), chooser=chooser)

    def others(self) -> list[StepTime]:
        """Return the next fastest choices, and one chunk each way wherever that is allowed."""
        steps = list(map(self.in_chunks, self.table.next_best(self.degrees, NUM_ALTERNATIVES)))
        if max(self.degrees) == 1 or not self.has_one_chunk:
            return steps
        several = [step for step in steps if max(step.degrees) > 1]
        others = [*several[: NUM_ALTERNATIVES - 1], self.sequential]
        return sorted(others, key=lambda step: (rounded(step.seconds), *step.degrees))


def rank_degrees(
    *, costs: LayerCosts, bounds: Bounds, budget: MemoryBudget, strategy: Strategy
) -> Ranking | None:
    """Return the best degrees that the bounds and the memory leave with that strategy.

    None where nothing fits, or where a strategy that reuses memory is left with one chunk each
    way, which reuses none, unless the caller pinned it.
    """
    tokens = budget.workload.tokens_per_rank
    chooser = DegreeChooser(costs=costs, bounds=bounds, strategy=strategy, budget=budget)
    table = chooser.table(tokens)
    degrees = table.best()
    if degrees is None and strategy != "none" and bounds.strategy == strategy:
        in_one = replace(bounds, max_degree=1)
        chooser = DegreeChooser(costs=costs, bounds=in_one, budget=budget)
        table = chooser.table(tokens)
        degrees = (1, 1) if table.best() == (1, 1) else None
    if degrees is None:
        return None
    sequential = step_time(
        costs=costs, tokens=tokens, forward_degree=1, backward_degree=1, order=bounds.chosen_order
    )
    return Ranking(
        strategy=strategy, budget=budget, chooser=chooser, table=table, degrees=degrees,
        sequential=sequential,
    )  # fmt: skip
