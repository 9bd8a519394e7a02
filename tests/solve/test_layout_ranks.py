"""Groups of ranks lie on the nodes where the ranks' coordinates put them."""

import math

import pytest

from moetune.domain.constraints import LayoutPins
from moetune.domain.layer import LayerShape
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.solve.layout.space import find_layouts, whole_batch
from moetune.solve.model.groups import Group, groups_of

MODEL = Transformer(
    moe=LayerShape(d_model=16, d_hidden=48, num_experts=12), num_layers=6, num_heads=4,
    length=4, vocab_size=8,
)  # fmt: skip


def most_nodes(groups: list[list[int]], per_node: int) -> Group:
    size = len(groups[0])
    nodes = max(len({rank // per_node for rank in group}) for group in groups)
    return Group(size=size, num_nodes=0 if nodes <= math.ceil(size / per_node) else nodes)


@pytest.mark.parametrize(("world_size", "per_node"), [(24, 4), (24, 8), (16, 2), (12, 3), (8, 1)])
def test_groups_lie_where_the_ranks_coordinates_put_them(world_size: int, per_node: int) -> None:
    batch = whole_batch(model=MODEL, tokens_per_rank=16, world_size=world_size)
    layouts = find_layouts(model=MODEL, world_size=world_size, batch=batch, pins=LayoutPins())
    assert len(layouts) > 10
    for layout in layouts:
        dp, tp, pp, ep = layout.dp, layout.tp, layout.pp, layout.ep
        rank = {
            (stage, replica, column): (stage * dp + replica) * tp + column
            for stage in range(pp)
            for replica in range(dp)
            for column in range(tp)
        }
        assert sorted(rank.values()) == list(range(world_size))
        stages, columns = range(pp), range(tp)
        found = groups_of(layout, per_node=per_node)
        assert found.tensor == most_nodes(
            [[rank[s, r, c] for c in columns] for s in stages for r in range(dp)], per_node
        )
        assert found.data == most_nodes(
            [[rank[s, r, c] for r in range(dp)] for s in stages for c in columns], per_node
        )
        if layout.expert_parallel == "tensor":
            assert found.experts == found.tensor
        else:
            assert found.experts == most_nodes(
                [
                    [rank[s, first + r, c] for r in range(ep)]
                    for s in stages for c in columns for first in range(0, dp, ep)
                ],
                per_node,
            )  # fmt: skip
        assert found.replicas == most_nodes(
            [
                [rank[s, r, c] for r in range(first, dp, ep)]
                for s in stages for c in columns for first in range(ep)
            ],
            per_node,
        )  # fmt: skip
        hops = [
            most_nodes(
                [[rank[s, r, c], rank[s + 1, r, c]] for r in range(dp) for c in columns], per_node
            )
            for s in range(pp - 1)
        ]
        if dp * tp == 1 and per_node > 1:
            hops = [Group(size=pp) if hop.num_nodes else hop for hop in hops]
        assert list(found.hops) == hops


def test_a_stage_smaller_than_a_node_hops_over_the_wire_only_where_a_node_ends() -> None:
    layout = Layout(expert_parallel="all_to_all", dp=1, ep=1, tp=2, pp=4)
    across = [hop.num_nodes for hop in groups_of(layout, per_node=4).hops]
    assert across == [0, 2, 0]
