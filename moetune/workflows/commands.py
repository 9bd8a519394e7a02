"""Requests as the commands that ask them, to be pasted into a shell."""

import shlex
from collections.abc import Iterator
from dataclasses import fields

from moetune.domain.constraint_texts import MEMORY_TAKEN, encode_constraints
from moetune.domain.pipeline import stage_words
from moetune.domain.request import PlanRequest
from moetune.domain.routing import BALANCED
from moetune.domain.training import LayoutRequest, TrainingJob
from moetune.workflows.training_plan import TrainingRequest

_GIB = 2**30
_SWITCHES = frozenset({"sequence-parallel", "no-offload", "allow-modelled"})
_ZERO = {"true": "1", "false": "0"}
"""A layer's request says whether states are sharded, its flag in how many stages."""


def layer_command(request: PlanRequest, *, profile: str) -> str:
    """Return the `moetune plan` that asks for a layer's or a paper's model's plan.

    Args:
        profile: its name, also where the request was read with a default.
    """
    return _command([*_subject(request), ("profile", profile), *_sizes(request)])


def training_command(request: TrainingRequest, *, model: str, profile: str) -> str:
    """Return the `moetune plan` that asks for a decoder's plan.

    Args:
        model: a name of the registry, or the path of a `config.json`.
    """
    job, limit = request.job, request.memory_limit_bytes
    found: list[tuple[str, object]] = [
        ("model", model), ("profile", profile), ("target", request.target.name),
        ("world-size", job.world_size), ("global-batch", job.global_batch), ("seq", job.length),
        ("dtype", job.dtype if job.dtype != "bfloat16" else None),
        ("optimizer", job.optimizer if job.optimizer != request.target.optimizers[0] else None),
        ("routing", None if _is_usual(job) else job.routing.name),
        ("memory-limit", size_words(limit) if limit else None), *_pins(request.pins),
    ]  # fmt: skip
    return _command(found)


def size_words(num_bytes: int) -> str:
    """Return a size that `--memory-limit` reads as exactly so many bytes: "40GiB", "4097B"."""
    whole, rest = divmod(num_bytes, _GIB)
    return f"{num_bytes}B" if rest or not whole else f"{whole}GiB"


def _subject(request: PlanRequest) -> Iterator[tuple[str, object]]:
    yield "model", request.model
    if request.layer is not None:
        layer = request.layer
        yield from (
            ("d-model", layer.d_model), ("d-hidden", layer.d_hidden),
            ("num-experts", layer.num_experts), ("top-k", layer.top_k),
            ("activation", layer.activation),
        )  # fmt: skip


def _sizes(request: PlanRequest) -> Iterator[tuple[str, object]]:
    limit = request.memory_limit_bytes
    yield "world-size", request.world_size
    yield "nodes", request.num_nodes
    yield "tokens", request.tokens_per_rank
    yield "dtype", request.dtype
    yield "memory-limit", size_words(limit) if limit else None
    for flag, text in encode_constraints(request.constraints).items():
        if flag == MEMORY_TAKEN:
            yield flag, f"{text}B"
        elif flag == "zero":
            yield flag, _ZERO[text]
        elif flag in _SWITCHES:
            yield flag, True
        else:
            yield flag, text


def _pins(pins: LayoutRequest) -> Iterator[tuple[str, object]]:
    for item in fields(pins):
        value, flag = getattr(pins, item.name), item.name.replace("_", "-")
        if value is None:
            continue
        if flag == "recompute":
            yield flag, ",".join(value) or "none"
        elif flag == "stages":
            yield flag, stage_words(value)
        else:
            yield flag, value


def _command(flags: list[tuple[str, object]]) -> str:
    words = ["moetune", "plan"]
    for flag, value in flags:
        if value is None:
            continue
        words.append(f"--{flag}")
        if value is not True:
            words.append(shlex.quote(str(value)))
    return " ".join(words)


def _is_usual(job: TrainingJob) -> bool:
    """Return whether a job's routing is that of a command that names none."""
    leaves_room = job.leaves_room or not job.decoder.num_moe_layers
    return job.routing == BALANCED and leaves_room
