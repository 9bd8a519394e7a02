"""`TensorExpertLayer`: experts inside a tensor-parallel group, without dispatch (PPMoE §3.3)."""

import torch

from moetune.domain.errors import InputError
from moetune.runtime.expert_layer import ExpertLayer
from moetune.runtime.gate import Routing
from moetune.runtime.local_pairs import local_pairs
from moetune.runtime.stopwatch import Watch
from moetune.runtime.summed_experts import SummedExperts, Summing


class TensorExpertLayer(ExpertLayer):
    """A Mixture-of-Experts layer whose ranks all see the same tokens and add up their experts.

    Every rank gives the same tokens, as behind a tensor-parallel layer, and gets the same
    output; its experts compute their pairs, and one all-reduce adds the ranks' shares. Backward
    the gradient of x is added up the same way. Parameters are named and shaped as those of
    `MoELayer`, and so is everything below.

    Args:
        d_model, d_hidden, num_experts, top_k, activation, bias, normalize_topk, plan, planbook,
            device, dtype: as in `MoELayer`.
        capacity_factor: None; no pair is dropped.
        group: tensor-parallel group, default the world. All its ranks construct the layer.
        pipeline: chunks of the output, and of the gradient of x, that are added up behind the
            next ones' computation.
        memory_reuse: False or "none", or True, which is the same here.

    Raises:
        InputError: an argument is out of range, or would drop pairs or reuse memory.
    """

    owns_experts = False

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as `MoELayer` does: equal for equal seeds."""
        if self.gate.capacity_factor is not None:
            raise InputError(
                "capacity_factor must be None: experts of a tensor-parallel group drop no pair",
                "leave it away, or use moetune.MoELayer",
            )
        if self._strategy not in (None, "none"):
            raise InputError(
                f"memory_reuse {self._strategy!r} is not available in a tensor-parallel group",
                "leave it away, or use moetune.MoELayer",
            )
        super().reset_parameters()

    def _run(self, x_TD: torch.Tensor, routing: Routing, watch: Watch) -> torch.Tensor:
        local = self.experts.local_experts
        summing = Summing(
            link=self.link,
            pairs=local_pairs(
                routing.experts_TK,
                first_expert=self.link.rank * local,
                num_experts=local,
                forward_degree=self.decision.forward_degree,
                backward_degree=self.decision.backward_degree,
            ),
            activation=self.shape.activation,
            recorder=self.recorder,
            scratch=self._scratch,
        )
        self._account.add(summing.pairs.pairs_R, summing.pairs.tokens_R)
        y_TD: torch.Tensor
        watch.begin()
        with torch.autocast(x_TD.device.type, enabled=False):
            y_TD = SummedExperts.apply(  # type: ignore[no-untyped-call]
                x_TD, routing.weights_TK, summing, *self._weights(x_TD.dtype)
            )
        watch.follow(y_TD)
        return y_TD

    def _signature(self, x: torch.Tensor, dtype: torch.dtype, num_tokens: int) -> str:
        return f"{super()._signature(x, dtype, num_tokens)}, {num_tokens} tokens on every rank"
