"""Would ranks that issue these collectives ever end?

A collective ends once all of its ranks have begun it. On a GPU a rank begins one only behind those
that it issued before, whatever their communicators: they share the device. On the host it does so
where the rank waited for the earlier one before. A cycle of "behind" is a deadlock.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.cuda_kit.group import Issued


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Node:
    """One collective, that all of its ranks take part in.

    Args:
        number: of the communicator, among those with the same members.
        count: of the communicator's before it.
    """

    members: tuple[int, ...]
    number: int
    count: int = 0

    def __str__(self) -> str:
        of = f"communicator {self.number} of ranks {list(self.members)}"
        return f"collective {self.count} of {of}"


class CollectiveOrderError(AssertionError):
    """Ranks that would wait for each other for ever, or for a rank that never comes."""


def check_orders(logs: Sequence[Sequence[Issued]]) -> None:
    """Check what every rank of a world issued.

    Args:
        logs: of rank 0, 1, …

    Raises:
        CollectiveOrderError: ranks issue different collectives as the same one of a communicator,
            one leaves a collective out, or their orders are a deadlock.
    """
    nodes = [_nodes(log) for log in logs]
    _check_kinds(nodes, logs)
    behind: dict[Node, set[Node]] = {}
    for log, mine in zip(logs, nodes, strict=True):
        for later, node in enumerate(mine):
            behind.setdefault(node, set()).update(_earlier(log, mine, later))
    cycle = _cycle(behind)
    if cycle:
        listed = "\n".join(f"  {node}" for node in cycle)
        raise CollectiveOrderError(
            f"each of these waits for the next, and the last for the first:\n{listed}"
        )


def _nodes(log: Sequence[Issued]) -> list[Node]:
    counts: Counter[Node] = Counter()
    nodes: list[Node] = []
    for call in log:
        members, number = call.group
        key = Node(members=members, number=number)
        nodes.append(replace(key, count=counts[key]))
        counts[key] += 1
    return nodes


def _check_kinds(nodes: Sequence[Sequence[Node]], logs: Sequence[Sequence[Issued]]) -> None:
    kinds: dict[Node, dict[int, str]] = {}
    for rank, (mine, log) in enumerate(zip(nodes, logs, strict=True)):
        for node, call in zip(mine, log, strict=True):
            kinds.setdefault(node, {})[rank] = call.kind
    for node, by_rank in kinds.items():
        absent = [rank for rank in node.members if rank not in by_rank]
        if absent:
            raise CollectiveOrderError(f"ranks {absent} never issue {node}: {by_rank}")
        if len(set(by_rank.values())) > 1:
            raise CollectiveOrderError(f"the ranks disagree on {node}: {by_rank}")


def _earlier(log: Sequence[Issued], mine: Sequence[Node], later: int) -> Iterator[Node]:
    """Yield what this rank must have ended before it begins an operation."""
    new = log[later]
    for place in range(later):
        old = log[place]
        is_queued = old.is_on_device and new.is_on_device
        is_waited = old.waited_at is not None and old.waited_at <= later
        if (is_queued or is_waited) and mine[place] != mine[later]:
            yield mine[place]


def _cycle(behind: Mapping[Node, set[Node]]) -> list[Node]:
    """Return a cycle of the graph, empty without one."""
    done: set[Node] = set()
    for start in behind:
        path: list[Node] = []
        stack = [(start, iter(sorted(behind[start])))] if start not in done else []
        on_path = {start}
        path.append(start)
        while stack:
            node, left = stack[-1]
            following = next(left, None)
            if following is None:
                stack.pop()
                path.pop()
                on_path.discard(node)
                done.add(node)
            elif following in on_path:
                return path[path.index(following) :]
            elif following not in done:
                stack.append((following, iter(sorted(behind[following]))))
                path.append(following)
                on_path.add(following)
    return []
