"""What ranks do in the tests of chunks: train sharded, and plainly on all ranks' batches."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional

import moetune
from moetune.runtime.sharded.cache import Cache
from tests.runtime import chunked_models as models

EXACT = 1e-10
CHUNK_BYTES = 3200


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training run.

    Args:
        make: the model, and its plain twin where they differ.
        places: of the cache; None for all.
    """

    make: Callable[[], nn.Module]
    make_twin: Callable[[], nn.Module] | None = None
    steps: int = 4
    places: int | None = None
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.1})
    micro_batches: int = 1
    max_norm: float | None = None
    evaluates: bool = False
    dtype: torch.dtype = torch.float64
    chunk_bytes: int = CHUNK_BYTES
    options: dict[str, Any] = field(default_factory=dict)


def rank_and_ranks() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Return the whole state on the first rank, and nothing elsewhere."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return copy.deepcopy(get_model_state_dict(model, options=options))


def batches(case: Case, step: int) -> Iterator[list[torch.Tensor]]:
    """Yield every rank's tokens for each micro-batch."""
    for micro in range(case.micro_batches):
        generator = torch.Generator().manual_seed(1000 * step + micro)
        yield [
            torch.randint(models.VOCABULARY, (2, 6), generator=generator)
            for _ in range(rank_and_ranks()[1])
        ]


def exact_loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def sharded(case: Case) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.make().to(case.dtype)
    optimizer = case.optimizer(model.parameters(), **case.settings)
    options = dict(case.options)
    if case.places is not None:
        # Two-byte and expert chunks are rounded up for the ranks.
        options["cache_bytes"] = case.places * case.chunk_bytes
    return moetune.shard(model, optimizer, chunk_bytes=case.chunk_bytes, **options)


def step_sharded(case: Case, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    rank = rank_and_ranks()[0]
    for tokens in batches(case, step):
        exact_loss_of(model, tokens[rank]).backward()
    if case.max_norm is not None:
        moetune.clip_grad_norm_(model, case.max_norm)
    if case.evaluates:
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.long))
    optimizer.step()
    optimizer.zero_grad()


def train_plainly(case: Case, twin: nn.Module) -> None:
    """Train on all ranks' batches in this process: gradients are means over the ranks."""
    optimizer = case.optimizer(twin.parameters(), **case.settings)
    for step in range(case.steps):
        for tokens in batches(case, step):
            for some in tokens:
                (exact_loss_of(twin, some) / len(tokens)).backward()
        if case.max_norm is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), case.max_norm)
        optimizer.step()
        optimizer.zero_grad()


def check_equals_plain(case: Case, name: str = "") -> Cache:
    """Train sharded, and hold the whole state against that of plain training."""
    torch.manual_seed(0)
    model, optimizer = sharded(case)
    chunks = moetune.model_chunks(model)
    gathered: list[int] = []
    """Chunks that FSDP2 says are there, where each module begins."""
    for module in model.modules():
        module.register_forward_pre_hook(
            lambda *_: gathered.append(sum(not each.is_freed for each in chunks.chunks))
        )
    start = whole_state(model)
    for step in range(case.steps):
        step_sharded(case, step, model, optimizer)
    end = whole_state(model)
    largest = max(chunk.num_bytes for chunk in chunks.chunks)
    assert chunks.peak_bytes <= chunks.capacity * largest, name
    assert 0 < max(gathered) <= chunks.capacity, name
    if rank_and_ranks()[0]:
        assert end == {}
        return chunks
    twin = (case.make_twin or case.make)().to(case.dtype)
    twin.load_state_dict(copy.deepcopy(start))
    train_plainly(case, twin)
    wanted = twin.state_dict()
    assert end.keys() == wanted.keys()
    for key, value in wanted.items():
        error = float((end[key] - value).abs().max())
        assert error <= EXACT, f"{name}: {key} is off by {error}"
    return chunks


def check_equals_mixed_precision(options: dict[str, Any]) -> None:
    """Train in bfloat16, and hold the masters against float32 ones stepped by hand.

    By hand, gradients of a bfloat16 copy on each rank's batch are added up in float32.
    """
    case = Case(
        make=models.Plain, places=2, steps=10, dtype=torch.bfloat16, chunk_bytes=1024,
        options=options,
    )  # fmt: skip
    model, optimizer = sharded(case)
    start = whole_state(model)
    for step in range(case.steps):
        step_sharded(case, step, model, optimizer)
    end = whole_state(model)
    if not end:
        return
    masters = models.Plain()
    masters.load_state_dict(start)
    plain = torch.optim.AdamW(masters.parameters(), **case.settings)
    for step in range(case.steps):
        (tokens,) = batches(case, step)
        plain.zero_grad()
        for some in tokens:
            copied = copy.deepcopy(masters).bfloat16()
            exact_loss_of(copied, some).backward()
            for master, low in zip(masters.parameters(), copied.parameters(), strict=True):
                assert low.grad is not None
                gradient = low.grad.float() / len(tokens)
                master.grad = gradient if master.grad is None else master.grad + gradient
        plain.step()
    for name, value in masters.state_dict().items():
        assert end[name].dtype == torch.float32
        torch.testing.assert_close(end[name], value, rtol=1e-5, atol=1e-6)
