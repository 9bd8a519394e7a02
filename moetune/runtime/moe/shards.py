"""The routing of a step to the shards of experts, each of which is an expert of its own.

Between the router and the dispatch: every row goes to all shards of its expert, with the same
combine weight, whose gradient is then the sum over them. Loads, capacities and balance stay those
of whole experts.

T tokens of this rank, K choices a token, S shards of an expert, L local experts of a rank.
"""

from dataclasses import replace

import torch

from moetune.runtime.moe.gate import Routing
from moetune.runtime.moe.placement import ExpertPlacement


def to_shards(routing: Routing, placement: ExpertPlacement) -> Routing:
    """Return a routing to the places of all shards, (T, K·S); of whole experts the same."""
    if placement.width.num_shards == 1:
        return routing
    shards, places_TK = placement.width.num_shards, routing.places_TK
    # Routers round to float32: gradients of the shards add up before they are rounded to it.
    exact = torch.promote_types(routing.weights_TK.dtype, routing.x_TD.dtype)
    return replace(
        routing,
        weights_TK=_repeated(routing.weights_TK.to(exact), shards),
        experts_TK=_places(routing.experts_TK, shards, placement.num_local),
        places_TK=None if places_TK is None else _repeated(places_TK, shards),
    )


def _places(experts_TK: torch.Tensor, shards: int, num_local: int) -> torch.Tensor:
    """Return the places of all shards, of which rank r has L: shard r mod S of its experts."""
    first_TK = experts_TK // num_local * (num_local * shards) + experts_TK % num_local
    shard_S = torch.arange(shards, device=experts_TK.device) * num_local
    return (first_TK.unsqueeze(2) + shard_S).flatten(1)


def _repeated(values_TK: torch.Tensor, shards: int) -> torch.Tensor:
    return values_TK.unsqueeze(2).expand(-1, -1, shards).flatten(1)
