"""Blocks of other libraries in place of the model's own, with its weights.

Both make a router of their own from the block's: softmax over all experts, the two largest, divided
by their sum, as Qwen3-MoE's with `norm_topk_prob`. No token is dropped: both agree on the busiest
expert's rows of any rank, and pad every expert to them. Neither adds its balance loss.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.rivals.case import load_model
from benchmarks.rivals.models import Step, adamw, expert_parallel_step, loss_of


class _OutputOnly(nn.Module):
    """A block whose layer may return more than its output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        found = self.layer(x_BSD)
        output: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return output


def deepspeed_step(folder: Path) -> Step:
    """Return the step of DeepSpeed's engine and its MoE layer."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = load_model(folder)
    for block in model.model.layers:
        block.mlp = _OutputOnly(_deepspeed_layer(block.mlp, model.config))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 0},
            "steps_per_print": 2**31,
        },
    )

    def step(text_BS: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine, text_BS)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _deepspeed_layer(block: Any, config: Any) -> nn.Module:  # noqa: ANN401 - of transformers
    from deepspeed.moe.layer import MoE
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

    world = dist.get_world_size()
    layer: nn.Module = MoE(
        hidden_size=config.hidden_size,
        expert=Qwen3MoeMLP(config, intermediate_size=config.moe_intermediate_size),
        num_experts=config.num_experts,
        ep_size=world,
        k=config.num_experts_per_tok,
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    weights = {"deepspeed_moe.gate.wg.weight": block.gate.weight}
    for number, (gate, up, down) in enumerate(zip(*_own_experts(block), strict=True)):
        expert = f"deepspeed_moe.experts.deepspeed_experts.{number}"
        weights |= {
            f"{expert}.gate_proj.weight": gate,
            f"{expert}.up_proj.weight": up,
            f"{expert}.down_proj.weight": down,
        }
    layer.load_state_dict(weights)
    return layer


def tutel_step(folder: Path) -> Step:
    """Return the step of Tutel's MoE layer, with DDP for the dense gradients."""
    model = load_model(folder)
    for block in model.model.layers:
        block.mlp = _OutputOnly(_tutel_layer(block.mlp, model.config))
    return expert_parallel_step(
        model,
        {name for name, each in model.named_parameters() if hasattr(each, "_tutel_expert")},
    )


def _tutel_layer(block: Any, config: Any) -> nn.Module:  # noqa: ANN401 - of transformers
    from tutel import moe

    layer: Any = moe.moe_layer(
        gate_type={"type": "top", "k": config.num_experts_per_tok, "capacity_factor": 0},
        model_dim=config.hidden_size,
        experts={
            "type": "llama_ffn",
            "num_experts_per_device": config.num_experts // dist.get_world_size(),
            "hidden_size_per_expert": config.moe_intermediate_size,
        },
    )
    experts = layer.experts
    with torch.no_grad():
        layer.gates[0].wg.weight.copy_(block.gate.weight)
        for parameter, matrix_EOI in zip(
            (experts.W_fc1, experts.W_fc2, experts.W_fc3), _own_experts(block), strict=True
        ):
            parameter.copy_(matrix_EOI.mT.flatten())
    checked: nn.Module = layer
    return checked


def _own_experts(block: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # noqa: ANN401 - of transformers
    """Return this rank's gate, up- and down-projections, each (E, out, in)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    both = block.experts.gate_up_proj.detach().chunk(world)[rank]
    gate, up = both.chunk(2, dim=1)
    return gate, up, block.experts.down_proj.detach().chunk(world)[rank]
