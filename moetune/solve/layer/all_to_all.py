"""Costs of a chunk whose tokens travel to the experts and back: two collectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from moetune.domain.arrays import is_many, longer, shorter
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
        as long as one alone: the profile has both. What pauses of the link are worth is shared
        among the exchanges of the phase.
        """
        if is_many(degree):
            in_flight = cast("int", np.where(np.asarray(degree) <= ALONE_CHUNKS, 1, degree))
        else:
            in_flight = 1 if degree <= ALONE_CHUNKS else degree
        found = self.collective("all_to_all", rows * self.bytes_per_row, in_flight=in_flight)
        burst = self.costs.burst(
            op="all_to_all", group_size=self.world_size, num_nodes=self.num_nodes
        )
        if not burst.seconds:
            return found
        most = shorter(burst.seconds, burst.share * degree * found.seconds)
        pauses = self._pause_seconds(rows, degree, found.seconds)
        ahead = sum(shorter(most, pause) for pause in pauses) / (self.num_transfers * degree)
        return Estimate(seconds=found.seconds - ahead, trust=found.trust, doubts=found.doubts)

    def _pause_seconds(self, rows: float, degree: int, seconds: float) -> tuple[float, float]:
        """Return how long the link pauses before a phase, and while it waits for experts.

        Args:
            seconds: of one exchange.
        """
        moves = (self.rows_op(op, rows * degree, self.layer.d_model) for op in ROW_MOVES)
        moves_seconds = sum((move.seconds for move in moves if move is not None), 0.0)
        experts_seconds = degree * self.compute(phase="forward", rows=rows).seconds
        overlapped_seconds = (self.num_transfers * degree - 2) * seconds
        return moves_seconds, longer(experts_seconds - overlapped_seconds, 0.0)

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
