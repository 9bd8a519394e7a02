"""What of a model needs its chunks at the same time, and who has replicas of its parameters."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moetune.domain.chunks import Chunk, ChunkGroup, PackedParameter, pack
from moetune.domain.errors import AllocationError, InputError, MoetuneError, RankMismatchError
from moetune.domain.units import format_bytes
from moetune.runtime.moe.layer import ExpertLayer, MoELayer
from moetune.runtime.sharded.streams import SideStream
from moetune.runtime.sharded.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module whose forward reads these parameters.

    Args:
        name: of the module in the model.
        parameters: names of its own ones; all below it where it uses them itself.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...]


def find_units(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a model: modules with parameters of their own.

    Layers of experts and `nn.MultiheadAttention` use their children's parameters without
    calling the children, and are one unit with everything below them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return tuple(_units(model, "", names, set()))


def expert_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Return the layer of every parameter of which each expert-parallel rank has its own."""
    owners: dict[int, MoELayer] = {
        id(parameter): module
        for module in model.modules()
        if isinstance(module, MoELayer) and module.link.num_ranks > 1
        for parameter in module.experts.parameters()
    }
    return {
        name: owners[id(parameter)]
        for name, parameter in model.named_parameters()
        if id(parameter) in owners
    }


def _units(module: nn.Module, name: str, names: dict[int, str], seen: set[int]) -> Iterator[Unit]:
    if id(module) in seen:
        return
    seen.add(id(module))
    is_whole = isinstance(module, ExpertLayer | nn.MultiheadAttention)
    own = tuple(dict.fromkeys(names[id(each)] for each in module.parameters(recurse=is_whole)))
    if own:
        yield Unit(name=name or type(module).__name__, module=module, parameters=own)
    if is_whole:
        return
    for child_name, child in module.named_children():
        yield from _units(child, f"{name}.{child_name}".strip("."), names, seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where chunks live.

    Args:
        device: that computes.
        scale: of summed gradients: 1 / the ranks of the data-parallel group.
        pin: shards in host memory are page-locked.
        coming, leaving: where values come in and gradients go out.
    """

    device: torch.device
    scatter: bool
    offload: bool
    pin: bool
    scale: float
    coming: SideStream
    leaving: SideStream


_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """What the caller of `shard` chose.

    Args:
        cache_bytes: None caches all chunks.
    """

    chunk_bytes: int
    cache_bytes: int | None
    scatter: bool
    offload: bool
    pin: bool

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise InputError(f"chunk_bytes must be at least 1, got {self.chunk_bytes}")
        if self.cache_bytes is not None and self.cache_bytes < 2 * self.chunk_bytes:
            raise InputError(
                f"cache_bytes {self.cache_bytes} is less than two chunks of {self.chunk_bytes}",
                f"use a cache_bytes of at least {2 * self.chunk_bytes}",
            )
        if self.offload and not self.scatter:
            raise InputError(
                "offload=True with scatter=False would keep every chunk in every rank's host "
                "memory",
                "leave scatter=True",
            )


def teams_of(model: nn.Module, team: Team) -> tuple[dict[str, Team], dict[str, str]]:
    """Return the ranks that have replicas of every parameter, and a label for those of experts.

    Raises:
        RankMismatchError: the ranks have different layers.
        InputError: a layer's expert-parallel ranks are not all in the group.
    """
    layers = expert_layers(model)
    teams = dict.fromkeys((name for name, _ in model.named_parameters()), team)
    labels: dict[str, str] = {}
    made = {team.members: team}
    places = team.texts(";".join(f"{name}={layer.link.rank}" for name, layer in layers.items()))
    rows = [dict(item.split("=") for item in text.split(";") if item) for text in places]
    for name, layer in layers.items():
        if any(row.keys() != layers.keys() for row in rows):
            raise RankMismatchError("the ranks have different layers of experts")
        ranks = [int(row[name]) for row in rows]
        if len({ranks.count(rank) for rank in range(layer.link.num_ranks)} - {0}) != 1 or set(
            ranks
        ) != set(range(layer.link.num_ranks)):
            raise InputError(
                f"{name} is spread over {layer.link.num_ranks} ranks that are not all in the "
                f"data-parallel group of {team.num_ranks}",
                "give shard a group that contains the layer's",
            )
        members = tuple(
            member
            for member, rank in zip(team.members, ranks, strict=True)
            if rank == layer.link.rank
        )
        if members not in made:
            made[members] = Team(members)
        teams[name], labels[name] = made[members], f"experts {ranks}"
    return teams, labels


def pack_model(
    parameters: Mapping[str, nn.Parameter],
    teams: Mapping[str, Team],
    labels: Mapping[str, str],
    options: ShardOptions,
) -> tuple[Chunk, ...]:
    """Return the chunks of a model's parameters, in their order.

    Raises:
        InputError: a parameter is larger than a chunk, or of a dtype that has none.
    """
    return pack(
        (
            PackedParameter(
                name=name,
                num_elements=parameter.numel(),
                group=ChunkGroup(
                    dtype=str(parameter.dtype).removeprefix("torch."),
                    ranks=teams[name].num_ranks,
                    label=labels.get(name, ""),
                    is_trainable=parameter.requires_grad,
                ),
            )
            for name, parameter in parameters.items()
        ),
        chunk_bytes=options.chunk_bytes,
    )


def num_places(chunks: Sequence[Chunk], options: ShardOptions) -> int:
    """Return the places of the cache.

    Raises:
        InputError: there are fewer than two.
    """
    cached = [chunk.num_bytes for chunk in chunks if not chunk.is_fused]
    if options.cache_bytes is None or not cached:
        return max(len(cached), 2)
    if options.cache_bytes < 2 * max(cached):
        raise InputError(
            f"cache_bytes {options.cache_bytes} is less than two chunks, which have "
            f"{max(cached)} bytes each, rounded up for their ranks",
            f"use a cache_bytes of at least {2 * max(cached)}",
        )
    return options.cache_bytes // max(cached)


def agree(
    team: Team, model: nn.Module, options: ShardOptions, problem: MoetuneError | None
) -> None:
    """Raise on every rank unless all want to shard the same model alike.

    Raises:
        RankMismatchError: they differ in a parameter or an option, or another rank has a problem.
        MoetuneError: this rank's problem.
    """
    lines = [str(options)] + [
        f"{name}: {tuple(parameter.shape)} {parameter.dtype} trainable {parameter.requires_grad}"
        for name, parameter in model.named_parameters()
    ]
    said = "" if problem is None else f"error: {problem.what}"
    texts = team.texts("\n".join([said, *lines]))
    rows = [text.split("\n") for text in texts]
    for others in zip(*(_padded(row[1:], max(map(len, rows))) for row in rows), strict=True):
        if len(set(others)) > 1:
            listed = "\n".join(f"  rank {rank}: {line}" for rank, line in enumerate(others))
            raise RankMismatchError(f"the ranks shard different models\n{listed}")
    if problem is not None:
        raise problem
    for rank, row in enumerate(rows):
        if row[0]:
            raise RankMismatchError(f"rank {rank}: {row[0].removeprefix('error: ')}")


def check_host_memory(chunks: Sequence[Chunk], team: Team, *, copies: int) -> MoetuneError | None:
    """Return the error where the host has no memory for the shards of all its ranks.

    Args:
        copies: of every value in float32 (or the dtype, if larger): master, gradient, states.
    """
    host = socket.gethostname()
    num_ranks = team.texts(host).count(host)
    needed = num_ranks * sum(_host_bytes(chunk, copies) for chunk in chunks)
    available = available_bytes()
    if needed <= available:
        return None
    return AllocationError(
        f"the shards of {num_ranks} ranks need {needed} bytes of host memory "
        f"({format_bytes(needed)}), and {available} ({format_bytes(available)}) are available",
        "use more hosts, a smaller model, or offload=False",
    )


def available_bytes(meminfo: Path = _MEMINFO) -> int:
    """Return the host memory that can be had without swapping."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise InputError(f"MemAvailable is not in {meminfo}")


def _host_bytes(chunk: Chunk, copies: int) -> int:
    if chunk.is_fused:
        return 0
    elements = chunk.num_elements // chunk.group.ranks
    size = getattr(torch, chunk.group.dtype).itemsize
    if not chunk.group.is_trainable:
        return int(elements * size)
    own = size if size < torch.float32.itemsize else 0
    return int(elements * (own + copies * max(size, torch.float32.itemsize)))


def _padded(lines: list[str], length: int) -> list[str]:
    return lines + ["nothing"] * (length - len(lines))
