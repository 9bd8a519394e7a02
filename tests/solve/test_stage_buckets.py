"""Buckets of a stage as plans count them, by hand."""

import pytest

from moetune.domain.buckets import bucket_ends
from moetune.domain.layer import LayerShape
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.solve.model.stage_buckets import StageBucket, stage_buckets
from moetune.solve.model.stages import cut_into_stages

MEBIBYTE = 2**20


@pytest.mark.parametrize(
    ("sizes", "ends"),
    [((), []), ((0.0, 0.0), []), ((1.0, 1.0), [1, 2]), ((0.6, 0.6, 0.3), [2, 3]),
     ((0.0, 2.0, 0.0, 0.5, 0.0), [2, 5]), ((0.2, 0.2), [2]), ((0.0, 3.0, 0.0), [2])],
)  # fmt: skip
def test_a_bucket_ends_with_the_unit_that_makes_it_large_enough(
    sizes: tuple[float, ...], ends: list[int]
) -> None:
    assert bucket_ends([MEBIBYTE * one for one in sizes]) == ends


MODEL = Transformer(
    moe=LayerShape(d_model=128, d_hidden=512, num_experts=4), num_layers=4, num_heads=4,
    length=128, vocab_size=256, moe_every=2,
)  # fmt: skip
BLOCK = MODEL.attention_parameters + 2 * MODEL.norm_parameters
HEAD = 256 * 128 + MODEL.norm_parameters
DENSE = (256 + 128) * 128 + 4 * BLOCK + 2 * (MODEL.ffn_parameters + MODEL.gate_parameters) + HEAD
EXPERTS_EVERYWHERE = Layout(expert_parallel="all_to_all", dp=4, ep=1, tp=1, pp=1)
IN_PARTS = Layout(expert_parallel="tensor", dp=2, ep=1, tp=2, pp=1)
PIPELINE = Layout(expert_parallel="all_to_all", dp=1, ep=1, tp=1, pp=4)


def buckets_of(
    layout: Layout, index: int = 0, parameter_bytes: float = 4
) -> tuple[StageBucket, ...]:
    stage = cut_into_stages(MODEL, layout.pp)[index]
    return stage_buckets(MODEL, layout, index=index, stage=stage, parameter_bytes=parameter_bytes)


def test_experts_have_buckets_of_their_own_beside_those_of_merged_blocks() -> None:
    """Two of all but the experts have a mebibyte; each of two blocks has experts."""
    found = buckets_of(EXPERTS_EVERYWHERE)
    pair = 2 * BLOCK + MODEL.ffn_parameters + MODEL.gate_parameters
    wanted = [
        (0.0, 0, 0.0), (0.25, HEAD, 0.0), (0.5, HEAD, 0.5), (0.75, HEAD + pair, 0.5),
        (1.0, HEAD + pair, 1.0),
    ]  # fmt: skip
    assert [tuple(one) for one in found] == [
        pytest.approx((made, dense / DENSE, experts)) for made, dense, experts in wanted
    ]


def test_parts_of_experts_are_in_the_buckets_of_their_blocks() -> None:
    found = buckets_of(IN_PARTS)
    assert [one.made for one in found] == [0.0, 0.5, 1.0]
    assert [one.experts for one in found] == [0.0, 0.0, 0.5]


def test_a_stage_between_others_has_its_blocks_alone() -> None:
    found = buckets_of(PIPELINE, 1, parameter_bytes=8)
    assert found == (StageBucket(1.0, 0.0, 0.0), StageBucket(1.0, 1.0, 0.0))


def test_small_stages_have_one_bucket() -> None:
    assert buckets_of(EXPERTS_EVERYWHERE, parameter_bytes=0.1) == (
        StageBucket(0.75, 0.0, 0.0), StageBucket(1.0, 0.0, 1.0),
    )  # fmt: skip
