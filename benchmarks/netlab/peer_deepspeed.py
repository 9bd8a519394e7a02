"""DeepSpeed's MoE layer with our weights and no dropped tokens.

With `drop_tokens=False` DeepSpeed agrees on the busiest expert's rows of any rank and pads every
expert of every rank to them, so its all-to-alls and products have the size of the worst expert.
Random token selection and second-expert sampling only matter where tokens are dropped or noise is
wanted: they are off, which spares DeepSpeed their time and makes its output equal to ours. Its
experts are cut from (ranks, experts, rows, d_model) and run one after the other.
"""

import torch
from torch import nn

from benchmarks.netlab.bare import ACTIVATIONS
from benchmarks.netlab.cell import Cell, Step, module_step


class _OutputOnly(nn.Module):
    """DeepSpeed's layer returns (output, auxiliary loss, counts)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x_TD)[0]
        return output


def deepspeed_step(cell: Cell) -> Step:
    """Return the forward and backward step of DeepSpeed's layer.

    Raises:
        KeyError: an activation that an `nn.Sequential` of two linear layers cannot have.
    """
    import deepspeed
    from deepspeed.moe.layer import MoE

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    shape = cell.layer
    expert = nn.Sequential(
        nn.Linear(shape.d_model, shape.d_hidden),
        ACTIVATIONS[shape.activation](),
        nn.Linear(shape.d_hidden, shape.d_model),
    )
    layer = MoE(
        hidden_size=shape.d_model,
        expert=expert,
        num_experts=shape.num_experts,
        ep_size=shape.num_experts // cell.local_experts,
        k=shape.top_k,
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    layer.set_deepspeed_parallelism()
    _load(layer, cell)
    return module_step(cell, _OutputOnly(layer))


def _load(layer: nn.Module, cell: Cell) -> None:
    weights = cell.weights()
    names = {"deepspeed_moe.gate.wg.weight": weights["gate.weight"]}
    for number in range(cell.local_experts):
        expert = f"deepspeed_moe.experts.deepspeed_experts.{number}"
        names[f"{expert}.0.weight"] = weights["experts.w1"][number].T
        names[f"{expert}.0.bias"] = weights["experts.b1"][number]
        names[f"{expert}.2.weight"] = weights["experts.w2"][number].T
        names[f"{expert}.2.bias"] = weights["experts.b2"][number]
    layer.load_state_dict(names)
