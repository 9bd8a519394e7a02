"""moetune as an implementation of transformers' own expert parallelism.

transformers 5.23 and newer cut experts over the ranks themselves, and let what is registered bring
them their tokens: `DistributedConfig(ep_implementation="moetune", …)` in `from_pretrained`.
"""

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from moetune.adapters.families import family_of
from moetune.adapters.layers import AnyPlan, shape_of, wrapped_layer
from moetune.comm.gloo import communicator_of
from moetune.domain.errors import InputError

_NAME = "moetune"


def register_expert_parallel(plan: AnyPlan = None) -> None:
    """Let transformers' expert parallelism run experts through moetune's expert layer.

    Models that are loaded from then on with `ep_implementation="moetune"` take the plan:

        moetune.register_expert_parallel(plan)
        parallel = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="moetune")
        model = AutoModelForCausalLM.from_pretrained(name, distributed_config=parallel)

    The cut of experts, FSDP2, gradients and checkpoints are then transformers' own, and
    `moetune.adapt` is not called. Loading raises what `moetune.adapt` raises, and InputError where
    tensor-parallel ranks share their tokens.

    Args:
        plan: as in `moetune.adapt`.

    Raises:
        InputError: there is no transformers of 5.23 or newer.
    """
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError as error:
        raise InputError(
            "ep_implementation needs transformers 5.23 or newer",
            "pip install 'moetune[transformers]', or use moetune.adapt",
        ) from error
    EPImplementationInterface.register(_NAME, partial(_RoutedExperts, plan))


class _RoutedExperts:
    """An `EPImplementation` of transformers: runs one module's experts on this rank's tokens.

    Args:
        experts: parameters are DTensors, and this rank's part of them while the module runs.
        ep_mesh: the ranks that share the experts.
        tp_mesh: the ranks that share their tokens.
    """

    def __init__(
        self,
        plan: AnyPlan,
        experts: Any,  # noqa: ANN401 - a module of transformers
        ep_mesh: DeviceMesh,
        tp_mesh: DeviceMesh,
    ) -> None:
        if tp_mesh.size() > 1:
            raise InputError(
                f'ep_implementation="{_NAME}" needs tokens of its own on every rank, and '
                f"{tp_mesh.size()} tensor-parallel ranks share theirs",
                "use tp_size=1, or another ep_implementation",
            )
        family = family_of(experts)
        if family.weighs_inputs:
            raise InputError(
                f"{type(experts).__name__} get no routing from transformers' expert parallelism",
                "use moetune.adapt",
            )
        shape = shape_of(experts, family, top_k=experts.config.num_experts_per_tok)
        ranks = communicator_of(ep_mesh.get_group())
        self._layer = wrapped_layer(experts, family, shape, plan, ranks)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted outputs of this rank's tokens."""
        result: torch.Tensor = self._layer(hidden_states, top_k_index, top_k_weights)
        return result
