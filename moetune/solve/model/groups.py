"""Groups of a layout by size and by the nodes that their ranks are spread over.

A rank is (stage, replica, tensor coordinate), the last one counted first: consecutive ranks share
a tensor-parallel group, then come the replicas, then the stages. A node is `per_node`
consecutive ranks.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from moetune.domain.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate.

    Args:
        num_nodes: that the ranks are spread over; 0 for as few as consecutive ranks need.
    """

    size: int
    num_nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of one layout.

    Args:
        tensor: ranks that share heads and dense networks.
        data: ranks that hold the same dense parameters.
        experts: ranks that share the experts of a layer.
        replicas: ranks that hold the same experts and see other tokens.
        hops: sender and receiver between each stage and the next, or the chain of all stages.
    """

    tensor: Group
    data: Group
    experts: Group
    replicas: Group
    hops: tuple[Group, ...]


def groups_of(layout: Layout, *, per_node: int) -> Groups:
    """Return the groups of a layout on nodes of so many ranks."""
    place = functools.partial(
        place_group, world_size=layout.dp * layout.tp * layout.pp, per_node=per_node
    )
    tensor, stage = layout.tp, layout.tp * layout.dp
    is_tensor = layout.expert_parallel == "tensor"
    return Groups(
        tensor=place(stride=1, size=layout.tp),
        data=place(stride=tensor, size=layout.dp),
        experts=place(stride=1 if is_tensor else tensor, size=layout.expert_ranks),
        replicas=place(stride=tensor * layout.ep, size=layout.dp // layout.ep),
        hops=tuple(_hop(hop, stage, layout.pp, per_node) for hop in range(layout.pp - 1)),
    )  # fmt: skip


def _hop(hop: int, stage: int, num_stages: int, per_node: int) -> Group:
    """Return the group whose measured send stands for those from a stage to the next one.

    A chain of one-rank stages has the wire between nodes to itself, as when the chain of all ranks
    sends; all ranks of wider stages send at the same time.
    """
    nodes = _most_nodes(range(hop * stage, (hop + 1) * stage), stage, 2, per_node)
    if nodes > 1 and stage == 1 and per_node > 1:
        return Group(size=num_stages)
    return _as_group(nodes, 2, per_node)


@functools.cache
def place_group(*, stride: int, size: int, world_size: int, per_node: int) -> Group:
    """Return the groups of every `stride`-th rank, as the one that spans the most nodes.

    Args:
        world_size: a multiple of stride·size; the groups tile it.
    """
    firsts = (
        block + start for block in range(0, world_size, stride * size) for start in range(stride)
    )
    return _as_group(_most_nodes(firsts, stride, size, per_node), size, per_node)


def _most_nodes(firsts: Iterable[int], stride: int, size: int, per_node: int) -> int:
    return max(
        len({(first + index * stride) // per_node for index in range(size)}) for first in firsts
    )


def _as_group(num_nodes: int, size: int, per_node: int) -> Group:
    compact = math.ceil(size / per_node)
    return Group(size=size, num_nodes=0 if num_nodes <= compact else num_nodes)
