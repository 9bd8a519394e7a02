"""Which groups of ranks there are when nodes have several, and which ranks belong to them."""

from itertools import product

import pytest

from moetune.domain.cluster import Group, Machine, canonical, nodes_of
from moetune.measure.ranks import members, spread_groups

SHAPES = ((4, 2), (8, 2), (8, 4), (16, 4), (32, 8), (12, 6))


def machine_of(num_ranks: int, per_node: int) -> Machine:
    return Machine(
        kind="cpu", device="test", num_devices=num_ranks, devices_per_node=per_node, memory_bytes=1
    )


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def groups_of_layouts(num_ranks: int, per_node: int) -> set[tuple[int, int]]:
    """Return (ranks, nodes) of every group at a stride, in ranks numbered as a mesh, innermost
    tensor parallelism, then experts, then data.
    """
    groups = set()
    for stride in divisors(per_node):
        for size in divisors(num_ranks // stride):
            nodes = {rank // per_node for rank in range(0, size * stride, stride)}
            groups.add((size, len(nodes)))
    return groups


@pytest.mark.parametrize(("num_ranks", "per_node"), SHAPES)
def test_every_group_at_the_stride_of_a_tensor_parallel_width_is_consecutive_or_a_spread(
    num_ranks: int, per_node: int
) -> None:
    machine = machine_of(num_ranks, per_node)
    sizes = [size for size in divisors(num_ranks) if size > 1]
    spreads = spread_groups(sizes, machine)
    measured = {(size, nodes_of((size, 0), machine)) for size in sizes} | set(spreads)
    wanted = {group for group in groups_of_layouts(num_ranks, per_node) if group[0] > 1}
    assert wanted <= measured
    assert len(spreads) == len(set(spreads)) <= len(wanted)


@pytest.mark.parametrize(("num_ranks", "per_node"), SHAPES)
def test_groups_of_a_kind_tile_the_ranks_over_their_nodes(num_ranks: int, per_node: int) -> None:
    machine = machine_of(num_ranks, per_node)
    sizes = [size for size in divisors(num_ranks) if size > 1]
    for group in (*((size, 0) for size in sizes), *spread_groups(sizes, machine)):
        tiles = members(group, num_ranks=num_ranks, ranks_per_node=per_node)
        assert all(len(ranks) == group[0] and list(ranks) == sorted(ranks) for ranks in tiles)
        assert len(set().union(*tiles)) == sum(map(len, tiles))
        if num_ranks // per_node % nodes_of(group, machine) == 0 and group[1]:
            assert sum(map(len, tiles)) == num_ranks
        for ranks, node in product(tiles if group[1] else (), range(num_ranks // per_node)):
            here = [rank for rank in ranks if rank // per_node == node]
            assert len(here) in (0, group[0] // group[1])


def test_four_ranks_on_two_nodes() -> None:
    assert spread_groups((2, 4), machine_of(4, 2)) == ((2, 2),)
    assert members((2, 0), num_ranks=4, ranks_per_node=2) == ((0, 1), (2, 3))
    assert members((2, 2), num_ranks=4, ranks_per_node=2) == ((0, 2), (1, 3))
    assert members((3, 0), num_ranks=4, ranks_per_node=2) == ((0, 1, 2),)


@pytest.mark.parametrize(
    ("group", "same"),
    [((4, 1), (4, 0)), ((16, 2), (16, 0)), ((12, 2), (12, 0)), ((4, 2), (4, 2)), ((2, 0), (2, 0))],
)
def test_a_group_on_as_many_nodes_as_consecutive_ranks_is_theirs(group: Group, same: Group) -> None:
    assert canonical(group, machine_of(32, 8)) == same
