"""All-to-alls in two steps: across the nodes, and inside each of them (hierarchical).

Between N nodes of L ranks a flat exchange sends N·L - L messages a rank over the network, each of
1/(N·L) of its rows. In two steps they are N - 1, each L times as large: rows for any rank of a node
go to that rank of the node which has the sender's place, and from there on to their target. Small
messages are faster by it; large ones pass through one rank more, which takes time inside the node.

    outward (a dispatch)    rank (s, i) → (t, i) across the nodes → (t, j) inside the node
    homeward (a combine)    rank (t, j) → (t, i) inside the node  → (s, i) across the nodes

So the network carries what a rank's own tokens need, however uneven the experts' loads are, and a
popular expert's rows arrive over all links of its node; inside the node, then across (Tutel's 2DH)
would bring them all over the link of one rank. DeepEP takes this way, too.

The steps of successive exchanges overlap, on gloo by threads and on NCCL by streams: see `steps`.

Source: Tutel §3.4 (2DH, arXiv 2206.03382); DeepSpeed-MoE §5.3 (hierarchical all-to-all).
"""

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import chain

import torch
import torch.distributed as dist

from moetune.comm.agree import few_values
from moetune.comm.gloo import ReceivesFirst, new_communicator
from moetune.comm.group import Communicator
from moetune.comm.process_group import GroupCommunicator
from moetune.comm.relay import Counts, Relay, columns
from moetune.comm.steps import Exchange, ExchangeStep, OnStreams, OnThreads
from moetune.comm.transfer import Transfer
from moetune.domain.errors import InputError


class HierarchicalCommunicator(ReceivesFirst):
    """A group whose all-to-alls travel in two steps; all else is as in the group.

    Args:
        group: rank r is rank r mod L of node r // L.
        across: of the ranks with this one's place in their nodes, in the order of the nodes.
        inside: of the ranks of this one's node, in their order.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, across: Communicator, inside: Communicator
    ) -> None:
        super().__init__(group)
        self._across, self._inside = across, inside
        self._streams: dict[torch.device, OnStreams] = {}

    @property
    def levels(self) -> tuple[Communicator, Communicator]:
        """The groups across the nodes and inside this one's."""
        return self._across, self._inside

    @cached_property
    def _threads(self) -> OnThreads:
        return OnThreads(self._across, self._inside)

    def _carrier(self, device: torch.device) -> OnThreads | OnStreams:
        if device.type != "cuda":
            return self._threads
        if device not in self._streams:
            self._streams[device] = OnStreams(self._across, self._inside, device=device)
        return self._streams[device]

    def relayed_blocks(self, blocks: torch.Tensor, name: str) -> torch.Tensor:
        """Return the blocks that pass through this rank on their way out; blocking.

        Args:
            blocks: (num_ranks, …), one for each rank.

        Returns:
            (nodes, ranks of a node, …): from the rank with this one's place in each node, to each
            rank of this node.
        """
        by_node = blocks.unflatten(0, (self._across.num_ranks, self._inside.num_ranks))
        exchange = partial(self._across.all_to_all_blocks, by_node, name)
        return self._carrier(blocks.device).in_order(self._across, exchange)

    def all_to_all(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        name: str,
        *,
        is_alone: bool = False,
        relay: Relay | None = None,
    ) -> Transfer:
        """Start one exchange in two steps.

        Args:
            relay: rows that pass through this rank. Without it the exchange is outward, and the
                ranks tell each other first, which blocks, unless all parts are equal.

        Raises:
            InputError: the rows are neither on a CPU nor on a GPU.
        """
        if rows.device.type not in {"cpu", "cuda"}:
            raise InputError(
                f"a hierarchical exchange is of rows on a CPU or a GPU, not on {rows.device}",
                "take a plan with the flat dispatcher",
            )
        give, take = self._by_node(input_splits, rows), self._by_node(output_splits, output)
        if relay is None:
            relay = Relay(counts=give if input_splits is None else self._counts(give, rows, name))
        first, second = self._steps(give, take, relay, name, is_alone=is_alone)
        exchange = Exchange(
            output=output, rows=rows, first=first, second=second, is_homeward=relay.is_homeward
        )
        return self._carrier(rows.device).start(exchange, name, self._group_rank)

    def _steps(
        self, give: Counts, take: Counts, relay: Relay, name: str, *, is_alone: bool
    ) -> tuple[ExchangeStep, ExchangeStep]:
        across = partial(
            ExchangeStep, level=self._across, name=f"{name}, across nodes", is_alone=is_alone
        )
        inside = partial(
            ExchangeStep, level=self._inside, name=f"{name}, in a node", is_alone=is_alone
        )
        passing = columns(relay.counts)
        if relay.is_homeward:
            first = inside(give=columns(give), take=passing)
            return first, across(give=relay.counts, take=take)
        first = across(give=give, take=relay.counts)
        return first, inside(give=passing, take=columns(take))

    def _by_node(self, splits: Sequence[int] | None, rows: torch.Tensor) -> Counts:
        equal = [len(rows) // self.num_ranks] * self.num_ranks
        flat, here = equal if splits is None else splits, self._inside.num_ranks
        return tuple(tuple(flat[low : low + here]) for low in range(0, self.num_ranks, here))

    def _counts(self, give: Counts, rows: torch.Tensor, name: str) -> Counts:
        mine = few_values([*chain.from_iterable(give)], rows.device)
        counts: Counts = self.relayed_blocks(mine, f"{name}: rows that pass through").tolist()
        return counts


def hierarchical_of(communicator: Communicator, *, ranks_per_node: int) -> Communicator:
    """Make a hierarchical communicator of a group; all its members call this together.

    Args:
        ranks_per_node: consecutive ranks of the world that a node has.

    Raises:
        InputError: the group has not several ranks on each of several nodes.
    """
    nodes = _nodes(communicator.members, ranks_per_node)
    if not isinstance(communicator, GroupCommunicator) or len(nodes) == 1 or len(nodes[0]) == 1:
        raise InputError(
            "a hierarchical exchange needs several nodes with several ranks each, and the group "
            f"has {communicator.num_ranks} ranks on {len(nodes)} "
            f"node{'s' if len(nodes) > 1 else ''} of {ranks_per_node}",
            "take a plan with the flat dispatcher",
        )
    node, place = divmod(communicator.rank, len(nodes[0]))
    across = [members[place] for members in nodes]
    return HierarchicalCommunicator(
        communicator.group,
        across=new_communicator(across, purpose="exchange across nodes"),
        inside=new_communicator(nodes[node], purpose="exchange inside nodes"),
    )


def can_relay(members: Sequence[int], *, ranks_per_node: int) -> bool:
    """Return whether `hierarchical_of` can make a communicator of these ranks of a group."""
    try:
        nodes = _nodes(members, ranks_per_node)
    except InputError:
        return False
    return len(nodes) > 1 and len(nodes[0]) > 1


def _nodes(members: Sequence[int], ranks_per_node: int) -> list[list[int]]:
    """Return the group's ranks in the world on each node.

    Raises:
        InputError: the nodes have not equally many of them, one node after the other.
    """
    found: dict[int, list[int]] = {}
    for rank in members:
        found.setdefault(rank // ranks_per_node, []).append(rank)
    nodes = [found[node] for node in sorted(found)]
    if list(members) != sorted(members):
        raise InputError(f"the ranks {list(members)} of the group are not in ascending order")
    if len({len(ranks) for ranks in nodes}) > 1:
        sizes = ", ".join(str(len(ranks)) for ranks in nodes)
        raise InputError(
            f"a hierarchical exchange needs equally many ranks on each node, the group has {sizes}",
            "take a plan with the flat dispatcher",
        )
    return nodes
