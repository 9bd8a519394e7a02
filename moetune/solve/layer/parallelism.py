"""The costs of a layer in the way its ranks share the experts.

all to all        tokens travel to the experts and back: two collectives a chunk
tensor parallel   every rank has all tokens, and the outputs are all-reduced (PPMoE §3.3, Eq. 5)
sequence shards   tokens are sharded around the layer: all-gather before it, reduce-scatter after
"""

from dataclasses import dataclass

import numpy as np

from moetune.domain.arrays import array_of, is_many
from moetune.domain.costs import Costs, Estimate
from moetune.domain.layer import Phase, Workload
from moetune.domain.once import once
from moetune.domain.samples import ALONE_CHUNKS, CollectiveOp
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.costs import LayerCosts, key_of
from moetune.solve.layer.operations import COUNT_BYTES, NOTHING, ROW_MOVES, total

_WEIGHT_BYTES = 4
"""A weight of the gate is no narrower than float32."""
_CHOICE_BYTES = 8
_BALANCE_BYTES = 16
"""Of an expert in the balance loss: its probability and its number of pairs, as float64."""


def layer_costs(*, workload: Workload, costs: Costs) -> LayerCosts:
    """Return the costs of the workload's layer, whose ranks are consecutive."""
    is_tensor = workload.expert_parallel == "tensor"
    kind: type[LayerCosts] = TensorParallelCosts if is_tensor else AllToAllCosts
    return kind(
        key=workload.key, costs=costs, skew=workload.skew.mean,
        expert_shares=workload.skew.shares,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllCosts(LayerCosts):
    """Costs where tokens travel to the experts: dispatch and combine are all-to-alls."""

    @once(lambda *, rows, degree: (key_of(rows), key_of(degree)))
    def transfer(self, *, rows: float, degree: int) -> Estimate:
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

    def _compute(self, phase: Phase, rows: float) -> Estimate:
        """Return one chunk's GEMMs, activation, and the sorting of its rows by expert.

        The backward pass evaluates the activation again: the layer saves pre-activations.
        """
        return total(*self._halves(phase, rows))

    def _phase_overhead(self, phase: Phase, *, tokens: float) -> Estimate:
        """Return gate and permutation, forward two small exchanges; of a measured gate alone.

        They are of the ranks' numbers of tokens, and of the counts of all chunks.
        """
        rows, gate = tokens * self.layer.top_k, self.gate(phase, tokens=tokens)
        opening = NOTHING
        if phase == "forward" and gate is not NOTHING:
            exchange = self.collective("all_to_all", self.layer.num_experts * COUNT_BYTES)
            opening = total(exchange, exchange)
        moves = (self.rows_op(op, rows, self.layer.d_model) for op in ROW_MOVES)
        return total(gate, *moves, opening)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelCosts(LayerCosts):
    """Costs inside a tensor-parallel group of P ranks: one all-reduce a chunk (PPMoE Eq. 5).

    A chunk of T/r tokens has T·k/r pairs, its `rows`; the experts of one rank compute 1/P of
    them. An all-reduce is issued when its chunk is computed, so that it mostly finds the link
    alone. The gate's gradient needs one small all-reduce more, of T·k weights' gradients.
    """

    @once(lambda *, rows, degree: key_of(rows))  # noqa: ARG005 - see the class
    def transfer(self, *, rows: float, degree: int) -> Estimate:  # noqa: ARG002
        """Return one chunk's all-reduce, or reduce-scatter to the ranks of the tokens."""
        op: CollectiveOp = "reduce_scatter" if self.key.sequence_parallel else "all_reduce"
        return self.collective(op, rows * self.bytes_per_row)

    def _compute(self, phase: Phase, rows: float) -> Estimate:
        """Return one chunk's experts, the gather of their rows and the scatter-add of results.

        Backward two gathers: of the gradient's rows, and of x's again.
        """
        mine = rows / self.world_size
        gather = self.rows_op("gather", mine, self.layer.d_model)
        add = self.rows_op("scatter_add", mine, self.layer.d_model)
        again = gather if phase == "backward" else None
        return total(*self._halves(phase, mine), gather, again, add)

    def _phase_overhead(self, phase: Phase, *, tokens: float) -> Estimate:
        """Return the gate of the rank's own tokens, and collectives that share what it gives.

        Of all tokens on every rank an all-reduce: forward of the token count, backward of the
        weights' gradients. Of shards forward token counts, sums of the balance loss, all choices
        and all weights; backward the weights' gradients, and the gate's. 0 where the gate was not
        measured.
        """
        shards = self.world_size if self.key.sequence_parallel else 1
        gate, experts = self.gate(phase, tokens=tokens / shards), self.layer.num_experts
        if gate is NOTHING:
            return NOTHING
        width = max(dtype_bytes(self.dtype), _WEIGHT_BYTES)
        pairs = tokens / shards * self.layer.top_k
        if shards == 1:
            small = COUNT_BYTES if phase == "forward" else pairs * width
            return total(gate, self.collective("all_reduce", small))
        if phase == "forward":
            return total(
                gate,
                self.collective("all_gather", COUNT_BYTES),
                self.collective("all_reduce", experts * _BALANCE_BYTES),
                self.collective("all_gather", pairs * _CHOICE_BYTES),
                self.collective("all_gather", pairs * width),
            )
        return total(
            gate,
            self.collective("reduce_scatter", pairs * shards * width),
            self.collective("all_reduce", experts * self.layer.d_model * width),
        )
