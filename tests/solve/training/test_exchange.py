"""Nodes that a token reaches, against routing that is drawn."""

import numpy as np
import pytest

from moetune.huggingface.registry import named_model
from moetune.solve.training.exchange import reached_nodes


@pytest.mark.parametrize(("name", "nodes"), [("qwen3-30b-a3b", 2), ("qwen3-235b-a22b", 8)])
def test_reached_nodes_are_those_of_drawn_experts(name: str, nodes: int) -> None:
    part = named_model(name).decoder.blocks[-1].routed
    assert part is not None
    rng = np.random.default_rng(0)
    drawn = [
        len(set(rng.integers(part.num_experts, size=part.top_k) * nodes // part.num_experts))
        for _ in range(4000)
    ]
    assert reached_nodes(part, nodes) == pytest.approx(np.mean(drawn), rel=0.02)


def test_groups_limit_the_nodes() -> None:
    part = named_model("deepseek-v3").decoder.blocks[-1].routed
    assert part is not None
    assert part.router.num_groups == 8
    assert reached_nodes(part, 8) <= part.router.top_groups
    assert reached_nodes(part, 1) == 1


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_groups_that_share_a_node_reach_as_many_nodes_as_drawn_routing(nodes: int) -> None:
    part = named_model("deepseek-v3").decoder.blocks[-1].routed
    assert part is not None
    router, rng = part.router, np.random.default_rng(0)
    drawn = []
    for _ in range(2000):
        scores = rng.random((router.num_groups, part.num_experts // router.num_groups))
        best_two = np.sort(scores, axis=1)[:, -2:].sum(axis=1)
        scores[np.argsort(best_two)[: -router.top_groups]] = -1.0
        chosen = np.argsort(scores.ravel())[-part.top_k :]
        drawn.append(len(set(chosen * nodes // part.num_experts)))
    assert reached_nodes(part, nodes) == pytest.approx(np.mean(drawn), rel=0.1)
