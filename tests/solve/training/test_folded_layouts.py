"""Folded layouts: their rules, and the parameters that they leave on a device."""

import itertools
from dataclasses import replace

import pytest

from moetune.domain.errors import InputError
from moetune.domain.pipeline import stage_sizes
from moetune.domain.training import (
    FoldedLayout,
    TrainingJob,
    broken_rules,
    check_layout,
)
from moetune.huggingface.registry import named_model
from moetune.solve.training.stages import DecoderStages
from moetune.solve.training.step import rank_parameters

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
        (FoldedLayout(dp=3, tp=4), "does not divide world_size"),
        (FoldedLayout(dp=16, ep=32), "ep·etp"),
        (FoldedLayout(dp=2, tp=8, ep=16, etp=2), "ep·etp"),
        (FoldedLayout(dp=1, pp=16, vpp=4), "larger than the 48 layers"),
        (FoldedLayout(dp=16, vpp=2), "needs a pipeline"),
        (FoldedLayout(dp=16, micro_batch=8), "does not divide global_batch"),
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


@pytest.mark.parametrize(
    ("num_layers", "num_stages"), [(61, 16), (61, 4), (94, 32), (48, 48), (7, 1)]
)
def test_stages_have_all_layers_and_the_last_has_the_fewest(
    num_layers: int, num_stages: int
) -> None:
    sizes = stage_sizes(num_layers, num_stages)
    assert sum(sizes) == num_layers
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


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
            dense, experts = rank_parameters(model, layout, rank)
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
    broken = [one.what for one in broken_rules(layout, job)]
    if what is None:
        assert broken == []
    else:
        assert any(what in one for one in broken)
    assert layout.world_size == 16


def test_only_modules_that_the_model_has_are_recomputed() -> None:
    layout = FoldedLayout(dp=16, recompute=("moe_act", "mla_up_proj", "shared_experts"))
    broken = [one.what for one in broken_rules(layout, JOB)]
    assert len(broken) == 2
    assert all("to recompute" in one for one in broken)
    assert list(broken_rules(layout, replace(JOB, decoder=DEEPSEEK))) == []
    assert "mla_up_proj" not in QWEN.modules
    assert "mlp" in DEEPSEEK.modules


def test_all_broken_rules_are_named() -> None:
    wrong = FoldedLayout(dp=5, etp=5)
    broken = list(broken_rules(wrong, replace(JOB, world_size=5, global_batch=6)))
    assert [one.what.split(" (")[0] for one in broken] == ["the experts' width", "micro_batch·dp"]
    assert len(list(broken_rules(FoldedLayout(dp=3, tp=3), JOB))) > 1
