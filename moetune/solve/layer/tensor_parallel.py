"""Costs of a chunk inside a tensor-parallel group: outputs of all ranks are added up.

Every rank has all tokens and all-reduces (PPMoE §3.3, Eq. 5), or tokens are sharded around the
layer: an all-gather before it, a reduce-scatter after each chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moetune.domain.constraints import Order
from moetune.domain.costs import Estimate
from moetune.domain.layer import LayerKey, Phase
from moetune.domain.samples import CollectiveOp
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import tensor_parallel_makespan
from moetune.solve.layer.operations import COUNT_BYTES, NOTHING
from moetune.solve.layer.timeline import Task, tensor_parallel_tasks
from moetune.solve.layer.totals import total

_WEIGHT_BYTES = 4
"""A weight of the gate is no narrower than float32."""
_CHOICE_BYTES = 8
_BALANCE_BYTES = 16
"""Of an expert in the balance loss: its probability and its number of pairs, as float64."""


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

    def _phase_overhead(self, phase: Phase, *, tokens: float) -> Estimate:
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

    def _phase_overhead(self, phase: Phase, *, tokens: float) -> Estimate:
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
