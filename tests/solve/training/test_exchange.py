"""Nodes that a token reaches, against routing that is drawn."""

import numpy as np
import pytest

from moetune.domain.reference import TransferPhase
from moetune.domain.training import FoldedLayout
from moetune.huggingface.registry import named_model
from moetune.solve.training.exchange import exchange_seconds, reached_nodes
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.training_prices import device_prices


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


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_rows_to_shards_travel_in_one_exchange_over_all_ranks(
    phase: TransferPhase,
) -> None:
    device = device_prices(load_profile_file(bundled_profiles()["h100-x8"]))
    part = named_model("qwen3-30b-a3b").decoder.blocks[-1].routed
    assert part is not None

    def seconds(tokens: float, ep: int, etp: int, *, shards_are_experts: bool) -> float:
        layout = FoldedLayout(dp=64, ep=ep, etp=etp)
        return exchange_seconds(
            device, layout=layout, part=part, tokens=tokens, phase=phase,
            shards_are_experts=shards_are_experts,
        )  # fmt: skip

    for ep, etp in ((8, 1), (8, 2), (1, 4), (2, 4)):
        whole = seconds(4096 * etp, ep * etp, 1, shards_are_experts=False)
        assert seconds(4096, ep, etp, shards_are_experts=True) == pytest.approx(whole)
    gathered = seconds(4096, 8, 2, shards_are_experts=False)
    assert gathered != pytest.approx(seconds(4096, 8, 2, shards_are_experts=True))
