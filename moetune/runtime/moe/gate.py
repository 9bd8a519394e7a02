"""Route tokens: choose each token's experts, with their weights and the balance loss.

Second step of a token's way: after the ranks' agreement in `planned_layer`, before the dispatch is
planned and `function` takes the tokens.

T tokens of this rank, E experts, K choices a token, D model width.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.runtime.delayed import WeightGradients
from moetune.runtime.moe.balance import balance_loss
from moetune.runtime.moe.gate_function import GateFunction, counts_of
from moetune.runtime.moe.local_parts import cut, local_part
from moetune.runtime.moe.workspace import MemoryTracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The gate's decisions for one step.

    Args:
        x_TD: the tokens for the experts: x itself, through a node of autograd's graph where the
            gate adds its gradient in place to that of the experts.
        places_TK: each pair's place among those of its expert, the heaviest weight first; None
            without a capacity.
        capacity: pairs of this rank that an expert takes at most; None takes all.
        aux_loss: balance loss of this rank's tokens, (); with sequence shards, of those of all
            ranks. None where the router is the caller's.
    """

    x_TD: torch.Tensor
    weights_TK: torch.Tensor
    experts_TK: torch.Tensor
    places_TK: torch.Tensor | None = None
    capacity: int | None = None
    aux_loss: torch.Tensor | None = None

    @property
    def kept(self) -> torch.Tensor | None:
        """False where a pair is over the capacity; None without a capacity."""
        if self.places_TK is None or self.capacity is None:
            return None
        return self.places_TK < self.capacity


class Gate(nn.Module):
    """softmax(x weightᵀ), top-k, in float32 (float64 if x is), also under autocast.

    A NaN in a token's logits makes that token's weights, and the balance loss, NaN; its
    choices stay valid and all other tokens are untouched, so that no rank's sizes break.

    Args:
        normalize_topk: divide the chosen probabilities by their sum; None where K > 1.
        capacity_factor: an expert takes at most ceil(factor · T·K / E) of this rank's pairs,
            those with the largest weights (Megatron-Core's `moe_token_drop_policy`, "probs", its
            default); of equal ones, the first tokens. None takes all.
        tracker: counts the tensors that the gate saves for the backward pass.

    Raises:
        InputError: capacity_factor is not above 0.
    """

    weight_gradients: WeightGradients | None = None

    def __init__(
        self,
        layer: LayerShape,
        *,
        normalize_topk: bool | None,
        capacity_factor: float | None,
        tracker: MemoryTracker,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if capacity_factor is not None and not capacity_factor > 0:
            raise InputError(f"capacity_factor must be above 0 or None, got {capacity_factor}")
        self.layer = layer
        self.normalize_topk = layer.top_k > 1 if normalize_topk is None else normalize_topk
        self.capacity_factor = capacity_factor
        self._tracker = tracker
        self._communicator: Communicator | None = None
        shape = (layer.num_experts, layer.d_model)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def reset(self, seed: int) -> None:
        """Draw the weight uniformly within ±1/√d_model, the same on every rank."""
        generator, bound = torch.Generator().manual_seed(seed), self.layer.d_model**-0.5
        values = torch.empty(self.weight.shape, dtype=torch.float64, device="cpu")
        values.uniform_(-bound, bound, generator=generator)
        local, offsets = local_part(self.weight)
        local.copy_(cut(values, offsets, local.shape))

    def use_sequence_shards(self, communicator: Communicator) -> None:
        """Treat the tokens as this rank's shard of a sequence from now on.

        The balance loss and the weight's gradient are then those of the whole sequence, on every
        rank.
        """
        self._communicator = communicator

    def forward(self, x_TD: torch.Tensor) -> Routing:
        """Return the routing of the tokens."""
        with torch.autocast(x_TD.device.type, enabled=False):
            weights_TK, experts_TK, mean_E, share_E, passed_TD = GateFunction.apply(  # type: ignore[no-untyped-call]
                x_TD, self.weight, self.layer.top_k, self.normalize_topk, self._tracker,
                self._communicator, self.weight_gradients,
            )  # fmt: skip
            return Routing(
                x_TD=passed_TD,
                weights_TK=weights_TK,
                experts_TK=experts_TK,
                places_TK=self._places(weights_TK.detach(), experts_TK),
                capacity=self._capacity(len(x_TD)),
                aux_loss=balance_loss(share_E, mean_E),
            )

    def _capacity(self, num_tokens: int) -> int | None:
        if self.capacity_factor is None:
            return None
        num_pairs = num_tokens * self.layer.top_k
        return math.ceil(self.capacity_factor * num_pairs / self.layer.num_experts)

    def _places(self, weights_TK: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor | None:
        if self.capacity_factor is None:
            return None
        # NaN would sort before all numbers, and take the place of another token's pair.
        weights = weights_TK.reshape(-1).nan_to_num(nan=-1.0)
        by_weight = torch.sort(weights, descending=True, stable=True).indices
        ranked = torch.sort(experts_TK.reshape(-1)[by_weight], stable=True)
        counts_E = counts_of(ranked.values, self.layer.num_experts)
        first_E = torch.cumsum(counts_E, 0) - counts_E
        places = torch.arange(len(by_weight), device=first_E.device) - first_E[ranked.values]
        places_TK = torch.empty_like(experts_TK)
        places_TK.view(-1)[by_weight[ranked.indices]] = places
        return places_TK
