"""Analyse a model for `shard`: units that run together, ranks with replicas, packed parameters."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from moetune.comm.agree import first_text
from moetune.comm.group import Communicator
from moetune.domain.chunks import Chunk, ChunkGroup, PackedParameter, pack
from moetune.domain.errors import InputError, RankMismatchError
from moetune.runtime.moe.layer import ExpertLayer
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.sharded.options import ShardOptions
from moetune.runtime.sharded.replicas import replica_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module that reads parameters itself, not only through its children.

    Args:
        name: of the module in the model.
        parameters: names of its own; also of all its descendants', if it does not call them.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...]


def find_units(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a model: modules with parameters of their own.

    Layers of experts, which need all their parameters at once, and `nn.MultiheadAttention`, which
    does not call its children, are one unit with everything below them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return tuple(_units(model, "", names, set()))


def expert_layers(model: nn.Module) -> dict[str, PlannedLayer]:
    """Return the MoE layer of each parameter that expert-parallel ranks do not replicate."""
    owners: dict[int, PlannedLayer] = {
        id(parameter): module
        for module in model.modules()
        if isinstance(module, PlannedLayer) and module.expert_parallel == "all_to_all"
        if module.communicator.num_ranks > 1
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


def replica_groups(
    model: nn.Module, replicas: Communicator
) -> tuple[dict[str, Communicator], dict[str, str]]:
    """Return the ranks with replicas of each parameter, and labels that tell experts' groups apart.

    Raises:
        RankMismatchError: the ranks have different layers.
        InputError: a layer's expert-parallel ranks are not all in the group, or a plan has placed
            its experts; the latter on all ranks.
    """
    layers = expert_layers(model)
    _check_natural(layers, replicas)
    replicas_of = dict.fromkeys((name for name, _ in model.named_parameters()), replicas)
    labels: dict[str, str] = {}
    made = {replicas.members: replicas}
    rows = replicas.all_gather_object(
        {name: layer.communicator.rank for name, layer in layers.items()}, "the layers of experts"
    )
    for name, layer in layers.items():
        if any(row.keys() != layers.keys() for row in rows):
            raise RankMismatchError("the ranks have different layers of experts")
        ranks = [row[name] for row in rows]
        counts = Counter(ranks)
        if len(counts) != layer.communicator.num_ranks or len(set(counts.values())) > 1:
            raise InputError(
                f"{name} is spread over {layer.communicator.num_ranks} ranks that are not all in "
                f"the data-parallel group of {replicas.num_ranks}",
                "give shard a group that contains the layer's",
            )
        members = tuple(
            member
            for member, rank in zip(replicas.members, ranks, strict=True)
            if rank == layer.communicator.rank
        )
        if members not in made:
            made[members] = replica_group(members)
        replicas_of[name], labels[name] = made[members], f"experts {ranks}"
    return replicas_of, labels


def _check_natural(layers: Mapping[str, PlannedLayer], replicas: Communicator) -> None:
    placed = sorted(name for name, layer in layers.items() if layer.experts.placement.order)
    name = first_text(replicas, next(iter(placed), ""), "the experts' places")
    if name:
        raise InputError(
            f"a plan has placed the experts of {name}, and chunks keep them in the order of ranks",
            "plan with --expert-placement natural, or use DistributedDataParallel",
        )


def pack_model(
    parameters: Mapping[str, nn.Parameter],
    replicas_of: Mapping[str, Communicator],
    labels: Mapping[str, str],
    options: ShardOptions,
) -> tuple[Chunk, ...]:
    """Return the chunks of a model's parameters, packed in their order.

    Raises:
        InputError: a parameter is larger than a chunk, or chunks cannot have its dtype.
    """
    return pack(
        (
            PackedParameter(
                name=name,
                num_elements=parameter.numel(),
                group=ChunkGroup(
                    dtype=str(parameter.dtype).removeprefix("torch."),
                    ranks=replicas_of[name].num_ranks,
                    label=labels.get(name, ""),
                    is_trainable=parameter.requires_grad,
                ),
            )
            for name, parameter in parameters.items()
        ),
        chunk_bytes=options.chunk_bytes,
    )


def cache_capacity(chunks: Sequence[Chunk], options: ShardOptions) -> int:
    """Return the number of whole chunks that the cache may hold.

    Raises:
        InputError: the number is below two.
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
