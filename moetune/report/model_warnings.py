"""Warnings of a whole model's plan: what stands in for operations, and memory that may not do."""

import math
from collections.abc import Iterable, Iterator

from moetune.domain.costs import Doubt
from moetune.domain.profile import Profile
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout
from moetune.domain.training_document import TrainingMemory
from moetune.domain.units import format_bytes, format_share
from moetune.solve.model.memory import ERROR_SHARE, RankMemory, is_tight

_SHARDS_ALL = 3
_NUM_NAMED = 3


def unpublished_words(layout: FoldedLayout, target: Target) -> Iterator[str]:
    """Yield a sentence for each part of a step that no public run shows."""
    if target.name in {"transformers", "deepspeed"}:
        yield (
            f"nobody published steps of {target.name} with their batch: its kernels are counted in "
            "its source, and the range is wide"
        )
    if layout.zero == _SHARDS_ALL and target.name != "torchtitan":
        yield (
            "how much of the gathers of ZeRO-3 is hidden is modelled, one block ahead: few runs "
            "with experts are public"
        )


def network_words(world_size: int, profile: Profile) -> Iterator[str]:
    """Yield a sentence if ranks are on several nodes and the profile has a single node."""
    machine = profile.machine
    nodes = math.ceil(world_size / machine.devices_per_node)
    if nodes > 1 and profile.network is None and machine.num_devices <= machine.devices_per_node:
        yield (
            f"profile {profile.name!r} describes one node and no network: between the {nodes} "
            "nodes of this plan the node's wires stand in"
        )


def stand_in_words(doubts: Iterable[Doubt]) -> Iterator[str]:
    """Yield sentences on collectives and GEMMs for which other operations stand in."""
    names = {doubt.operation: doubt.stand_in for doubt in doubts if doubt.stand_in}
    gemms, collectives = [name for name in names if " GEMM of " in name], dict[str, list[str]]()
    for name, stand_in in names.items():
        if name not in gemms:
            collectives.setdefault(stand_in, []).append(name)
    for stand_in, operations in collectives.items():
        rest = len(operations) - _NUM_NAMED
        words = ", ".join(operations[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
        yield f"not in the profile: {words}; {stand_in} stands in"
    if gemms:
        yield (
            f"not in the profile: {len(gemms)} {'shape' if len(gemms) == 1 else 'shapes'} of GEMMs "
            f"of this layout, such as {gemms[0]}; other shapes or passes stand in"
        )


def routing_words(need_bytes: float, limit_bytes: int) -> str:
    """Return what natural routing would need of a device, beyond the limit of a balanced plan."""
    needed = f"natural routing would need {format_bytes(round(need_bytes))} per device"
    there = format_bytes(limit_bytes)
    return f"{needed}, more than the {there} there are; without --routing a plan leaves room"


def loading_words(need_bytes: int, limit_bytes: int) -> str:
    """Return what loading takes of a device before experts are quantized, beyond the limit."""
    return (
        f"loading takes {format_bytes(need_bytes)} before experts are quantized, more than the "
        f"{format_bytes(limit_bytes)} there are: quantize the checkpoint on a larger GPU first"
    )


def host_memory_words(profile: str, host_bytes: int) -> str:
    """Return the memory that each host needs, for a profile that does not know the hosts'."""
    needed = f"{format_bytes(host_bytes)} more than its system's"
    return f"profile {profile} does not know its hosts' memory: each host needs {needed}"


def tight_words(memory: RankMemory | TrainingMemory, limit_bytes: int) -> Iterator[str]:
    """Yield that memory is tight, if a layout fits without room for errors of its bytes."""
    if is_tight(memory, limit_bytes):
        free, there = round(limit_bytes - memory.peak_bytes), format_bytes(limit_bytes)
        more = f"over {format_share(ERROR_SHARE, digits=0)} more than predicted"
        left = f"memory is tight: it leaves {format_bytes(free)} of {there}"
        yield f"{left}, and a tenth of public runs took {more}"
