"""Costs of a chunk in the three ways to share experts: the implementations of `LayerCosts`.

all to all        tokens travel to the experts and back: two collectives a chunk
tensor parallel   every rank has all tokens, and the outputs are all-reduced (PPMoE §3.3, Eq. 5)
sequence shards   tokens are sharded around the layer: all-gather before it, reduce-scatter after
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from moetune.domain.arrays import is_many
from moetune.domain.constraints import Dispatcher, Order
from moetune.domain.costs import Costs, Estimate, LinearCost
from moetune.domain.errors import ProfileError
from moetune.domain.layer import LayerKey, Phase, Workload
from moetune.domain.samples import ALONE_CHUNKS, CollectiveOp
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import (
    best_degree,
    best_tensor_parallel_degree,
    makespan,
    tensor_parallel_makespan,
)
from moetune.solve.layer.operations import COUNT_BYTES, NOTHING
from moetune.solve.layer.quantized import dispatched_bytes, once_a_phase, quantized_chunk
from moetune.solve.layer.timeline import Task, pipeline_tasks, tensor_parallel_tasks
from moetune.solve.layer.totals import longer, shorter, total
from moetune.solve.runtime import StateBytes

_WEIGHT_BYTES = 4
"""A weight of the gate is no narrower than float32."""
_CHOICE_BYTES = 8
_BALANCE_BYTES = 16
"""Of an expert in the balance loss: its probability and its number of pairs, as float64."""
_ROW_MOVES = ("gather", "scatter_add")
"""Outside the pipeline: rows are brought into the order of experts, and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllCosts(LayerCosts):
    """Costs where tokens travel to the experts: dispatch and combine are all-to-alls."""

    @property
    def exchange_op(self) -> CollectiveOp:
        """The collective of dispatch and combine."""
        return "all_to_all" if self.dispatcher == "flat" else "all_to_all_2d"

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
        """One row's M values; with a quantized wire the mean of dispatch and combine."""
        combined = self.layer.d_model * dtype_bytes(self.dtype)
        packed = None if self.quantization is None else dispatched_bytes(self, self.quantization)
        return combined if packed is None else (packed + combined) / 2

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
        found = self.collective(self.exchange_op, rows * self.bytes_per_row, in_flight=in_flight)
        burst = self.costs.burst(
            op=self.exchange_op, group_size=self.world_size, num_nodes=self.num_nodes
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
        moves = (self.rows_op(op, rows * degree, self.layer.d_model) for op in _ROW_MOVES)
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
        recipe, sorting = self.quantization, self.sorting(rows)
        if recipe is None:
            gemms = self.gemms(phase, rows)
        else:
            gemms = quantized_chunk(self, recipe, phase, rows=rows)
        return total(*gemms, self.activation(phase, rows), sorting, sorting)

    def phase_overhead(self, phase: Phase, *, tokens: float) -> Estimate:
        """Return gate and permutation, forward the opening exchanges, backward replicas' sums."""
        rows = tokens * self.layer.top_k
        ends = self.opening(tokens=tokens) if phase == "forward" else self.replica_sums()
        once: tuple[Estimate, ...] = ()
        if self.quantization is not None:
            once = tuple(once_a_phase(self, self.quantization, phase, rows=self.rows(tokens)))
        return total(
            self.gate(phase, tokens=tokens),
            *(self.rows_op(op, rows, self.layer.d_model) for op in _ROW_MOVES),
            ends,
            *once,
        )

    def opening(self, *, tokens: float) -> Estimate:
        """Return the two small exchanges before a forward phase; 0 where the gate is not measured.

        They are of the ranks' numbers of tokens, and of the counts of all chunks; in a hierarchical
        exchange also of the counts of rows that pass through.
        """
        if self.gate("forward", tokens=tokens) is NOTHING:
            return NOTHING
        ops: tuple[CollectiveOp, ...] = ("all_to_all", self.exchange_op)
        if self.dispatcher == "hierarchical":
            ops = (*ops, self.exchange_op)
        return total(*(self.collective(op, self.layer.num_experts * COUNT_BYTES) for op in ops))

    def replica_sums(self) -> Estimate:
        """Return the sums of replicas' gradients behind a backward phase: two exchanges.

        The busiest rank's bytes are priced as an all-to-all in which each rank sends as many to the
        others. Each expert's gradient is read once and added once where that was measured.
        """
        if not self.summed_experts:
            return NOTHING
        values = self.layer.num_gemms * self.macs_per_row
        sent_bytes = self.summed_experts / 2 * values * StateBytes.of_layer(self.dtype).gradient
        exchange = self.collective(
            "all_to_all", sent_bytes * self.world_size / (self.world_size - 1)
        )
        rows = self.summed_experts * values / self.layer.d_model
        moves = (self.rows_op(op, rows, self.layer.d_model) for op in _ROW_MOVES)
        return total(exchange, exchange, *moves)

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

    def lines(self, phase: Phase) -> tuple[LinearCost, LinearCost] | None:
        """Return the lines of all-to-all and GEMMs; None where rows are sorted, too."""
        transfer = self.collective_line(self.exchange_op)
        compute = self.gemm_line(phase)
        if transfer is None or compute is None or self.sorting(1.0).seconds:
            return None
        expected = transfer.seconds(self.bytes_per_row)
        alone_and_several = (self.transfer(rows=1.0, degree=degree) for degree in (1, 2))
        if not all(math.isclose(one.seconds, expected) for one in alone_and_several):
            return None  # the closed form has one line, for one in flight and for several
        return transfer, compute

    def best_degree(
        self, lines: tuple[LinearCost, LinearCost], *, rows: float, max_degree: int
    ) -> int:
        """Return the closed form's degree: `degree.best_degree`."""
        return best_degree(
            transfer=lines[0],
            payload_bytes=rows * self.bytes_per_row,
            compute=lines[1],
            macs=rows * self.macs_per_row,
            max_degree=max_degree,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelCosts(LayerCosts):
    """Costs inside a tensor-parallel group of P ranks: one all-reduce a chunk (PPMoE Eq. 5).

    A chunk of T/r tokens has T·k/r pairs, its `rows`; the experts of one rank compute 1/P of
    them. An all-reduce is issued when its chunk is computed, so that it mostly finds the link
    alone. The gate's gradient needs one small all-reduce more, of T·k weights' gradients.
    """

    @property
    def key(self) -> LayerKey:
        """Of tensor-parallel layers."""
        return self.key_of("tensor")

    @property
    def num_transfers(self) -> int:
        """The all-reduce."""
        return 1

    @property
    def bytes_per_row(self) -> float:
        """M values of each token, shared by its k choices."""
        return self.layer.d_model * dtype_bytes(self.dtype) / self.layer.top_k

    @property
    def sorts_rows(self) -> bool:
        """Never: a rank selects the rows of its experts."""
        return False

    @property
    def reduce_op(self) -> CollectiveOp:
        """The collective that adds up the experts' outputs."""
        return "all_reduce"

    def _transfer(self, rows: float, degree: int) -> Estimate:  # noqa: ARG002 - see the class
        """Return one chunk's all-reduce."""
        return self.collective(self.reduce_op, rows * self.bytes_per_row)

    def gathering(self, *, tokens: float) -> Estimate:  # noqa: ARG002 - of sequence shards
        """Return 0: every rank has all tokens."""
        return NOTHING

    def _compute(self, phase: Phase, rows: float) -> Estimate:
        """Return one chunk's experts, the gather of their rows and the scatter-add of results.

        Backward two gathers: of the gradient's rows, and of x's again.
        """
        mine = rows / self.world_size
        gather = self.rows_op("gather", mine, self.layer.d_model)
        add = self.rows_op("scatter_add", mine, self.layer.d_model)
        again = gather if phase == "backward" else None
        return total(*self.gemms(phase, mine), self.activation(phase, mine), gather, again, add)

    def phase_overhead(self, phase: Phase, *, tokens: float) -> Estimate:
        """Return the gate, and an all-reduce: of the token count, or of the weights' gradients.

        0 where the gate was not measured.
        """
        if self.rows_op("gate", tokens, self.layer.num_experts) is None:
            return NOTHING
        gate = self.gate(phase, tokens=tokens)
        num_bytes = tokens * self.layer.top_k * self.weight_bytes
        small = COUNT_BYTES if phase == "forward" else num_bytes
        return total(gate, self.collective("all_reduce", small))

    def makespan(
        self, *, degree: int, rows: float, transfer_seconds: float, compute_seconds: float,
        order: Order,  # noqa: ARG002 - there is one order only
    ) -> float:  # fmt: skip
        """Return the time of a phase: `degree.tensor_parallel_makespan`."""
        speeds = self.speeds(rows=rows, transfer_seconds=transfer_seconds)
        return tensor_parallel_makespan(
            degree=degree,
            transfer_seconds=transfer_seconds,
            compute_seconds=compute_seconds,
            comm_speed=speeds.comm,
            comp_speed=speeds.comp,
        )

    def tasks(
        self,
        *,
        transfer_seconds: Sequence[float],
        compute_seconds: Sequence[float],
        gather_seconds: float,
        order: Order,  # noqa: ARG002 - there is one order only
    ) -> list[Task]:
        """Return experts and all-reduces, after the all-gather where there is one."""
        return tensor_parallel_tasks(
            compute_seconds=compute_seconds,
            reduce_seconds=transfer_seconds,
            gather_seconds=gather_seconds,
        )

    def lines(self, phase: Phase) -> tuple[LinearCost, LinearCost] | None:
        """Return the lines of all-reduce and GEMMs; None where selecting rows takes time, too."""
        transfer = self.collective_line(self.reduce_op)
        compute = self.gemm_line(phase)
        around = (self.rows_op(op, 1.0, self.layer.d_model) for op in _ROW_MOVES)
        if transfer is None or compute is None or total(*around).seconds:
            return None
        return transfer, compute

    def best_degree(
        self, lines: tuple[LinearCost, LinearCost], *, rows: float, max_degree: int
    ) -> int:
        """Return the closed form's degree: `degree.best_tensor_parallel_degree`."""
        return best_tensor_parallel_degree(
            transfer=lines[0],
            payload_bytes=rows * self.bytes_per_row,
            compute=lines[1],
            macs=rows / self.world_size * self.macs_per_row,
            max_degree=max_degree,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight, or probability, of the gate."""
        return max(dtype_bytes(self.dtype), _WEIGHT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShardCosts(TensorParallelCosts):
    """Costs inside a tensor-parallel group whose ranks hold sequence shards around the layer."""

    @property
    def key(self) -> LayerKey:
        """Of tensor-parallel layers with sequence shards."""
        return self.key_of("tensor", sequence_parallel=True)

    @property
    def reduce_op(self) -> CollectiveOp:
        """The collective that gives each rank the sums of its own tokens."""
        return "reduce_scatter"

    def gathering(self, *, tokens: float) -> Estimate:
        """Return the all-gather of x, or backward of the gradient of the output."""
        row_bytes = self.layer.d_model * dtype_bytes(self.dtype)
        return self.collective("all_gather", tokens / self.world_size * row_bytes)

    def phase_overhead(self, phase: Phase, *, tokens: float) -> Estimate:
        """Return the gate of this rank's shard, and the collectives that share its results.

        Forward: token counts, sums of the balance loss, all choices, all weights. Backward:
        the weights' gradients, and the gate's. 0 where the gate was not measured.
        """
        if self.rows_op("gate", 1.0, self.layer.num_experts) is None:
            return NOTHING
        own, experts = tokens / self.world_size, self.layer.num_experts
        gate, pairs = self.gate(phase, tokens=own), own * self.layer.top_k
        if phase == "forward":
            return total(
                gate,
                self.collective("all_gather", COUNT_BYTES),
                self.collective("all_reduce", experts * _BALANCE_BYTES),
                self.collective("all_gather", pairs * _CHOICE_BYTES),
                self.collective("all_gather", pairs * self.weight_bytes),
            )
        return total(
            gate,
            self.collective("reduce_scatter", pairs * self.world_size * self.weight_bytes),
            self.collective("all_reduce", experts * self.layer.d_model * self.weight_bytes),
        )


def layer_costs(
    *,
    workload: Workload,
    costs: Costs,
    num_nodes: int = 0,
    dispatcher: Dispatcher = "flat",
) -> LayerCosts:
    """Return the costs of the workload's layer.

    Args:
        num_nodes: that its ranks are spread over evenly; 0 for consecutive ranks.
        dispatcher: of all-to-alls.
    """
    kind: type[LayerCosts] = AllToAllCosts
    if workload.expert_parallel == "tensor":
        kind = SequenceShardCosts if workload.sequence_parallel else TensorParallelCosts
    return kind(
        layer=workload.layer,
        world_size=workload.world_size,
        dtype=workload.dtype,
        costs=costs,
        num_nodes=num_nodes,
        dispatcher=dispatcher,
        quantization=workload.recipe,
        skew=workload.skew.mean,
        places=workload.local_experts,
        summed_experts=workload.summed_experts,
    )


def is_hierarchy_measured(*, workload: Workload, costs: Costs, num_nodes: int = 0) -> bool:
    """Return whether exchanges in two steps were measured among the workload's ranks.

    Args:
        num_nodes: as in `layer_costs`.
    """
    if workload.expert_parallel == "tensor" or workload.world_size == 1 or workload.quantization:
        return False
    try:
        found = costs.collective(
            op="all_to_all_2d", group_size=workload.world_size,
            num_bytes=workload.payload_bytes, num_nodes=num_nodes,
        )  # fmt: skip
    except ProfileError:
        return False
    return found.trust != "modelled"
