"""`RoutedLayer`: experts behind a router of the caller's, over the ranks of a group.

First step of a token's way: as in `planned_layer`, without a gate.
"""

from collections.abc import Callable
from operator import index

import torch
from torch.distributed.device_mesh import DeviceMesh

from moetune.comm.group import Communicator
from moetune.domain.layer import LayerKey, LayerShape
from moetune.runtime.moe.decisions import LayerDecisions, dtype_name
from moetune.runtime.moe.expert_module import LocalExperts
from moetune.runtime.moe.gate import Routing
from moetune.runtime.moe.planned_layer import PlannedLayer, sizes_of
from moetune.runtime.moe.workspace import MemoryTracker
from moetune.runtime.plans.book import GivenPlan


class RoutedLayer(PlannedLayer):
    """Experts that a router of the caller's has chosen.

    The layer has no parameters: its experts are a module of the caller's.

    Args:
        shape: of the layer; plans of one whose ranks share an expert's width are of its shards.
        experts: of this rank.
        plan: as in `MoELayer`; None runs one chunk.

    Raises:
        InputError: an argument is out of range.
    """

    def __init__(
        self,
        shape: LayerShape,
        experts: LocalExperts,
        communicator: Communicator,
        *,
        mesh: DeviceMesh | None = None,
        plan: GivenPlan = None,
    ) -> None:
        key = LayerKey(
            layer=shape, num_ranks=communicator.num_ranks, dtype=dtype_name(experts.up.dtype),
        )  # fmt: skip
        decisions = LayerDecisions(
            key, rank=communicator.rank, pipeline=plan is not None, memory_reuse=True,
            plan=plan, can_place=False,
        )  # fmt: skip
        super().__init__(
            shape, experts, communicator, decisions=decisions, tracker=MemoryTracker("device"),
            mesh=mesh,
        )  # fmt: skip
        self.experts = experts
        self.training = experts.module.training

    def forward(
        self, x: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts' weighted outputs.

        Args:
            x: (…, d_model), this rank's tokens; ranks may have different numbers of them.
            experts_TK: chosen experts, below the number of all of them.
            weights_TK: of the choices; they get gradients.

        Returns:
            The same shape and dtype as `x`.

        Raises:
            InputError, RankMismatchError, CollectiveError, AllocationError: as in `MoELayer`.
        """
        num_tokens = x.numel() // max(1, x.shape[-1])
        wanted, problem = (num_tokens, self.shape.top_k), ""
        if not experts_TK.shape == weights_TK.shape == wanted:
            problem = (
                f"the router gave experts {sizes_of(experts_TK)} and weights "
                f"{sizes_of(weights_TK)}, for {index(num_tokens)} tokens they must be "
                f"{tuple(map(index, wanted))}"
            )
        return self.run(x, _given(x, experts_TK, weights_TK), problem)


def _given(
    x: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
) -> Callable[[], Routing]:
    return lambda: Routing(
        x_TD=x.reshape(-1, x.shape[-1]), weights_TK=weights_TK, experts_TK=experts_TK
    )
