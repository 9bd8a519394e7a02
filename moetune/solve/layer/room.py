"""Degrees that fit into a layer's memory, for any number of tokens."""

from bisect import bisect_left
from collections.abc import Sequence

from moetune.domain.constraints import Strategy
from moetune.solve.layer.budget import FEW_CHUNKS, MOST_TOKENS, Degrees, MemoryBudget


class Room:
    """The degrees of both phases that fit with one strategy; what was asked once is remembered.

    Args:
        max_degree: the largest degree of either phase.
    """

    def __init__(self, budget: MemoryBudget, *, strategy: Strategy, max_degree: int) -> None:
        self._budget = budget
        self._strategy: Strategy = strategy
        self._max_degree = max_degree
        self._known: dict[Degrees, tuple[int, int]] = {}
        self._most_of: dict[Degrees, int] = {}
        self._most: dict[int, int] = {}
        self._equal: int | None = None

    def fits(self, tokens: int, degrees: Degrees) -> bool:
        """Return whether a step in so many chunks fits.

        A peak grows with the tokens: what is known of fewer or of more of them is an answer, too.
        """
        if degrees[0] == degrees[1] > FEW_CHUNKS:
            return self._fits(tokens, (FEW_CHUNKS, FEW_CHUNKS)) or self._fits(tokens, degrees)
        return self._fits(tokens, degrees)

    def _fits(self, tokens: int, degrees: Degrees) -> bool:
        fit, too_many = self._known.get(degrees, (0, MOST_TOKENS))
        if fit < tokens < too_many:
            fits = self._peak(tokens, degrees) <= self._budget.limit_bytes
            self._known[degrees] = (tokens, too_many) if fits else (fit, tokens)
            return fits
        return tokens <= fit

    def fits_all(self, tokens: int) -> bool:
        """Return whether any two degrees fit."""
        return tokens <= self.most_tokens_from(1)

    def fitting(self, tokens: int, pairs: Sequence[Degrees]) -> Sequence[Degrees]:
        """Return the pairs that fit; where none does, the first or the last, which takes less."""
        found = [pair for pair in pairs if self.fits(tokens, pair)]
        return found or [min(pairs[0], pairs[-1], key=lambda pair: self._peak(tokens, pair))]

    def equal(self, tokens: int, every: Sequence[int]) -> Sequence[int]:
        """Return the degrees that fit where both phases have as many.

        Where none does, the first or the last, which takes less.

        Args:
            every: the degrees that may be, ascending.
        """
        at = bisect_left(every, FEW_CHUNKS)
        found = [one for one in every[:at] if self.fits(tokens, (one, one))]
        if at < len(every):  # from there on more chunks take less memory
            first = bisect_left(
                every, True, at, key=lambda one: self.fits(tokens, (one, one))  # noqa: FBT003 - looked for, no switch
            )  # fmt: skip
            found += every[first:]
        return found or [min(every[0], every[-1], key=lambda one: self._peak(tokens, (one, one)))]

    def degrees(self, tokens: int, every: Sequence[int]) -> Sequence[int]:
        """Return degrees of which any two fit: those from a power of two on, else one of them.

        Args:
            every: the degrees that may be, ascending from 1.
        """
        first = 1
        while first <= every[-1]:
            if tokens <= self.most_tokens_from(first):
                return every[first - 1 :]
            first *= 2
        pairs = [(one, one) for one in every]
        if tokens > self._most_of_equal():
            pairs = [pairs[0], pairs[-1]]
        return [self.fitting(tokens, pairs)[0][0]]

    def most_tokens(self, degrees: Degrees) -> int:
        """Return the most tokens that fit in so many chunks; 0 when not even one does."""
        found = self._most_of.get(degrees)
        if found is None:
            found = self._budget.most_tokens(strategy=self._strategy, degrees=degrees)
            self._most_of[degrees] = found
            self._known[degrees] = found, found + 1
        return found

    def most_tokens_from(self, degree: int) -> int:
        """Return the most tokens for which any two degrees from `degree` on fit."""
        if degree not in self._most:
            self._most[degree] = self._budget.most_tokens_from(
                degree, strategy=self._strategy, largest=self._max_degree
            )
        return self._most[degree]

    def _most_of_equal(self) -> int:
        """Return the most tokens that fit in as many chunks in both phases."""
        if self._equal is None:
            self._equal = 0
            for one in range(1, self._max_degree + 1):
                if self.fits(self._equal + 1, (one, one)):
                    self._equal = self.most_tokens((one, one))
        return self._equal

    def _peak(self, tokens: int, degrees: Degrees) -> int:
        peak = self._budget.peak(strategy=self._strategy, degrees=degrees, tokens=tokens)
        return peak.device_bytes
