"""moetune as an implementation of transformers' own expert parallelism.

transformers 5.23 and newer cut experts over the ranks themselves, and let a registered class bring
them their tokens: `DistributedConfig(ep_implementation="moetune", …)` in `from_pretrained`.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from moetune.adapters.families import family_of
from moetune.adapters.layers import AnyPlan, routed_layer, shape_of
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
    `moetune.adapt` is not called.

    Args:
        plan: as in `moetune.adapt`.

    Raises:
        InputError: there is no transformers of 5.23 or newer.
    """
    try:
        from transformers.distributed.expert_parallel import (
            EPImplementation,
            EPImplementationInterface,
        )
    except ImportError as error:
        raise InputError(
            "transformers 5.23 or newer is needed for ep_implementation",
            "pip install 'moetune[transformers]', or use moetune.adapt",
        ) from error

    class MoetuneEP(EPImplementation):  # type: ignore[misc] # transformers has no types here
        """The experts of one module, in chunks."""

        def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:  # noqa: ANN401
            super().__init__(experts, ep_mesh, tp_mesh)
            if tp_mesh.size() > 1:
                raise InputError(
                    f'ep_implementation="{_NAME}" needs tokens of its own on every rank, and '
                    f"{tp_mesh.size()} tensor-parallel ranks share theirs",
                    "use tp_size=1, or another ep_implementation",
                )
            family = family_of(experts)
            if family.weighs_inputs:
                raise InputError(
                    f'{type(experts).__name__} are not called by ep_implementation="{_NAME}"',
                    "use moetune.adapt",
                )
            shape = shape_of(experts, family, top_k=experts.config.num_experts_per_tok)
            self.layer, _ = routed_layer(
                experts,
                family,
                shape,
                plan,
                communicator_of(ep_mesh.get_group()),
                are_wrapped=True,
            )
            self.layer.agree_on_plans()

        def __call__(
            self,
            hidden_states: torch.Tensor,
            top_k_index: torch.Tensor,
            top_k_weights: torch.Tensor,
        ) -> torch.Tensor:
            result: torch.Tensor = self.layer(hidden_states, top_k_index, top_k_weights)
            return result

    EPImplementationInterface.register(_NAME, MoetuneEP)
