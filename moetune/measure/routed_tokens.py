"""Loads of experts that a layer which is run here has to follow, and tokens that make them.

T tokens, K choices, E experts, D model width.
"""

from collections.abc import Sequence

import torch

from moetune.domain.errors import InputError
from moetune.domain.layer import Workload
from moetune.domain.routing import LayerRouting

_MARGIN = 16.0
"""By which the logits of a token's experts are above all others: far more than random ones vary."""


def expert_shares(workload: Workload) -> tuple[float, ...] | None:
    """Return each expert's share of the rows; None where routing is balanced.

    Raises:
        InputError: the routing is a law, which has no loads of single experts, or the gate has
            more experts than the model is wide, and random tokens cannot be steered.
    """
    routing = LayerRouting.of(workload.routing)
    shares = routing.loads.shares(workload.layer.top_k)
    if shares is None and workload.routing:
        raise InputError(
            f"the plan is for routing {workload.routing!r}, which says nothing of single experts",
            "plan with the loads of a file or a record to run the layer with them: --routing FILE",
        )
    if shares is not None and workload.layer.num_experts > workload.layer.d_model:
        raise InputError(
            f"{workload.layer.num_experts} experts for tokens of width {workload.layer.d_model}: "
            "random tokens cannot be made to follow the plan's routing",
            "plan with --routing balanced to run this layer",
        )
    return shares


def drawn_experts(
    shares: Sequence[float], top_k: int, num_tokens: int, generator: torch.Generator
) -> torch.Tensor:
    """Return different experts of each token (T, K), each as often as its share of the rows.

    Systematic sampling (Madow 1949): of the sums of the shares, those are taken that a comb of K
    teeth meets. A comb for each token, evenly spread, makes the counts exact but for rounding.

    Args:
        shares: of all rows, 1/K at most.
    """
    ends_E = torch.tensor(shares, dtype=torch.float64, device="cpu").mul(top_k).cumsum(0)
    ends_E[-1] = top_k
    start_T = (torch.randperm(num_tokens, generator=generator, device="cpu") + 0.5) / max(
        1, num_tokens
    )
    teeth_TK = start_T.double().unsqueeze(1) + torch.arange(
        top_k, dtype=torch.float64, device="cpu"
    )
    return torch.searchsorted(ends_E, teeth_TK, right=True).clamp_(max=len(shares) - 1)


def steer(x_TD: torch.Tensor, gate_ED: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
    """Return the tokens, moved so that the gate chooses these experts.

    Args:
        gate_ED: with orthonormal rows.
    """
    wanted_TE = torch.zeros(len(x_TD), len(gate_ED), dtype=x_TD.dtype)
    return x_TD + wanted_TE.scatter_(1, experts_TK, _MARGIN) @ gate_ED.to(x_TD.dtype)
