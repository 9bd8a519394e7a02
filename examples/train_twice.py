"""Training of a byte-level language model on real text, with a plan and with one chunk.

Third step of the quickstart; runs on every rank.

B sequences of a rank, S bytes each, D model width, T = B·S tokens.
"""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples.language_model import LanguageModel, next_token_loss
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.model import Transformer
from moetune.domain.plan import SAFE_DECISION, Decision, Plan
from moetune.domain.routing_record import RoutingRecord
from moetune.measure.steps import LayerSteps, MeasuredSteps, measure_steps
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.replicas import prepare_ddp

AUX_WEIGHT = 0.01
_SEED = 7
_NUM_BYTES = 256
_LEARNING_RATE = 2e-3
_NUM_ROUNDS = 10
_HELD_OUT_FILES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Sizes of the model and the batch, the plan of its layers, and the number of steps.

    Args:
        batch, length: sequences of a rank and the bytes of each: T = batch · length tokens.
    """

    plan: Plan
    batch: int
    length: int
    num_blocks: int
    num_heads: int
    num_steps: int

    @property
    def layer(self) -> LayerShape:
        """The MoE layer of every block."""
        return self.plan.inputs.layer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """Losses of one training, and timed steps of its first MoE layer on the model's own tokens.

    Args:
        loss_before, loss_after: cross-entropy on held-out text, nats per byte.
        routing: of the timed steps' tokens.
    """

    decision: Decision
    loss_before: float
    loss_after: float
    steps: MeasuredSteps
    routing: RoutingRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Bytes of real files.

    Args:
        training: one long sequence, uint8.
        held_out: (B, S + 1), int64, the same on every rank.
    """

    training: torch.Tensor
    held_out: torch.Tensor
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A trained model, its losses, and a batch that it has not seen."""

    model: LanguageModel
    layer: MoELayer
    loss_before: float
    loss_after: float
    batch_BS: torch.Tensor


def train_twice(config: TrainingConfig, _: object) -> tuple[TrainingResult, ...]:
    """Train with the plan and again with one chunk; all ranks call this together.

    Where the plan is one chunk, the model is trained once. Steps of both are timed in turns, on one
    layer: the machine's speed drifts by more than what they differ in.
    """
    text = standard_library(config)
    planned = config.plan.decide(config.batch * config.length)
    single = replace(SAFE_DECISION, kernel=planned.kernel)
    decisions = (planned,) if planned.degree == 1 else (planned, single)
    models = [_train(config, text, decision) for decision in decisions]
    measured, routing = _time_first(models[0], decisions)
    return tuple(
        TrainingResult(
            decision=steps.decision, loss_before=trained.loss_before,
            loss_after=trained.loss_after, steps=steps, routing=routing,
        )
        for trained, steps in zip(models, measured, strict=True)
    )  # fmt: skip


def standard_library(config: TrainingConfig) -> Text:
    """Return the sources of the standard library: text that every Python has."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    training, held_out = files[:-_HELD_OUT_FILES], files[-_HELD_OUT_FILES:]
    some = _bytes(held_out)
    size = config.length + 1
    rows = min(config.batch, len(some) // size)
    return Text(
        training=_bytes(training),
        held_out=some[: rows * size].view(rows, size).long(),
        num_files=len(files),
    )


def _bytes(files: list[Path]) -> torch.Tensor:
    joined = b"\n".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def _train(config: TrainingConfig, text: Text, decision: Decision) -> Trained:
    torch.manual_seed(_SEED)
    model = _model(config)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        layer.pin(decision)
    wrapped: nn.Module = prepare_ddp(model)
    if dist.is_initialized():
        wrapped = DistributedDataParallel(wrapped)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    before = _loss(model, text)
    generator = torch.Generator().manual_seed(_SEED + layers[0].communicator.rank)
    for _ in range(config.num_steps):
        _next_token_loss(wrapped, _batch(config, text, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained(
        model=model, layer=layers[0], loss_before=before, loss_after=_loss(model, text),
        batch_BS=_batch(config, text, generator),
    )  # fmt: skip


def _model(config: TrainingConfig) -> LanguageModel:
    layer = config.layer
    return LanguageModel(
        Transformer(
            moe=layer,
            num_layers=config.num_blocks,
            num_heads=config.num_heads,
            length=config.length,
            vocab_size=_NUM_BYTES,
            moe_every=1,
        ),
        lambda: MoELayer(
            layer.d_model,
            layer.d_hidden,
            layer.num_experts,
            layer.top_k,
            activation=layer.activation,
            pipeline=False,
        ),
        balance=AUX_WEIGHT / config.num_blocks,
    )


def _batch(config: TrainingConfig, text: Text, generator: torch.Generator) -> torch.Tensor:
    last = len(text.training) - config.length - 1
    starts = torch.randint(last, (config.batch, 1), generator=generator)
    places_BS = starts + torch.arange(config.length + 1)
    return text.training[places_BS].long()


def _loss(model: LanguageModel, text: Text) -> float:
    with torch.no_grad():
        return float(_next_token_loss(model, text.held_out))


def _next_token_loss(model: nn.Module, text_BS: torch.Tensor) -> torch.Tensor:
    return next_token_loss(model(text_BS[:, :-1]), text_BS[:, 1:])


def _time_first(
    trained: Trained, decisions: Sequence[Decision]
) -> tuple[tuple[MeasuredSteps, ...], RoutingRecord]:
    """Time the first MoE layer alone, on the tokens that reach it in the trained model."""
    caught, layer = list[torch.Tensor](), trained.layer
    hook = layer.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].detach()))
    with torch.no_grad():
        trained.model(trained.batch_BS[:, :-1])
    hook.remove()
    x_TD = caught[0].flatten(0, -2)
    workload = Workload(
        layer=layer.shape, world_size=layer.communicator.num_ranks, tokens_per_rank=len(x_TD)
    )
    steps = LayerSteps(layer, x_TD, torch.randn_like(x_TD), workload)
    layer.forget_routing()
    return measure_steps(steps, decisions, num_rounds=_NUM_ROUNDS), layer.routing_record()
