"""Costs under corrections: every operation's time multiplied by what was observed of it.

A factor holds `FULL_OCTAVES` above and below the sizes that it was observed at and fades to 1 at
`NO_OCTAVES`, on logarithmic scales: a slower link is slower for other chunks, too, and far away
nothing was observed.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from moetune.domain.arrays import array_of, floats_of, is_many
from moetune.domain.corrections import CorrectedOp, Correction, distance_octaves
from moetune.domain.costs import Burst, CopyMode, Costs, Estimate, LinearCost, takes_arrays
from moetune.domain.gemm_forms import GemmForm, even_form
from moetune.domain.interference import Interference, OverlapSpeeds
from moetune.domain.layer import LayerKey
from moetune.domain.samples import CollectiveOp, Direction
from moetune.domain.step_errors import StepErrors

FULL_OCTAVES, NO_OCTAVES = 4.0, 8.0


def factor_at(corrections: Sequence[Correction], size: float) -> float:
    """Return the factor at a size.

    Args:
        corrections: of one operation, at any sizes; none is 1.
    """
    if not corrections or size <= 0:
        return 1.0
    known = sorted(corrections, key=lambda one: one.size)
    logs = [math.log(one.factor) for one in known]
    at = bisect_right([one.size for one in known], size)
    below, above = max(at - 1, 0), min(at, len(known) - 1)
    log = logs[below]
    if known[above].size > known[below].size:
        whole = math.log(known[above].size / known[below].size)
        log += (logs[above] - log) * math.log(size / known[below].size) / whole
    distance = min(distance_octaves(size, known[index].size) for index in (below, above))
    share = (NO_OCTAVES - distance) / (NO_OCTAVES - FULL_OCTAVES)
    return math.exp(log * min(max(share, 0.0), 1.0))


def corrected(costs: Costs, corrections: Sequence[Correction]) -> Costs:
    """Return the costs with every operation's times multiplied by its factor."""
    return CorrectedCosts(costs, corrections) if corrections else costs


class CorrectedCosts:
    """Costs (`domain.costs.Costs`) under corrections; a corrected operation has no α–β line."""

    def __init__(self, costs: Costs, corrections: Iterable[Correction]) -> None:
        self._costs = costs
        self._known: dict[tuple[str, int], list[Correction]] = {}
        for one in corrections:
            self._known.setdefault((one.op, one.group_size), []).append(one)

    @property
    def takes_arrays(self) -> bool:
        """Whether the costs that are corrected take arrays of sizes."""
        return takes_arrays(self._costs)

    @property
    def as_measured(self) -> Costs:
        """The costs without their corrections."""
        return self._costs.as_measured

    @property
    def interference(self) -> Interference:
        """As measured: what operations cost each other is not corrected."""
        return self._costs.interference

    @property
    def copy_mode(self) -> CopyMode | None:
        """As measured."""
        return self._costs.copy_mode

    def overlap_speeds(self, *, exchange_bytes: float, exchange_seconds: float) -> OverlapSpeeds:
        """Return the measured speeds of an exchange that takes as long."""
        return self._costs.overlap_speeds(
            exchange_bytes=exchange_bytes, exchange_seconds=exchange_seconds
        )

    def burst(self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0) -> Burst:
        """Return the measured lead of the link after a pause."""
        return self._costs.burst(op=op, group_size=group_size, num_nodes=num_nodes)

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:
        """As measured with the profile: what was observed since changes the operations."""
        return self._costs.step_errors(key, tokens=tokens)

    def gemm_line(self, *, dtype: str) -> LinearCost | None:
        """Return the line, None where GEMMs are corrected."""
        is_corrected = any(not group_size for _, group_size in self._known)
        return None if is_corrected else self._costs.gemm_line(dtype=dtype)

    def collective_line(
        self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0
    ) -> LinearCost | None:
        """Return the line, None where the collective is corrected."""
        if (op, group_size) in self._known:
            return None
        return self._costs.collective_line(op=op, group_size=group_size, num_nodes=num_nodes)

    def gemm(
        self, *, dtype: str, product: GemmForm, num_experts: int, rows: float, d_in: int, d_out: int
    ) -> Estimate:
        """Return the corrected time; backward forms have the backward experts' factor."""
        found = self._costs.gemm(
            dtype=dtype, product=product, num_experts=num_experts, rows=rows, d_in=d_in,
            d_out=d_out,
        )  # fmt: skip
        op: CorrectedOp = (
            "experts_forward" if even_form(product) == "forward" else "experts_backward"
        )
        return self._times(found, (op, 0), num_experts * rows * d_in * d_out)

    def rows_op(self, *, op: str, dtype: str, rows: float, width: int) -> Estimate | None:
        """Return the measured time: the GEMMs carry the experts' correction."""
        return self._costs.rows_op(op=op, dtype=dtype, rows=rows, width=width)

    def collective(
        self,
        *,
        op: CollectiveOp,
        group_size: int,
        num_bytes: float,
        in_flight: int = 1,
        num_nodes: int = 0,
    ) -> Estimate:
        """Return the corrected time, whatever is in flight."""
        found = self._costs.collective(
            op=op, group_size=group_size, num_bytes=num_bytes, in_flight=in_flight,
            num_nodes=num_nodes,
        )  # fmt: skip
        return self._times(found, (op, group_size), num_bytes)

    def attention(
        self,
        *,
        dtype: str,
        num_sequences: float,
        length: int,
        num_heads: int,
        head_dim: int,
        backward: bool,
    ) -> Estimate | None:
        """Return the measured time."""
        return self._costs.attention(
            dtype=dtype, num_sequences=num_sequences, length=length, num_heads=num_heads,
            head_dim=head_dim, backward=backward,
        )  # fmt: skip

    def copy(self, *, direction: Direction, pinned: bool, num_bytes: float) -> Estimate:
        """Return the measured time."""
        return self._costs.copy(direction=direction, pinned=pinned, num_bytes=num_bytes)

    def _times(self, found: Estimate, key: tuple[str, int], size: float) -> Estimate:
        known = self._known.get(key)
        if known is None:
            return found
        if is_many(size):
            factors = array_of([factor_at(known, one) for one in floats_of(size).tolist()])
            return found._replace(seconds=found.seconds * factors)
        return found._replace(seconds=found.seconds * factor_at(known, size))
