"""Costs of a chunk whose tokens travel to the experts and back: two collectives."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetune.domain.arrays import array_of, is_many
from moetune.domain.constraints import Order
from moetune.domain.costs import Estimate
from moetune.domain.layer import LayerKey, Phase
from moetune.domain.samples import ALONE_CHUNKS
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import makespan
from moetune.solve.layer.operations import COUNT_BYTES, NOTHING, ROW_MOVES
from moetune.solve.layer.timeline import Task, pipeline_tasks
from moetune.solve.layer.totals import total


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllCosts(LayerCosts):
    """Costs where tokens travel to the experts: dispatch and combine are all-to-alls."""

    @property
    def key(self) -> LayerKey:
        """Of layers with all-to-alls."""
        return self.key_of("all_to_all")

    @property
    def num_transfers(self) -> int:
        """Dispatch and combine."""
        return 2

    @property
    def bytes_per_row(self) -> float:
        """One row's M values."""
        return self.layer.d_model * dtype_bytes(self.dtype)

    @property
    def sorts_rows(self) -> bool:
        """Whether several local experts receive rows from several ranks."""
        return self.world_size > 1 and self.local_experts > 1

    def _transfer(self, rows: float, degree: int) -> Estimate:
        """Return one chunk's dispatch, which is also its combine.

        A phase's chunks are in flight together, and a collective in a queue of several is not
        as long as one alone: the profile has both.
        """
        num_bytes = rows * self.bytes_per_row
        if is_many(degree):
            numbers = np.asarray(degree)
            each = np.where(numbers <= ALONE_CHUNKS, 1, numbers)
            return self.collectives("all_to_all", num_bytes, array_of(each))
        in_flight = 1 if degree <= ALONE_CHUNKS else degree
        return self.collective("all_to_all", num_bytes, in_flight=in_flight)

    def gathering(self, *, tokens: float) -> Estimate:  # noqa: ARG002 - of sequence shards
        """Return 0: a rank dispatches its own tokens."""
        return NOTHING

    def _compute(self, phase: Phase, rows: float) -> Estimate:
        """Return one chunk's GEMMs, activation, and the sorting of its rows by expert.

        The backward pass evaluates the activation again: the layer saves pre-activations.
        """
        sorting = self.sorting(rows)
        return total(*self.gemms(phase, rows), self.activation(phase, rows), sorting, sorting)

    def _phase_overhead(self, phase: Phase, *, tokens: float) -> Estimate:
        """Return gate and permutation, forward the opening exchanges."""
        rows = tokens * self.layer.top_k
        ends = self.opening(tokens=tokens) if phase == "forward" else NOTHING
        return total(
            self.gate(phase, tokens=tokens),
            *(self.rows_op(op, rows, self.layer.d_model) for op in ROW_MOVES),
            ends,
        )

    def opening(self, *, tokens: float) -> Estimate:
        """Return the two small exchanges before a forward phase; 0 where the gate is not measured.

        They are of the ranks' numbers of tokens, and of the counts of all chunks.
        """
        if self.gate("forward", tokens=tokens) is NOTHING:
            return NOTHING
        exchange = self.collective("all_to_all", self.layer.num_experts * COUNT_BYTES)
        return total(exchange, exchange)

    def makespan(
        self, *, degree: int, rows: float, transfer_seconds: float, compute_seconds: float,
        order: Order,
    ) -> float:  # fmt: skip
        """Return the time of a phase: `degree.makespan`."""
        speeds = self.speeds(rows=rows, transfer_seconds=transfer_seconds)
        return makespan(
            degree=degree,
            transfer_seconds=transfer_seconds,
            compute_seconds=compute_seconds,
            comm_speed=speeds.comm,
            comp_speed=speeds.comp,
            order=order,
        )

    def tasks(
        self,
        *,
        transfer_seconds: Sequence[float],
        compute_seconds: Sequence[float],
        gather_seconds: float,  # noqa: ARG002 - of sequence shards
        order: Order,
    ) -> list[Task]:
        """Return dispatches, experts and combines."""
        return pipeline_tasks(
            dispatch_seconds=transfer_seconds,
            compute_seconds=compute_seconds,
            combine_seconds=transfer_seconds,
            order=order,
        )
