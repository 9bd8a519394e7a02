"""The costs of a tensor-parallel group whose ranks have a shard of the tokens each.

T tokens of the group, of which each of P ranks has T/P around the layer, k choices, M d_model,
E experts, r chunks. A phase gathers all tokens before its first chunk, and then runs as that of
a group that has them everywhere, with a reduce-scatter in the place of each all-reduce:

    T(r) = t_g + t_e + t_s + (r - 1)·max(t_e, t_s)

Chunks do not change t_g, so that the best r is `best_summed_degree`, of another line.
"""

from dataclasses import dataclass

from moetune.domain.costs import Estimate
from moetune.domain.samples import CollectiveOp
from moetune.solve.phases import COUNT_BYTES, NOTHING, Phase, total
from moetune.solve.summed_costs import SummedCosts

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
