"""torchtitan's routed experts through moetune's expert layer, by an override that a job names.

    torchrun … -m torchtitan.train --module qwen3 --config … \
        --override.imports 'moetune.adapters.torchtitan.routed_experts={"plan": "plan.json"}'

`RoutedExperts` of torchtitan 0.3 dispatches, computes and combines in turn, through a token
dispatcher and a module of experts. Chunks overlap all three, so this replaces `RoutedExperts` and
not only the dispatcher. Router, load balancing, shared experts, parameters, their names and how
they are sharded stay torchtitan's.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moetune.adapters.layers import shape_of, titan_family_of, wrapped_layer
from moetune.comm.gloo import communicator_of
from moetune.comm.group import OneRank
from moetune.domain.errors import InputError
from moetune.runtime.moe.layer import RoutedLayer

try:
    import spmd_types
    from torchtitan.config.override import derive, override
    from torchtitan.models.common import moe, token_dispatcher
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
except ImportError as error:
    raise ImportError(
        f"moetune.adapters.torchtitan needs torchtitan 0.3, which has overrides: {error}"
    ) from error

_EXPERTS = moe.GroupedExperts.Config, GptOssGroupedExperts.Config


class PlannedRoutedExperts(moe.RoutedExperts):  # type: ignore[misc] # torchtitan is no dependency
    """`RoutedExperts` whose all-to-alls run in chunks and overlap the experts, by a plan.

    The module of experts keeps its parameters, but is never called. Experts compute in the dtype of
    their tokens, `training.mixed_precision_param`; torchtitan's always multiply in bfloat16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(moe.RoutedExperts.Config):  # type: ignore[misc] # torchtitan is no dependency
        """The configuration of `RoutedExperts`, and the path of a plan; None runs one chunk."""

        plan: str | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._plan = config.plan
        self.moetune: RoutedLayer | None = None

    def parallelize(self, parallel_dims: Any) -> None:  # noqa: ANN401 - a class of torchtitan
        """Shard the experts as torchtitan does; agree on the plan with the ranks that share them.

        Raises:
            InputError: the experts would be tensor-parallel, the communication mode exchanges
                nothing, or as in `wrapped_layer`.
            RankMismatchError, CollectiveError: as in `wrapped_layer`.
        """
        if parallel_dims.tp > 1 and parallel_dims.ep == 1:
            raise InputError(
                "torchtitan would cut each expert over the tensor-parallel ranks, and moetune runs "
                "whole experts",
                "set parallelism.expert_parallel_degree above 1, or leave this override out",
            )
        super().parallelize(parallel_dims)
        self.moetune = self._layer()

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Return the experts' outputs (B, L, D), weighted by the router's scores.

        Raises:
            InputError: the job checks the model's SPMD types.
            RankMismatchError, CollectiveError, AllocationError: as in `MoELayer`.
        """
        del num_local_tokens_per_expert_E  # rows are counted by chunks
        if spmd_types.is_type_checking():
            raise InputError(
                "moetune's expert layer has no SPMD types", "set debug.spmd_typechecking to false"
            )
        if self.moetune is None:
            self.moetune = self._layer()
        top_k = topk_scores_BLK.shape[-1]
        chosen, scores = (
            values.reshape(-1, top_k) for values in (topk_expert_ids_BLK, topk_scores_BLK)
        )
        y_BLD: torch.Tensor = self.moetune(x_BLD, chosen, scores)
        return y_BLD

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        """Make the layer before compilation, for jobs where torchtitan calls no `parallelize`."""
        super()._init_self_buffers(buffer_device=buffer_device)
        if self.moetune is None:
            self.moetune = self._layer()

    def _layer(self) -> RoutedLayer:
        mesh = getattr(self.token_dispatcher, "ep_mesh", None)
        group: dist.ProcessGroup | None = None if mesh is None else mesh.get_group()
        if group is not None and dist.get_backend(group) == "fake":
            raise InputError(
                "comm.mode fake_backend and local_tensor exchange nothing",
                "leave this override out of dry runs",
            )
        experts, top_k = self.inner_experts, self.token_dispatcher.top_k
        family = titan_family_of(experts)
        shape = shape_of(experts, family, top_k=top_k, num_experts=int(experts.num_experts))
        ranks = OneRank() if group is None else communicator_of(group)
        return wrapped_layer(experts, family, shape, self._plan, ranks)


@override(  # type: ignore[untyped-decorator] # torchtitan is no dependency
    target=moe.RoutedExperts.Config,
    description="moetune: exchanges in chunks that overlap the experts, by a plan",
)
def routed_experts(
    config: moe.RoutedExperts.Config, *, plan: str | None = None
) -> PlannedRoutedExperts.Config:
    """Return the configuration that runs the same experts in moetune's layer.

    Args:
        plan: path of an expert layer's plan for the number of expert-parallel ranks; None runs one
            chunk.

    Raises:
        InputError: the experts are of another class or quantized, or their token dispatcher uses
            another backend than all-to-alls.
    """
    kind, dispatcher = type(config), type(config.token_dispatcher)
    experts = type(config.inner_experts)
    if kind is not moe.RoutedExperts.Config:
        raise InputError(f"{kind.__qualname__} is replaced already", "name one override of it")
    if dispatcher is not token_dispatcher.AllToAllTokenDispatcher.Config:
        raise InputError(
            f"tokens travel by {dispatcher.__qualname__.removesuffix('.Config')}, and moetune "
            "exchanges them itself",
            'take a configuration with moe_comm_backend "standard", which has '
            "AllToAllTokenDispatcher",
        )
    if experts not in _EXPERTS:
        raise InputError(
            f"experts of {experts.__qualname__.removesuffix('.Config')} are not supported",
            "moetune runs GroupedExperts and GptOssGroupedExperts, which no converter has changed",
        )
    made: PlannedRoutedExperts.Config = derive(config, PlannedRoutedExperts.Config, plan=plan)
    return made
