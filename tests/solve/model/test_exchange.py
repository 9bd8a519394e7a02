"""Nodes that a token reaches, against drawn routing, and chunks that hosts post, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.reference import TransferPhase
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, TokenDispatcher, TrainingJob
from moetune.fit.costs import costs_of
from moetune.huggingface.registry import named_model
from moetune.solve.model.exchange import posted_chunks, reached_nodes
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.profiled import device_prices
from moetune.solve.model.step import StepPrices


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


INFINIBAND, EFA = (load_profile_file(bundled_profiles()[f"h100-x8{end}"]) for end in ("", "-efa"))
JOB = TrainingJob(
    decoder=named_model("qwen3-30b-a3b").decoder, world_size=64, global_batch=256, length=4096
)


def sent(tokens: int, num_channels: int, num_others: int, chunk: int) -> int:
    """Every channel sends its tokens to every other node, a chunk at a time."""
    messages = 0
    for channel in range(num_channels):
        num = len(range(channel, tokens, num_channels))
        for _ in range(num_others):
            messages += len(range(0, num, chunk))
    return messages


@pytest.mark.parametrize(
    ("phase", "num_ranks", "num_nodes", "chunk"),
    [
        ("dispatch", 16, 2, 20),
        ("combine", 16, 2, 12),
        ("dispatch", 24, 3, 8),
        ("combine", 32, 4, 8),
        ("dispatch", 64, 8, 8),
        ("dispatch", 96, 12, 12),
        ("combine", 160, 20, 8),
    ],
)
@pytest.mark.parametrize("tokens", [10, 200, 2050])
def test_tokens_for_all_nodes_are_sent_in_as_many_chunks_as_counted(
    phase: TransferPhase, num_ranks: int, num_nodes: int, chunk: int, tokens: int
) -> None:
    chunks = posted_chunks(
        phase, num_ranks=num_ranks, num_nodes=num_nodes, tokens=tokens, reach=num_nodes
    )
    assert chunks == sent(tokens, 10, num_nodes - 1, chunk)


def exchange_seconds(layout: FoldedLayout, dispatcher: TokenDispatcher, *, on_efa: bool) -> float:
    profile = EFA if on_efa else INFINIBAND
    prices = StepPrices(
        job=JOB, device=device_prices(profile, costs_of(profile, allow_modelled=True)),
        stages=DecoderStages(JOB.decoder), target=find_target("megatron"),
    )  # fmt: skip
    return prices.step(replace(layout, dispatcher=dispatcher)).parts["exchange"]


def test_only_exchanges_of_deepep_between_nodes_wait_for_posted_chunks() -> None:
    inside, across = FoldedLayout(dp=64, ep=8), FoldedLayout(dp=64, ep=32)
    assert len({exchange_seconds(inside, "deepep", on_efa=efa) for efa in (False, True)}) == 1
    slower = [exchange_seconds(across, "all_to_all", on_efa=efa) for efa in (False, True)]
    assert slower[0] < slower[1] < 1.1 * slower[0]  # by the start-up between nodes alone
    posted = exchange_seconds(across, "deepep", on_efa=True)
    assert posted > 2 * exchange_seconds(across, "deepep", on_efa=False)
    assert posted > exchange_seconds(across, "all_to_all", on_efa=True)
