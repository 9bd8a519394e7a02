"""What one chunk of a layer costs in a tensor-parallel group: its experts, and their sum.

T tokens that all ranks see, k experts per token, M d_model, P ranks. A chunk of T/r tokens has
T·k/r pairs, which are its `rows` as everywhere; the experts of one rank compute 1/P of them.
"""

from dataclasses import dataclass

from moetune.domain.constraints import Order
from moetune.domain.costs import Costs, Estimate, LinearCost, SideBySide
from moetune.domain.layer import Phase, Workload
from moetune.domain.samples import CollectiveOp
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.costs import COUNT_BYTES, NOTHING, LayerCosts, total
from moetune.solve.layer.degree import best_summed_degree, summed_makespan

_WEIGHT_BYTES = 4
"""A weight of the gate is no narrower than float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedCosts(LayerCosts):
    """The same of a tensor-parallel group (PPMoE Eq. 5): a chunk has one transfer, its sum.

    A sum is issued when its chunk is computed, so that it mostly finds the link alone. The
    gate's gradient needs one small sum more, of T·k weights' gradients.
    """

    @property
    def num_transfers(self) -> int:
        """Transfers of one chunk: its sum."""
        return 1

    @property
    def sum_op(self) -> CollectiveOp:
        """How sums reach the ranks."""
        return "all_reduce"

    def transfer(self, *, rows: float, degree: int) -> Estimate:  # noqa: ARG002 - see above
        """Return one chunk's sum: M values of each token, whatever their choices."""
        return self.exchange(self.sum_op, self._sum_bytes(rows))

    def side_by_side(self, *, rows: float, transfer_seconds: float) -> SideBySide:
        """Return the speeds of the experts and of sums, taken for exchanges of as many bytes."""
        return self.costs.side_by_side(
            exchange_bytes=self._sum_bytes(rows), exchange_seconds=transfer_seconds
        )

    def makespan(
        self, *, degree: int, rows: float, transfer_seconds: float, compute_seconds: float,
        order: Order,  # noqa: ARG002 - there is one order only
    ) -> float:  # fmt: skip
        """Return the time of a phase in chunks of so many rows."""
        speeds = self.side_by_side(rows=rows, transfer_seconds=transfer_seconds)
        return summed_makespan(
            degree=degree,
            transfer_seconds=transfer_seconds,
            compute_seconds=compute_seconds,
            comm_speed=speeds.comm,
            comp_speed=speeds.comp,
        )

    def best_degree(
        self, lines: tuple[LinearCost, LinearCost], *, rows: float, max_degree: int
    ) -> int:
        """Return the closed form's degree for a phase of so many rows."""
        return best_summed_degree(
            transfer=lines[0],
            payload_bytes=self._sum_bytes(rows),
            compute=lines[1],
            macs=rows / self.world_size * self.macs_per_row,
            max_degree=max_degree,
        )

    def compute(self, *, phase: Phase, rows: float) -> Estimate:
        """Return one chunk's experts, with the selection of their rows and the adding of theirs.

        Backward the rows of x are selected again, beside those of the gradient.
        """
        mine = rows / self.world_size
        gather = self.rows_op("gather", mine, self.layer.d_model)
        add = self.rows_op("scatter_add", mine, self.layer.d_model)
        again = gather if phase == "backward" else None
        return total(*self.gemms(phase, mine), self.activation(phase, mine), gather, again, add)

    def phase_overhead(self, phase: Phase, *, tokens: float) -> Estimate:
        """Return the gate, and the agreement on tokens or the sum of the weights' gradients.

        0 where the gate was not measured.
        """
        if self.rows_op("gate", tokens, self.layer.num_experts) is None:
            return NOTHING
        gate = self.gate(phase, tokens=tokens)
        num_bytes = tokens * self.layer.top_k * self.weight_bytes
        small = COUNT_BYTES if phase == "forward" else num_bytes
        return total(gate, self.exchange("all_reduce", small))

    def lines(self, phase: Phase) -> tuple[LinearCost, LinearCost] | None:
        """Return (sum over bytes, all GEMMs over the MACs of one), if a chunk has no more."""
        transfer = self.collective_line(self.sum_op)
        compute = self.gemm_line(phase)
        around = (self.rows_op(op, 1.0, self.layer.d_model) for op in ("gather", "scatter_add"))
        if transfer is None or compute is None or total(*around).seconds:
            return None
        return transfer, compute

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight, or probability, of the gate."""
        return max(dtype_bytes(self.dtype), _WEIGHT_BYTES)

    def _sum_bytes(self, rows: float) -> float:
        return rows / self.layer.top_k * self.bytes_per_row


_CHOICE_BYTES = 8
_BALANCE_BYTES = 16
"""An expert's probability and its pairs, both as float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedCosts(SummedCosts):
    """The same where neighbours keep sequence shards: all-gather in, reduce-scatter out."""

    @property
    def sum_op(self) -> CollectiveOp:
        """How sums reach the ranks: each gets those of its own tokens."""
        return "reduce_scatter"

    def gathering(self, *, tokens: float) -> Estimate:
        """Return the all-gather of x, or backward of the gradient of the output."""
        return self.exchange("all_gather", tokens / self.world_size * self.bytes_per_row)

    def phase_overhead(self, phase: Phase, *, tokens: float) -> Estimate:
        """Return the gate of this rank's shard, and what makes it the gate of all tokens.

        Forward: the agreement on tokens, the sums behind the balance loss, and all choices and
        weights gathered. Backward: the sums of the weights' gradients and of the gate's.
        0 where the gate was not measured.
        """
        if self.rows_op("gate", 1.0, self.layer.num_experts) is None:
            return NOTHING
        own, experts = tokens / self.world_size, self.layer.num_experts
        gate, pairs = self.gate(phase, tokens=own), own * self.layer.top_k
        if phase == "forward":
            return total(
                gate,
                self.exchange("all_gather", COUNT_BYTES),
                self.exchange("all_reduce", experts * _BALANCE_BYTES),
                self.exchange("all_gather", pairs * _CHOICE_BYTES),
                self.exchange("all_gather", pairs * self.weight_bytes),
            )
        return total(
            gate,
            self.exchange("reduce_scatter", pairs * self.world_size * self.weight_bytes),
            self.exchange("all_reduce", experts * self.layer.d_model * self.weight_bytes),
        )


def layer_costs(*, workload: Workload, costs: Costs, num_nodes: int = 0) -> LayerCosts:
    """Return the costs of the workload's layer.

    Args:
        num_nodes: that its ranks are spread over evenly; 0 for consecutive ranks.
    """
    return _kind(workload)(
        layer=workload.layer,
        world_size=workload.world_size,
        dtype=workload.dtype,
        costs=costs,
        num_nodes=num_nodes,
    )


def _kind(workload: Workload) -> type[LayerCosts]:
    if workload.expert_parallel == "all_to_all":
        return LayerCosts
    return ShardedCosts if workload.sequence_parallel else SummedCosts
