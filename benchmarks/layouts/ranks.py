"""The program of one rank: time a training step of a model under one layout.

All layouts train from the same weights on the same sequences. Rank 0 prints one JSON line; a
step's time is the maximum over the ranks.
"""

import dataclasses
import json
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.layouts.balanced import Gates, balanced_gates
from benchmarks.netlab.cell import Step
from benchmarks.netlab.ranks import time_steps, work_and_rounds
from examples.language_model import LanguageModel, staged_language_model
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.plan import Decision
from moetune.runtime.moe.expert_layer import ExpertLayer
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.parallel.groups import join
from moetune.runtime.parallel.stages import Stages
from moetune.workflows.launch import leave

_TIMEOUT = timedelta(minutes=2)
_WARM_UP_ROUNDS = 2
_SEED = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train the model."""

    layout: Layout
    num_micro_batches: int
    decision: Decision


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is trained, and how.

    Args:
        num_sequences: of the global batch.
    """

    transformer: Transformer
    num_sequences: int
    variant: Variant


def main() -> None:
    """Measure what the arguments ask for."""
    work, rounds = work_and_rounds(Work, __doc__)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    text = torch.randint(
        work.transformer.vocab_size,
        (work.num_sequences, work.transformer.length + 1),
        generator=torch.Generator().manual_seed(_SEED),
    )
    gates = balanced_gates(work.transformer, text[:, :-1], seed=_SEED)
    stages = _stages(work, gates)
    loss = _loss(stages, text)
    step = {"step": _step(stages, text)}
    time_steps(step, rounds=_WARM_UP_ROUNDS)
    seconds = time_steps(step, rounds=rounds)["step"]
    imbalance = _imbalance(stages, text)
    if dist.get_rank() == 0:
        print(json.dumps({"loss": loss, "seconds": seconds, "imbalance": imbalance}))
    dist.destroy_process_group()
    leave(0)


def _stages(work: Work, gates: Gates) -> Stages:
    variant = work.variant
    ranks = join(variant.layout, timeout=_TIMEOUT)
    stages = staged_language_model(
        work.transformer,
        ranks,
        num_sequences=work.num_sequences // variant.layout.dp,
        num_micro_batches=variant.num_micro_batches,
        seed=_SEED,
    )
    for part in stages.parts:
        blocks = part.blocks.items() if isinstance(part, LanguageModel) else ()
        for name, block in blocks:
            if isinstance(block.ffn, ExpertLayer):
                block.ffn.pin(variant.decision)
                with torch.no_grad():
                    block.ffn.gate.weight.copy_(gates[name])
    return stages


def _mine(stages: Stages, text_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mine = text_BS.chunk(stages.ranks.layout.dp)[stages.ranks.replica]
    return mine[:, :-1], mine[:, 1:]


def _loss(stages: Stages, text_BS: torch.Tensor) -> float:
    return float(stages.total_loss(stages.backward(*_mine(stages, text_BS))))


def _step(stages: Stages, text_BS: torch.Tensor) -> Step:
    """Return a training step that leaves the weights as they are: all steps are alike."""
    optimizer = torch.optim.AdamW(stages.parts.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    inputs, targets = _mine(stages, text_BS)

    def step() -> torch.Tensor:
        loss = stages.backward(inputs, targets)
        optimizer.step()
        return loss

    return step


def _expert_layers(stages: Stages) -> Sequence[ExpertLayer]:
    return [module for module in stages.parts.modules() if isinstance(module, ExpertLayer)]


def _imbalance(stages: Stages, text_BS: torch.Tensor) -> float:
    """Return the worst layer's rows of the busiest rank over those of the mean rank."""
    layers = _expert_layers(stages)
    chosen: list[list[torch.Tensor]] = [[] for _ in layers]
    hooks = [
        layer.gate.register_forward_hook(
            lambda *told, found=found: found.append(told[2].experts_TK.flatten())
        )
        for layer, found in zip(layers, chosen, strict=True)
    ]
    _loss(stages, text_BS)
    for hook in hooks:
        hook.remove()
    worst = torch.ones((), dtype=torch.float64)
    for layer, found in zip(layers, chosen, strict=True):
        counts_E = torch.bincount(torch.cat(found), minlength=layer.shape.num_experts)
        if isinstance(layer, MoELayer):
            dist.all_reduce(counts_E, group=stages.ranks.experts)
        rows_P = counts_E.view(layer.communicator.num_ranks, -1).sum(dim=1).double()
        worst = torch.maximum(worst, rows_P.max() / rows_P.mean())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


if __name__ == "__main__":
    main()
