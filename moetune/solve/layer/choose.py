"""Degrees of a layer's phases with one memory strategy: a table of seconds and of what fits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from moetune.domain.constraints import Bounds, Strategy
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.memory import Degrees, MemoryBudget
from moetune.solve.layer.times import PhaseTime, phase_seconds, phase_time

NOISE = 0.01
"""Measured costs cannot tell times apart that differ by less: fewer chunks are then safer."""
WORTH = 0.05
"""Share of a step that chunks must promise to save where costs are measured.

About the error of a step predicted from them (`docs/results/netlab.md`). Steps of several
chunks share most of it, so that among them `NOISE` is enough.
"""
FEW_CHUNKS = 3
"""Rings have buffers for so many chunks at most."""
NUM_CONTENDERS = 4
HOPELESS = 1.2
"""Times the nominal best above which no refit makes a degree the best one."""
ROUNDING = 1e-11
"""Share by which rounding errors of sums may move a time."""

PhaseTimes = tuple[PhaseTime, PhaseTime]
Seconds = Mapping[int, float]
"""Of a phase, by its number of chunks, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeChooser:
    """The best degree of each phase for any number of tokens.

    Args:
        strategy: one that reuses memory needs several chunks.
        budget: memory that the peak of a step has to fit into; None without a bound.

    Attributes:
        is_measured: whether the costs come from measurements, with their noise, not from lines.
        is_paired: whether both phases get as many chunks: where costs are measured and no pins
            differ. The layer keeps rows for the backward pass by the pieces that the cuts of both
            phases make, f + b - gcd(f, b) of them. Its GEMMs run on pieces where a rank has several
            experts, and are then slower than those of a chunk (`LayerCosts.in_chunks`).
    """

    costs: LayerCosts
    bounds: Bounds
    strategy: Strategy = "none"
    budget: MemoryBudget | None = None
    is_measured: bool = field(init=False)
    is_paired: bool = field(init=False)

    def __post_init__(self) -> None:
        forward, backward = self.bounds.forward_degree, self.bounds.backward_degree
        if forward is not None and backward is not None:
            # All that is asked of the costs is then of these degrees.
            object.__setattr__(self, "costs", self.costs.in_chunks(forward, backward))
        is_measured = self.costs.costs.is_measured(self.costs.dtype)
        object.__setattr__(self, "is_measured", is_measured)
        is_paired = is_measured and len({forward, backward} - {None}) <= 1
        object.__setattr__(self, "is_paired", is_paired)

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
        buffers for three chunks at most: from there on more chunks take less. All are tried beside
        a pinned degree.
        """
        budget = self.budget
        assert budget is not None  # noqa: S101 - asked where memory binds
        forward, backward = (self.bounded(phase, tokens) for phase in PHASES)
        few = {*range(1, FEW_CHUNKS + 1), forward[-1]} & {*forward}
        if len(forward) == 1 or len(backward) == 1:
            pairs = [*product(forward, backward)]
        elif self.is_paired:
            pairs = [(one, one) for one in few]
        else:
            pairs = [pair for one in few for pair in ((one, one), (one, 1), (1, one))]
        if self.strategy != "none":
            pairs = [pair for pair in pairs if max(pair) > 1] or pairs
        peaks = {
            pair: budget.peak(strategy=self.strategy, degrees=pair, tokens=tokens).device_bytes
            for pair in pairs
        }
        return min(peaks, key=lambda pair: (peaks[pair], pair))

    def table(self, tokens: int) -> "DegreeTable":
        """Return the degrees of a number of tokens."""
        (found,) = self.tables([(tokens, tokens)])
        return found

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

    def times(self, tokens: int, degrees: Degrees) -> PhaseTimes:
        """Return both phases at these degrees."""
        forward, backward = map(self.time, PHASES, (tokens, tokens), degrees)
        return forward, backward

    def time(self, phase: Phase, tokens: int, degree: int) -> PhaseTime:
        """Return the phase's time at a degree."""
        seconds = None
        if self.strategy != "none":
            (known,) = self._seconds(phase, [(tokens, tokens)])
            seconds = known.get(degree)
        return phase_time(
            costs=self.costs,
            phase=phase,
            tokens=tokens,
            degree=degree,
            order=self.bounds.chosen_order,
            strategy=self.strategy,
            seconds=seconds,
        )

    def _seconds(self, phase: Phase, spans: Sequence[tuple[int, int]]) -> list[Seconds]:
        """Return the phase's seconds in every number of chunks, of all spans worked out at once."""
        order = self.bounds.chosen_order
        every = [(_middle(span), self.bounded(phase, span[0])) for span in spans]

        def seconds() -> list[Seconds]:
            lengths = [len(degrees) for _, degrees in every]
            times = phase_seconds(
                costs=self.costs, phase=phase, order=order, strategy=self.strategy,
                tokens=np.repeat([tokens for tokens, _ in every], lengths),
                degrees=np.concatenate([degrees for _, degrees in every]),
            )  # fmt: skip
            parts = np.split(times, np.cumsum(lengths)[:-1])
            return [
                dict(zip(degrees, part.tolist(), strict=True))
                for (_, degrees), part in zip(every, parts, strict=True)
            ]

        return self.costs.remembered(
            ("seconds", phase, self.strategy, order, tuple(every)), seconds
        )


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
            shared = [one for one in first if one in self.backward]
            yield from sorted(
                (self.forward[one] + self.backward[one], (one, one)) for one in shared
            )
            return
        sums = np.add.outer([*self.forward.values()], [*self.backward.values()]).ravel()
        for at in np.argsort(sums, kind="stable").tolist():
            yield float(sums[at]), (first[at // len(second)], second[at % len(second)])

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
        found: list[tuple[float, Degrees]] = []
        for seconds, degrees in self.pairs():
            if len(found) >= num and seconds > found[num - 1][0] * (1 + 2 * ROUNDING):
                break
            if degrees != chosen and self.fits(degrees):
                found.append((seconds, degrees))
        around = self.chooser.costs.overhead(tokens=self.tokens).seconds
        found.sort(key=lambda pair: (rounded(pair[0] + around), pair[1]))
        return [degrees for _, degrees in found[:num]]

    def contenders(self, phase: Phase, chosen: Degrees) -> tuple[int, ...]:
        """Return a phase's chosen degree, then its nearest rivals and the powers of two.

        Rivals fit beside the other phase's choice, and are not hopeless.
        """
        at = PHASES.index(phase)
        seconds = self.backward if at else self.forward
        limit = seconds[chosen[at]] * HOPELESS
        order = sorted(seconds, key=lambda degree: (rounded(seconds[degree]), degree))
        hopeful = (one for one in order if one != chosen[at] and seconds[one] <= limit)
        rivals = [one for one in hopeful if self.fits(self._beside(at, one, chosen))]
        far = (one for one in rivals[NUM_CONTENDERS:] if one.bit_count() == 1)
        return chosen[at], *rivals[:NUM_CONTENDERS], *far

    def _few(self) -> Iterator[Degrees]:
        """Yield degrees from the fewest chunks on, as many in both phases where they may be."""
        forward, backward = ([*phase] for phase in (self.forward, self.backward))
        for one in range(max(len(forward), len(backward))):
            yield forward[min(one, len(forward) - 1)], backward[min(one, len(backward) - 1)]

    def _beside(self, at: int, degree: int, others: Degrees) -> Degrees:
        """Return the degrees of both phases where the one at the index has so many."""
        if self.chooser.is_paired:
            return degree, degree
        return (others[0], degree) if at else (degree, others[1])

    def _seconds(self, degrees: Degrees) -> float:
        return self.forward[degrees[0]] + self.backward[degrees[1]]


def _middle(span: tuple[int, int]) -> int:
    return math.isqrt(span[0] * span[1])


def rounded(seconds: float) -> float:
    """Return the time without its last digits, which rounding errors of sums may change."""
    return float(f"{seconds:.11e}")
