"""Which degree each phase gets: bounds, ranking at one size, and fast answers at many."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from moetune.domain.costs import LinearCost
from moetune.domain.errors import InputError
from moetune.domain.plan import Order
from moetune.solve.degree import TIE, best_degree, makespan
from moetune.solve.phases import PHASES, LayerCosts, Phase
from moetune.solve.predict import PhaseTime, phase_time

MAX_DEGREE = 64
POINTS_PER_OCTAVE = 8
TABLE_MARGIN = 0.002
"""Degrees this close in the interpolated table are compared with exact costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the caller pinned (not None) or bounded.

    Raises:
        InputError: a degree or a size below 1.
    """

    forward_degree: int | None = None
    backward_degree: int | None = None
    max_degree: int = MAX_DEGREE
    min_chunk_tokens: int = 1
    order: Order | None = None

    def __post_init__(self) -> None:
        for name in ("forward_degree", "backward_degree", "max_degree", "min_chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")

    @property
    def chosen_order(self) -> Order:
        """The order pinned, or dispatch first: no order of the chunks is faster."""
        return self.order or "dispatch_first"

    def pinned(self, phase: Phase) -> int | None:
        """Return the degree pinned for the phase."""
        return self.forward_degree if phase == "forward" else self.backward_degree

    def largest(self, tokens: int) -> int:
        """Return the largest degree allowed; one chunk always is, however small."""
        return max(1, min(self.max_degree, tokens // self.min_chunk_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeChooser:
    """The best degree of each phase for any number of tokens.

    Args:
        max_pipelined_tokens: above it the buffers of more than one chunk do not fit.
    """

    costs: LayerCosts
    bounds: Bounds
    max_pipelined_tokens: float = math.inf
    _table: "_ChunkTable" = field(init=False)
    _lines: dict[Phase, tuple[LinearCost, LinearCost] | None] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_table", _ChunkTable(self.costs))
        closed = self.costs.costs.interference.is_none
        closed &= self.bounds.chosen_order == "dispatch_first" and self.costs.world_size > 1
        lines = {phase: self.costs.lines(phase) if closed else None for phase in PHASES}
        object.__setattr__(self, "_lines", lines)

    @property
    def is_closed(self) -> bool:
        """Whether every answer is a closed form's, at once and exact."""
        return all(lines is not None for lines in self._lines.values())

    def rank(self, phase: Phase, tokens: int) -> tuple[PhaseTime, ...]:
        """Return every degree that is allowed, best first and then by time."""
        times = [self._time(phase, tokens, degree) for degree in self._allowed(phase, tokens)]
        if self._lines[phase] is not None or self.costs.world_size == 1:
            best = self.degree(phase, tokens)
        else:
            best = _smallest_best(times)
        return tuple(
            sorted(times, key=lambda time: (time.degree != best, time.seconds, time.degree))
        )

    def _allowed(self, phase: Phase, tokens: int) -> range:
        pinned = self.bounds.pinned(phase)
        if pinned is not None:
            pinned = min(pinned, tokens)
            return range(pinned, pinned + 1)
        fits = tokens <= self.max_pipelined_tokens
        return range(1, (self.bounds.largest(tokens) if fits else 1) + 1)

    def degree(self, phase: Phase, tokens: int, *, among: range | None = None) -> int:
        """Return the best degree for so many tokens.

        Args:
            among: where the answer is expected, when it is known at both ends of an interval.
        """
        allowed = self._allowed(phase, tokens)
        if len(allowed) == 1 or self.costs.world_size == 1:
            return allowed[0]
        lines = self._lines[phase]
        if lines is not None:
            return self._closed_form(lines, tokens, max_degree=allowed[-1])
        if among is None:
            return self._search(phase, tokens, allowed[-1])
        return _smallest_best(
            [self._time(phase, tokens, degree) for degree in among if degree in allowed]
        )

    def _closed_form(
        self, lines: tuple[LinearCost, LinearCost], tokens: int, *, max_degree: int
    ) -> int:
        rows = tokens * self.costs.layer.top_k
        return best_degree(
            transfer=lines[0],
            payload_bytes=rows * self.costs.bytes_per_row,
            compute=lines[1],
            macs=rows * self.costs.macs_per_row,
            max_degree=max_degree,
        )

    def _search(self, phase: Phase, tokens: int, largest: int) -> int:
        """Compare exactly what is close to best in the table."""
        rows = tokens * self.costs.layer.top_k
        near = self._table.times(phase, rows, largest, self.bounds.chosen_order)
        limit = min(near) * (1 + TABLE_MARGIN)
        degrees = [degree for degree, seconds in enumerate(near, 1) if seconds <= limit]
        if len(degrees) == 1:
            return degrees[0]
        return _smallest_best([self._time(phase, tokens, degree) for degree in degrees])

    def _time(self, phase: Phase, tokens: int, degree: int) -> PhaseTime:
        order = self.bounds.chosen_order
        return phase_time(costs=self.costs, phase=phase, tokens=tokens, degree=degree, order=order)


class _ChunkTable:
    """Chunk costs between points of a geometric grid, linearly, so that lines stay exact.

    Eight points a factor of two meet a smooth curve within 0.1 %, a kink within 1 %. Asking the
    measured curves for every degree at every size would take ten times as long.
    """

    def __init__(self, costs: LayerCosts) -> None:
        self._costs = costs
        self._compute: dict[tuple[Phase, int], float] = {}
        self._transfer: dict[tuple[int, int], float] = {}

    def times(self, phase: Phase, rows: int, largest: int, order: Order) -> list[float]:
        """Return the interpolated times of the degrees from 1 to `largest`."""
        interference = self._costs.costs.interference
        comm_speed, comp_speed = interference.comm.comp, interference.comp.comm
        found = []
        for degree in range(1, largest + 1):
            index, share = _cell(rows / degree)
            found.append(
                makespan(
                    degree=degree,
                    transfer_seconds=self._transfer_between(degree, index, share),
                    compute_seconds=self._compute_between(phase, index, share),
                    comm_speed=comm_speed,
                    comp_speed=comp_speed,
                    order=order,
                )
            )
        return found

    def _compute_between(self, phase: Phase, index: int, share: float) -> float:
        low, high = (phase, index), (phase, index + 1)
        for key in (low, high):
            if key not in self._compute:
                rows = _grid_rows(key[1])
                self._compute[key] = self._costs.compute(phase=phase, rows=rows).seconds
        return (1 - share) * self._compute[low] + share * self._compute[high]

    def _transfer_between(self, degree: int, index: int, share: float) -> float:
        low, high = (degree, index), (degree, index + 1)
        for key in (low, high):
            if key not in self._transfer:
                rows = _grid_rows(key[1])
                self._transfer[key] = self._costs.transfer(rows=rows, degree=degree).seconds
        return (1 - share) * self._transfer[low] + share * self._transfer[high]


def _smallest_best(times: Sequence[PhaseTime]) -> int:
    """Return the smallest of the degrees that tie for the best time."""
    limit = min(time.seconds for time in times) * (1 + TIE)
    return min(time.degree for time in times if time.seconds <= limit)


def _grid_rows(index: int) -> float:
    return float(2 ** (index / POINTS_PER_OCTAVE))


def _cell(rows: float) -> tuple[int, float]:
    """Return the grid point below `rows` and how far it lies towards the next, 0 to 1."""
    index = math.floor(POINTS_PER_OCTAVE * math.log2(rows))
    low, high = _grid_rows(index), _grid_rows(index + 1)
    return index, (rows - low) / (high - low)
