"""The program of one rank: time a training step with each way to reduce dense gradients.

Variants are `WAY:DEGREE`, or `WAY:FORWARD/BACKWARD`. Ways: `ddpN` (DistributedDataParallel
with buckets of N MB), `end` (all at the end of the backward pass), `default` (moetune without a
plan), `planned`, `two` (no plan, and the sequences as two batches in flight), `positions` (no plan,
and the first and the last positions in flight). All variants take turns in one process, in another
order each round; those of one way have one model. Rank 0 prints one JSON line; a step's time is the
maximum over the ranks.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moetune
from benchmarks.layouts.balanced import Gates, balanced_gates
from benchmarks.netlab.ranks import time_steps, work_and_rounds
from examples.language_model import LanguageModel, next_token_loss
from moetune.domain.model import Transformer
from moetune.domain.plan import Decision
from moetune.domain.training import BatchSplit
from moetune.runtime.moe.layer import MoELayer
from moetune.workflows.launch import leave

_TIMEOUT = timedelta(minutes=3)
_WARM_UP_ROUNDS = 1
"""Beside the one step in which a variant is made."""
_SEED = 1
_TOLERANCE = 1e-3
"""Of gradients in float32, whose sums have other orders in other chunks."""
_MODEL_OF = {"two": "default", "positions": "default"}
_SPLITS: dict[str, BatchSplit] = {"two": "sequences", "positions": "positions"}
Step = Callable[[], torch.Tensor]
Degrees = tuple[int, int]
Half = tuple[torch.Tensor, torch.Tensor, int]
"""Tokens, the next tokens, and the place of the first one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is trained, and how.

    Args:
        sequences: of one rank.
    """

    transformer: Transformer
    sequences: int
    variants: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A plan's backward pass: with its pieces, with all gradients at the end, and without any."""

    seconds: float
    at_end_seconds: float
    alone_seconds: float
    num_pieces: int
    gradient_bytes: int


def main() -> None:
    """Measure what the arguments ask for."""
    work, rounds = work_and_rounds(Work, __doc__)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    steps, predictions = _steps(work)
    time_steps(steps, rounds=_WARM_UP_ROUNDS)
    seconds = time_steps(steps, rounds=rounds)
    if dist.get_rank() == 0:
        told = {name: dataclasses.asdict(one) for name, one in predictions.items()}
        print(json.dumps({"seconds": seconds, "predicted": told}))
    dist.destroy_process_group()
    leave(0)


def _steps(work: Work) -> tuple[dict[str, Step], dict[str, Prediction]]:
    shape, world = work.transformer, dist.get_world_size()
    text_BS = torch.randint(
        shape.vocab_size, (world * work.sequences, shape.length + 1),
        generator=torch.Generator().manual_seed(_SEED),
    )  # fmt: skip
    gates = balanced_gates(shape, text_BS[:, :-1], seed=_SEED)
    mine_BS = text_BS.chunk(world)[dist.get_rank()]
    steps: dict[str, Step] = {}
    predictions: dict[str, Prediction] = {}
    expected: dict[str, torch.Tensor] = {}
    models: dict[str, tuple[LanguageModel, nn.Module]] = {}
    for variant in work.variants:
        print(variant, file=sys.stderr, flush=True)
        way, degrees = variant_parts(variant)
        name = variant if way == "planned" else _MODEL_OF.get(way, way)
        if name not in models:
            model = _model(shape, gates)
            _pin(model, degrees)
            wrapped, prediction = _replicated(model, way, mine_BS)
            models[name] = model, wrapped
            if prediction is not None:
                predictions[variant] = prediction
        model, wrapped = models[name]
        step = (
            _overlapped(model, mine_BS, _SPLITS[way]) if way in _SPLITS else _step(wrapped, mine_BS)
        )
        steps[variant] = _pinned(step, model, degrees)
        steps[variant]()
        _check_gradients(model, expected, variant)
        model.zero_grad()
    return steps, predictions


def variant_parts(variant: str) -> tuple[str, Degrees]:
    """Return a variant's way, and its degrees forward and backward."""
    way, _, degrees = variant.partition(":")
    forward, _, backward = degrees.partition("/")
    return way, (int(forward), int(backward or forward))


def _pin(model: nn.Module, degrees: Degrees) -> None:
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.pin(Decision(forward_degree=degrees[0], backward_degree=degrees[1]))


def _pinned(step: Step, model: nn.Module, degrees: Degrees) -> Step:
    """Return the step in these degrees, which other variants of the model change."""

    def pinned() -> torch.Tensor:
        _pin(model, degrees)
        return step()

    return pinned


def _model(shape: Transformer, gates: Gates) -> LanguageModel:
    moe = shape.moe
    model = LanguageModel(
        shape,
        lambda: MoELayer(
            moe.d_model, moe.d_hidden, moe.num_experts, moe.top_k, activation=moe.activation,
            memory_reuse=False,
        ),
    )  # fmt: skip
    model.reset_parameters(_SEED)
    with torch.no_grad():
        for name, gate in gates.items():
            model.get_parameter(f"blocks.{name}.ffn.gate.weight").copy_(gate)
    return model


def _replicated(
    model: LanguageModel, way: str, text_BS: torch.Tensor
) -> tuple[nn.Module, Prediction | None]:
    if way.startswith("ddp"):
        prepared = moetune.prepare_ddp(model)
        return DistributedDataParallel(prepared, bucket_cap_mb=float(way[3:])), None
    if way == "end":
        return moetune.replicate(model, moetune.GradientSchedule()), None
    moetune.replicate(model)
    if way in {"default", *_MODEL_OF}:
        return model, None
    plan = moetune.plan_gradients(model, _step(model, text_BS))
    return model, Prediction(
        seconds=plan.seconds, at_end_seconds=plan.at_end_seconds,
        alone_seconds=plan.alone_seconds, num_pieces=len(plan.schedule.pieces),
        gradient_bytes=sum(
            each.nbytes for name, each in model.named_parameters() if ".experts." not in name
        ),
    )  # fmt: skip


def _step(model: nn.Module, text_BS: torch.Tensor) -> Step:
    """Return a step without an optimizer: all steps are alike."""

    def step() -> torch.Tensor:
        model.zero_grad()
        loss = next_token_loss(model(text_BS[:, :-1]), text_BS[:, 1:])
        loss.backward()
        return loss

    return step


def _overlapped(model: LanguageModel, text_BS: torch.Tensor, split: BatchSplit) -> Step:
    """Return a step of the same sequences in halves, each with half the mean loss."""
    dim = 1 if split == "positions" else 0
    x_BS, wanted_BS = text_BS[:, :-1], text_BS[:, 1:]
    starts = (0, x_BS.shape[1] // 2 if split == "positions" else 0)
    halves = list(zip(x_BS.chunk(2, dim), wanted_BS.chunk(2, dim), starts, strict=True))

    def loss(half: Half) -> torch.Tensor:
        tokens_BS, next_BS, start = half
        return next_token_loss(model(tokens_BS, start), next_BS) / 2

    overlap = moetune.BatchOverlap[Half](model, loss, split=split)

    def step() -> torch.Tensor:
        model.zero_grad()
        first, second = overlap(halves)
        return first + second

    return step


def _check_gradients(model: nn.Module, expected: dict[str, torch.Tensor], variant: str) -> None:
    """Raise AssertionError where a variant does not make the gradients of the first one."""
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    if not expected:
        expected.update((name, each.clone()) for name, each in found.items())
    for name, wanted in expected.items():
        error = float((found[name] - wanted).norm() / wanted.norm().clamp(min=1e-12))
        if error > _TOLERANCE:
            raise AssertionError(f"{variant}: {name} differs by {error:.1e}")


if __name__ == "__main__":
    main()
