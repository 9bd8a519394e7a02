"""A layer's costs at many sizes at once: rows are an array, and so are the seconds.

Sums and products of times hold for arrays as they hold for numbers, so that `LayerCosts` works out
the chunks of all sizes and degrees once. See `stacked`, which does so for many refits of one size.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from moetune.domain.arrays import array_of
from moetune.domain.costs import Burst, CopyMode, Costs, Estimate, LinearCost, takes_arrays
from moetune.domain.gemm_forms import GemmForm
from moetune.domain.interference import Interference, OverlapSpeeds
from moetune.domain.layer import LayerKey
from moetune.domain.samples import CollectiveOp, Direction
from moetune.domain.step_errors import StepErrors
from moetune.solve.layer.costs import LayerCosts


def sized(layer: LayerCosts) -> LayerCosts:
    """Return the layer's costs for arrays of rows, whatever its machine's costs take."""
    return layer if takes_arrays(layer.costs) else replace(layer, costs=_OneByOne(layer.costs))


class _OneByOne:
    """Costs (`domain.costs.Costs`) that take arrays of sizes, and predict one size at a time."""

    takes_arrays = True

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    @property
    def interference(self) -> Interference:
        """The table."""
        return self._costs.interference

    @property
    def copy_mode(self) -> CopyMode | None:
        """That of the costs."""
        return self._costs.copy_mode

    def overlap_speeds(self, *, exchange_bytes: float, exchange_seconds: float) -> OverlapSpeeds:
        """Return arrays of speeds."""
        every = np.broadcast_arrays(exchange_bytes, exchange_seconds)
        found = [
            self._costs.overlap_speeds(exchange_bytes=size, exchange_seconds=seconds)
            for size, seconds in zip(*(one.tolist() for one in every), strict=True)
        ]
        return OverlapSpeeds(
            comp=array_of([one.comp for one in found]), comm=array_of([one.comm for one in found])
        )

    def burst(self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0) -> Burst:
        """Return that of the costs."""
        return self._costs.burst(op=op, group_size=group_size, num_nodes=num_nodes)

    def gemm_line(self, *, dtype: str) -> LinearCost | None:
        """Return that of the costs."""
        return self._costs.gemm_line(dtype=dtype)

    def collective_line(
        self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0
    ) -> LinearCost | None:
        """Return that of the costs."""
        return self._costs.collective_line(op=op, group_size=group_size, num_nodes=num_nodes)

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:
        """Return those of the costs."""
        return self._costs.step_errors(key, tokens=tokens)

    def gemm(
        self, *, dtype: str, product: GemmForm, num_experts: int, rows: float, d_in: int, d_out: int
    ) -> Estimate:
        """Return an array of times."""
        return _each(
            lambda one: self._costs.gemm(
                dtype=dtype, product=product, num_experts=num_experts, rows=one, d_in=d_in,
                d_out=d_out,
            ),
            rows,
        )  # fmt: skip

    def rows_op(self, *, op: str, dtype: str, rows: float, width: int) -> Estimate | None:
        """Return an array of times; None where they were not measured."""
        if self._costs.rows_op(op=op, dtype=dtype, rows=1.0, width=width) is None:
            return None
        return _each(
            lambda one: self._costs.rows_op(op=op, dtype=dtype, rows=one, width=width), rows
        )

    def collective(
        self,
        *,
        op: CollectiveOp,
        group_size: int,
        num_bytes: float,
        in_flight: int = 1,
        num_nodes: int = 0,
    ) -> Estimate:
        """Return an array of times."""
        pairs = np.broadcast_arrays(num_bytes, in_flight)
        found = [
            self._costs.collective(
                op=op, group_size=group_size, num_bytes=size, in_flight=count, num_nodes=num_nodes
            ).seconds
            for size, count in zip(*(one.tolist() for one in pairs), strict=True)
        ]
        return Estimate(seconds=array_of(found), trust="measured")

    def attention(
        self, *, dtype: str, num_sequences: float, length: int, num_heads: int, head_dim: int,
        backward: bool,
    ) -> Estimate | None:  # fmt: skip
        """Return that of the costs: a layer has none."""
        return self._costs.attention(
            dtype=dtype, num_sequences=num_sequences, length=length, num_heads=num_heads,
            head_dim=head_dim, backward=backward,
        )  # fmt: skip

    def copy(self, *, direction: Direction, pinned: bool, num_bytes: float) -> Estimate:
        """Return an array of times."""
        return _each(
            lambda one: self._costs.copy(direction=direction, pinned=pinned, num_bytes=one),
            num_bytes,
        )


def _each(estimate: Callable[[float], Estimate | None], sizes: float) -> Estimate:
    found = map(estimate, np.asarray(sizes).tolist())
    seconds = [0.0 if one is None else one.seconds for one in found]
    return Estimate(seconds=array_of(seconds), trust="measured")
