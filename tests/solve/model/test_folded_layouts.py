"""Folded layouts: their rules, and the parameters that they leave on a device."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from moetune.domain.errors import InputError
from moetune.domain.pipeline import Schedule, rank_of_stage, read_stages
from moetune.domain.rules import broken_rules, check_layout
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.huggingface.registry import named_model
from moetune.solve.model.pipeline import DecoderStages, balanced_stages

QWEN = named_model("qwen3-30b-a3b").decoder
DEEPSEEK = named_model("deepseek-v3").decoder
JOB = TrainingJob(decoder=QWEN, world_size=16, global_batch=64, length=4096)


def test_experts_may_exceed_and_cross_the_replicas() -> None:
    for layout in (
        FoldedLayout(dp=2, tp=8, ep=16),
        FoldedLayout(dp=4, tp=2, cp=2, ep=8, etp=2),
        FoldedLayout(dp=2, tp=2, pp=4, ep=4),
    ):
        assert list(broken_rules(layout, JOB)) == []
        assert layout.edp * layout.ep * layout.etp * layout.pp == JOB.world_size


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        (FoldedLayout(dp=3, tp=4), "is not world_size"),
        (FoldedLayout(dp=16, ep=32), "ep·etp"),
        (FoldedLayout(dp=2, tp=8, ep=16, etp=2), "ep·etp"),
        (FoldedLayout(dp=1, pp=16, vpp=4), "larger than the 48 layers"),
        (FoldedLayout(dp=16, vpp=2), "needs a pipeline"),
        (FoldedLayout(dp=16, micro_batch=8), "does not divide global_batch"),
        (FoldedLayout(dp=16, offload_activations=0.99), "is no share below all of 48 layers"),
        (FoldedLayout(dp=16, recompute=("norm", "selective")), "goes with no other"),
        (FoldedLayout(dp=4, pp=4, vpp=2, micro_batch=8), "do not divide by pp"),
        (FoldedLayout(dp=1, tp=16, ep=16, etp=1), None),
    ],
)
def test_a_broken_rule_names_the_sizes(layout: FoldedLayout, what: str | None) -> None:
    if what is None:
        check_layout(layout, JOB)
        return
    with pytest.raises(InputError, match=what):
        check_layout(layout, JOB)


@pytest.mark.parametrize("decoder", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_the_devices_hold_the_model_once(decoder: object) -> None:
    assert decoder in (QWEN, DEEPSEEK)
    model = DEEPSEEK if decoder is DEEPSEEK else QWEN
    for tp, pp, vpp, ep in itertools.product((1, 2), (1, 4), (1, 2), (1, 8)):
        if vpp > pp:
            continue
        layout = FoldedLayout(dp=8, tp=tp, pp=pp, vpp=vpp, ep=ep)
        total = 0.0
        for rank in DecoderStages(model).ranks(layout):
            dense, experts = DecoderStages(model).parameters(layout, rank)
            replicated = sum(
                count * (kind.parameters.router + kind.parameters.norms) * (1 - 1 / tp)
                for count, kind in zip(rank.counts, model.kinds, strict=True)
            )
            total += len(rank.ranks) * ((dense - replicated) * tp + experts * ep)
        expected = model.parameters.total + model.prediction_parameters
        assert total == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("layout", "name", "what"),
    [
        (FoldedLayout(dp=16, ep=3), "qwen3-30b-a3b", "num_experts"),
        (FoldedLayout(dp=8, tp=2, etp=2), "llama-3-8b", "dense"),
        (FoldedLayout(dp=16, etp=16, ep=1), "deepseek-v2-lite", None),
        (FoldedLayout(dp=1, tp=16), "qwen2-57b-a14b", "num_heads"),
        (FoldedLayout(dp=2, cp=8, ep=1), "qwen3-30b-a3b", "cp·tp"),
    ],
)
def test_rules_of_the_model_name_its_sizes(
    layout: FoldedLayout, name: str, what: str | None
) -> None:
    job = TrainingJob(
        decoder=named_model(name).decoder, world_size=16, global_batch=64,
        length=4097 if layout.cp > 1 else 4096,
    )  # fmt: skip
    broken = [rule.what for rule in broken_rules(layout, job)]
    if what is None:
        assert broken == []
    else:
        assert any(what in text for text in broken)
    assert layout.world_size == 16


def test_a_rank_of_context_parallelism_has_two_chunks_of_a_sequence() -> None:
    odd = replace(JOB, length=4098)
    [broken] = broken_rules(FoldedLayout(dp=8, cp=2), odd)
    assert "2·cp (4)" in broken.what
    assert list(broken_rules(FoldedLayout(dp=8, cp=2), JOB)) == []
    assert list(broken_rules(FoldedLayout(dp=8, tp=2), odd)) == []


def test_only_modules_that_the_model_has_are_recomputed() -> None:
    layout = FoldedLayout(dp=16, recompute=("moe_act", "mla_up_proj", "shared_experts"))
    broken = [rule.what for rule in broken_rules(layout, JOB)]
    assert len(broken) == 2
    assert all("to recompute" in text for text in broken)
    assert list(broken_rules(layout, replace(JOB, decoder=DEEPSEEK))) == []
    assert "mla_up_proj" not in QWEN.modules
    assert "mlp" in DEEPSEEK.modules


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        (FoldedLayout(dp=16, schedule="zero_bubble"), "zero_bubble needs a pipeline"),
        (FoldedLayout(dp=16, stages=("E" + "t" * 48 + "L",)), "stages need a pipeline"),
        (FoldedLayout(dp=8, pp=2, vpp=2, schedule="1f1b"), "one stage a rank"),
        (FoldedLayout(dp=8, pp=2, schedule="interleaved"), "several stages"),
        (FoldedLayout(dp=8, pp=2, schedule="dualpipe_v"), "two stages"),
        (FoldedLayout(dp=8, pp=2, vpp=3, schedule="zero_bubble_v"), "two stages"),
        (FoldedLayout(dp=4, pp=4, schedule="zero_bubble", micro_batch=8), "do not divide by pp"),
        (FoldedLayout(dp=4, pp=4, vpp=2, schedule="dualpipe_v", micro_batch=4), "fewer than the 8"),
        (FoldedLayout(dp=8, pp=2, stages=read_stages("Et*24|t*12|t*12L")), "3 stages are given"),
        (FoldedLayout(dp=8, pp=2, stages=read_stages("Et*24|t*23L")), "number 47"),
        (FoldedLayout(dp=8, pp=2, schedule="zero_bubble"), None),
        (FoldedLayout(dp=4, pp=4, vpp=2, schedule="dualpipe_v"), None),
        (FoldedLayout(dp=8, pp=2, stages=read_stages("Et*28|t*20L")), None),
    ],
)
def test_schedules_have_their_stages_and_micro_batches(
    layout: FoldedLayout, what: str | None
) -> None:
    broken = next(broken_rules(layout, JOB), None)
    assert (broken is None) == (what is None)
    if broken is not None and what is not None:
        assert what in broken.what
        assert broken.hint


def test_ranks_have_the_blocks_of_their_stages() -> None:
    letters = read_stages("Ettt|(tt|)*5t*20|t*28L")
    layout = FoldedLayout(dp=4, pp=4, vpp=2, stages=letters)
    assert sum(word.count("t") for word in letters) == 61
    looped = DecoderStages(DEEPSEEK).ranks(layout)
    assert [sum(rank.counts) for rank in looped] == [5, 4, 22, 30]
    assert [rank.has_head for rank in looped] == [False, False, False, True]
    there = DecoderStages(DEEPSEEK).ranks(replace(layout, schedule="zero_bubble_v"))
    assert [(sum(rank.counts), rank.ranks) for rank in there] == [
        (31, (0,)), (22, (1,)), (4, (2, 3)),
    ]  # fmt: skip
    assert there[0].has_embedding
    assert there[0].has_head


def test_predictions_are_where_their_letters_are() -> None:
    apart = FoldedLayout(dp=8, pp=4, stages=read_stages("Et*20|t*20|t*21m|L"))
    [*_, third, last] = DecoderStages(DEEPSEEK).ranks(apart)
    assert third.has_predictions
    assert not last.has_predictions
    assert sum(last.counts) == 0
    dense, experts = DecoderStages(DEEPSEEK).parameters(apart, last)
    assert (dense, experts) == (DEEPSEEK.vocab_size * DEEPSEEK.d_model, 0)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble_v"])
def test_no_other_cut_is_more_even(schedule: Schedule) -> None:
    model = replace(QWEN, blocks=QWEN.blocks[:9])
    vpp = 1 if schedule == "1f1b" else 2
    layout = FoldedLayout(pp=3, vpp=vpp, schedule=schedule)
    seconds = {"block_seconds": 1.0, "embedding_seconds": 0.2, "head_seconds": 2.5}

    def busiest(sizes: Sequence[int]) -> float:
        busy = [0.0, 0.0, 0.0]
        for stage, size in enumerate(sizes):
            busy[rank_of_stage(stage, 3, schedule)] += size
        busy[0] += 0.2
        busy[rank_of_stage(3 * vpp - 1, 3, schedule)] += 2.5
        return max(busy)

    counts = [word.count("t") for word in balanced_stages(model, layout, **seconds)]
    every = (
        sizes
        for sizes in itertools.product(range(10), repeat=3 * vpp)
        if sum(sizes) == 9 and all(sizes[1:-1])
    )
    assert sum(counts) == 9
    assert busiest(counts) == pytest.approx(min(map(busiest, every)))
