"""What ranks do in the tests of hierarchical exchanges: two nodes on one machine."""

import os
from collections.abc import Callable, Sequence
from itertools import count

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from moetune.comm.gloo import ReceivesFirst, communicator_of, new_communicator
from moetune.comm.group import Communicator
from moetune.comm.hierarchical import HierarchicalCommunicator, hierarchical_of
from moetune.comm.relay import Relay
from moetune.comm.transfer import Transfer
from moetune.domain.errors import CollectiveError, InputError

NODES = 2
Counts = list[list[int]]


def two_nodes() -> tuple[Communicator, Communicator]:
    flat = communicator_of(None)
    return flat, hierarchical_of(flat, ranks_per_node=flat.num_ranks // NODES)


def sent_between(source: int, target: int, num_rows: int, turn: int = 0) -> torch.Tensor:
    """Return rows that name source, target, place and turn."""
    places = torch.arange(float(num_rows)).unsqueeze(1)
    return torch.cat(
        (places, torch.full((num_rows, 1), 1000.0 * turn + 100.0 * source + target)), dim=1
    )


def relay_of(group: Communicator, counts: Counts, *, is_homeward: bool = False) -> Relay:
    """Return the rows [source][target] that pass through this rank, by the definition.

    A row from s to t passes the rank of t's node with s's place; homeward, it goes from t to s.
    """
    here = group.num_ranks // NODES
    node, place = divmod(group.rank, here)
    return Relay(
        counts=[
            [counts[other * here + place][node * here + local] for local in range(here)]
            for other in range(NODES)
        ],
        is_homeward=is_homeward,
    )


def issue(
    group: Communicator, counts: Counts, turn: int, relay: Relay | None, *, alone: bool
) -> tuple[Transfer, torch.Tensor, torch.Tensor]:
    """Start an exchange of counts[source][target] rows; return transfer, output and what is due."""
    ranks = range(group.num_ranks)
    leaving = [sent_between(group.rank, other, counts[group.rank][other], turn) for other in ranks]
    due = [sent_between(other, group.rank, counts[other][group.rank], turn) for other in ranks]
    output = torch.full((sum(map(len, due)), 2), -1.0)
    transfer = group.all_to_all(
        output, torch.cat(leaving), [*map(len, due)], [*map(len, leaving)], f"exchange {turn}",
        is_alone=alone, relay=relay,
    )  # fmt: skip
    return transfer, output, torch.cat(due)


def exchanges_equal_the_flat_ones() -> None:
    """Draw counts, equally on all ranks; go out, and home with the counts of the way out."""
    flat, group = two_nodes()
    num_ranks = group.num_ranks
    row = st.lists(st.integers(0, 5) | st.just(0), min_size=num_ranks, max_size=num_ranks)

    @seed(7)
    @settings(
        max_examples=20, database=None, deadline=None, derandomize=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(row, min_size=num_ranks, max_size=num_ranks), st.booleans(), st.booleans())
    def check(counts: Counts, alone: bool, told: bool) -> None:  # noqa: FBT001 - drawn
        back = [list(column) for column in zip(*counts, strict=True)]
        home = relay_of(group, counts, is_homeward=True)
        issued = [
            issue(flat, counts, 0, None, alone=alone),
            issue(group, counts, 0, relay_of(group, counts) if told else None, alone=alone),
            issue(group, back, 1, home, alone=alone),
            issue(group, back, 2, None, alone=alone),
        ]
        for transfer, output, due in issued:
            transfer.wait()
            assert torch.equal(output, due)

    check()


def many_are_under_way_both_ways() -> None:
    """Wait in another order than that of issue, as a pipeline's combines are waited for last."""
    _, group = two_nodes()
    ranks = range(group.num_ranks)
    issued = []
    for turn in range(8):
        counts = [[(source + 2 * target + turn) % 4 for target in ranks] for source in ranks]
        is_homeward = turn in {3, 5, 6}
        out = [list(column) for column in zip(*counts, strict=True)] if is_homeward else counts
        relay = relay_of(group, out, is_homeward=is_homeward)
        issued.append(issue(group, counts, turn, relay, alone=turn % 2 == 0))
    for transfer, output, due in reversed(issued):
        future = transfer.future()
        assert future is not None
        future.wait()
        assert torch.equal(output, due)
        transfer.wait()


def equal_parts_and_blocks() -> None:
    _, group = two_nodes()
    ranks = range(group.num_ranks)
    blocks = torch.tensor([[100 * group.rank + other, group.rank] for other in ranks])
    wanted = [[100 * other + group.rank, other] for other in ranks]
    assert group.all_to_all_blocks(blocks, "blocks").tolist() == wanted
    with torch.inference_mode():
        assert group.all_to_all_blocks(blocks.clone(), "blocks").tolist() == wanted
    counts = [[10 * source + target for target in ranks] for source in ranks]
    found = group.relayed_blocks(torch.tensor(counts[group.rank]), "counts")
    assert found is not None
    assert found.tolist() == relay_of(group, counts).counts
    assert communicator_of(None).relayed_blocks(blocks, "none") is None


def other_collectives_are_the_groups() -> None:
    _, group = two_nodes()
    value = torch.tensor([1.0 + group.rank])
    group.all_reduce(value, "a sum").wait()
    assert value.item() == sum(range(1, group.num_ranks + 1))
    assert group.all_gather_object(group.rank, "ranks") == [*range(group.num_ranks)]


def what_cannot_be_is_refused() -> None:
    flat = communicator_of(None)
    for per_node, nodes in ((1, 4), (4, 1)):
        with pytest.raises(
            InputError, match=f"several ranks each, and the group has 4 ranks on {nodes} node"
        ):
            hierarchical_of(flat, ranks_per_node=per_node)
    with pytest.raises(InputError, match="equally many ranks on each node, the group has 3, 1"):
        hierarchical_of(flat, ranks_per_node=3)
    group = hierarchical_of(flat, ranks_per_node=2)
    with pytest.raises(InputError, match="on a CPU or a GPU, not on meta"):
        group.all_to_all(
            torch.empty(4, device="meta"), torch.empty(4, device="meta"), None, None, "it"
        )
    with pytest.raises(InputError, match="the group has 1 ranks on 1 node"):
        hierarchical_of(new_communicator([flat.rank], purpose="one"), ranks_per_node=2)


def a_wrong_size_is_told() -> None:
    _, group = two_nodes()
    rows = torch.zeros(9, 2)
    ones = [1] * group.num_ranks
    relay = Relay(counts=[[1, 1], [1, 1]])
    transfer = group.all_to_all(torch.zeros(3, 2), rows, ones, ones, "dispatch 2 of 4", relay=relay)
    future = transfer.future()
    assert future is not None
    with pytest.raises(CollectiveError) as failure:
        transfer.wait()
    assert str(failure.value).startswith(f"dispatch 2 of 4, across nodes failed on rank {_node()}")
    with pytest.raises(CollectiveError):
        future.wait()


def _node() -> int:
    return communicator_of(None).rank // 2


def a_rank_dies() -> None:
    _, group = two_nodes()
    group.barrier("the start")
    if group.rank == group.num_ranks - 1:
        os._exit(1)
    ones = [[1] * group.num_ranks] * group.num_ranks
    with pytest.raises(CollectiveError, match="a rank died") as failure:
        _exchange_for_ever(group, ones)
    assert "exchange" in str(failure.value)


def _exchange_for_ever(group: Communicator, counts: Counts) -> None:
    for turn in count():
        issue(group, counts, turn, relay_of(group, counts), alone=True)[0].wait()


class Counted:
    """A transfer that notes that it was waited for."""

    def __init__(self, transfer: Transfer, note: Callable[[], None]) -> None:
        self._transfer, self._note = transfer, note

    def wait(self) -> None:
        self._transfer.wait()
        self._note()

    def future(self) -> torch.futures.Future[object] | None:
        return self._transfer.future()


class CountedPair(ReceivesFirst):
    """A level whose transfers are counted when they are issued, and when they were waited for."""

    def __init__(self, level: Communicator, issued: list[str], waited: list[str]) -> None:
        assert isinstance(level, ReceivesFirst)
        super().__init__(level.group)
        self.issued_names, self.waited_names = issued, waited

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
        self.issued_names.append(name)
        transfer = super().all_to_all(
            output, rows, output_splits, input_splits, name, is_alone=is_alone, relay=relay
        )
        return Counted(transfer, lambda: self.waited_names.append(name))


def every_transfer_is_waited_for() -> None:
    flat, found = two_nodes()
    assert isinstance(flat, ReceivesFirst)
    assert isinstance(found, HierarchicalCommunicator)
    issued: list[str] = []
    waited: list[str] = []
    across, inside = (CountedPair(level, issued, waited) for level in found.levels)
    group = HierarchicalCommunicator(flat.group, across=across, inside=inside)
    counts = [[1] * group.num_ranks] * group.num_ranks
    transfers = [
        issue(group, counts, turn, relay_of(group, counts, is_homeward=turn > 1), alone=False)
        for turn in range(4)
    ]
    for transfer, *_ in transfers:
        transfer.wait()
    levels = ("across nodes", "in a node")
    names = [f"exchange {turn}, {level}" for turn in range(4) for level in levels]
    assert sorted(issued) == sorted(waited) == sorted(names)


def every_check_and_a_death() -> None:
    for check in (
        exchanges_equal_the_flat_ones, many_are_under_way_both_ways, equal_parts_and_blocks,
        other_collectives_are_the_groups, every_transfer_is_waited_for, what_cannot_be_is_refused,
        a_wrong_size_is_told, a_rank_dies,
    ):  # fmt: skip
        check()


def exchanges_of_three_ranks_a_node() -> None:
    many_are_under_way_both_ways()
    equal_parts_and_blocks()
    every_transfer_is_waited_for()
