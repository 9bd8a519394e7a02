"""Rules of torchtitan, transformers and DeepSpeed: what each refuses, by name and with its file.

What transformers has is asked of its classes; the others judge in `tests/launch`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moetune.domain.target_rules import model_rules, target_rules
from moetune.domain.targets import find_target
from moetune.domain.torchtitan_rules import RECIPES, recipe_of
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.transformers_rules import (
    ABSENT,
    AUTOEP,
    AUTOTP,
    CUTS_ATTENTION,
    NO_CAUSAL_CLASS,
    READS_IN_PARTS,
    WITHOUT_EXPERT_PLAN,
)
from moetune.huggingface.families import FAMILIES
from moetune.huggingface.registry import named_model

HEADS = re.compile(r"\.(k_proj|kv_b_proj)$")
MIXERS = re.compile(r"attn|attention|mixer(?!\.experts)")


def broken(target: str, model: str, layout: Mapping[str, Any], **job: Any) -> str:
    decoder = named_model(model).decoder
    given = {"dp": 64, "zero": 3, "ep": 8, **layout}
    sizes = FoldedLayout(**given)
    asked = {"world_size": sizes.world_size, "global_batch": 1024, "length": 4096, **job}
    rules = target_rules(sizes, find_target(target), TrainingJob(decoder=decoder, **asked))
    return "; ".join(rule.what for rule in rules)


@pytest.mark.parametrize(
    ("model", "layout", "job", "words"),
    [
        ("qwen3-30b-a3b", {"tp": 8}, {}, "tp 8 with 4 key heads"),
        ("qwen3.5-35b-a3b", {"cp": 2}, {}, "cp 2 of qwen3_5"),
        ("moonlight", {"cp": 2}, {}, "cp 2 of kimi_k2_7"),
        ("qwen3-30b-a3b", {}, {"length": 131_072}, "30B-A3B embeds 40960"),
        ("llama-3-8b", {"ep": 1, "cp": 4}, {"length": 4352}, "which 128·cp (512)"),
        ("llama-3-8b", {"ep": 1, "cp": 4, "tp": 4}, {"length": 4112}, "which 2·cp·tp (32)"),
        ("qwen3-30b-a3b", {"ep": 1, "dispatcher": "deepep"}, {}, "deepep with ep 1"),
        ("qwen3-30b-a3b", {"ep": 1, "tp": 4}, {}, "tp 4 with ep 1: it cuts the experts"),
        ("gpt-oss-20b", {"dp": 512, "ep": 4}, {}, "experts in 128 shards, which the width 2880"),
        ("qwen3-0.6b", {"ep": 1, "pp": 2, "zero": 2}, {}, "an embedding that is the head"),
        ("qwen3-8b", {"ep": 1, "pp": 4, "zero": 2}, {"global_batch": 128}, "2 micro-batches in 4"),
        ("qwen3-30b-a3b", {"dispatcher": "deepep"}, {"dtype": "mxfp8"}, "deepep with mxfp8"),
    ],
)
def test_torchtitan_refuses(
    model: str, layout: dict[str, Any], job: dict[str, Any], words: str
) -> None:
    assert words in broken("torchtitan", model, layout, **job)


def test_torchtitan_refuses_delta_nets_that_tp_does_not_divide() -> None:
    assert "delta nets of 16 key and" in broken("torchtitan", "qwen3.5-35b-a3b", {"tp": 32})


def test_what_torchtitan_runs_breaks_no_rule() -> None:
    assert not broken("torchtitan", "qwen3-30b-a3b", {"tp": 4, "cp": 2})
    assert not broken("torchtitan", "gpt-oss-20b", {"dp": 256, "ep": 32})
    assert not broken("torchtitan", "deepseek-v3", {"pp": 8, "zero": 2})


def test_a_recipe_is_of_sizes_and_not_of_names() -> None:
    decoder = named_model("qwen3-30b-a3b").decoder
    found = recipe_of(replace(decoder, name="mine", family="other"))
    assert found is not None
    assert (found.flavor, found.function) == ("30B-A3B", "qwen3_30b_a3b")
    assert recipe_of(replace(decoder, vocab_size=1000)) is None
    assert len({(recipe.family, recipe.flavor) for recipe in RECIPES}) == len(RECIPES)


@pytest.mark.parametrize(
    ("target", "model", "words"),
    [
        ("torchtitan", "mixtral-8x7b", "no recipe of these sizes"),
        ("transformers", "kimi-k2", "has no class for kimi_k2"),
        ("deepspeed", "kimi-k2", "has no class for kimi_k2"),
    ],
)
def test_a_model_that_a_runtime_lacks_is_refused(target: str, model: str, words: str) -> None:
    [rule] = model_rules(named_model(model).decoder, find_target(target))
    assert words in rule.what
    assert rule.hint
    assert not [*model_rules(named_model("qwen3-30b-a3b").decoder, find_target(target))]


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("qwen3-30b-a3b", {"tp": 8}, "tp 8 with 4 key heads"),
        ("deepseek-v3", {"tp": 2}, "tensor plan of deepseek_v3 leaves attention whole"),
        ("qwen3-30b-a3b", {"tp": 2, "ep": 1}, "its tensor plan cuts the experts"),
        ("llama-4-scout", {}, "expert plan of llama4_text is empty"),
        ("kimi-linear-48b-a3b", {}, "convolutions of kimi_linear load in another order"),
    ],
)
def test_transformers_refuses(model: str, layout: dict[str, Any], words: str) -> None:
    assert words in broken("transformers", model, layout)
    assert not broken("transformers", "qwen3-30b-a3b", {"tp": 2, "ep": 4})


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("olmoe", {}, "AutoEP has no preset for olmoe"),
        ("deepseek-v3", {"tp": 2}, "AutoTP does not cut the attention of deepseek_v3"),
        ("qwen3-30b-a3b", {"tp": 2, "ep": 1}, "asks for autoep_size above 1"),
        ("qwen3-30b-a3b", {"tp": 8}, "tp 8 with 4 key heads"),
    ],
)
def test_deepspeed_refuses(model: str, layout: dict[str, Any], words: str) -> None:
    assert words in broken("deepspeed", model, layout)
    assert not broken("deepspeed", "qwen3-30b-a3b", {"tp": 2})


def families() -> list[str]:
    return sorted(FAMILIES)


@pytest.mark.parametrize("family", families())
def test_transformers_has_the_plans_that_rules_name(family: str) -> None:
    assert (family in CONFIG_MAPPING) == (family not in ABSENT)
    if family in ABSENT:
        return
    assert (family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == (family not in NO_CAUSAL_CLASS)
    config = CONFIG_MAPPING[family]().get_text_config()
    tensor = config.base_model_tp_plan or {}
    mixers = {key: style for key, style in tensor.items() if MIXERS.search(key)}
    heads = {style for key, style in mixers.items() if HEADS.search(key)}
    is_cut = heads == {"colwise"} and "colwise_gather_output" not in mixers.values()
    if family in CUTS_ATTENTION:
        assert is_cut
    if family in AUTOTP:
        assert is_cut
    if family in WITHOUT_EXPERT_PLAN:
        assert not config.base_model_ep_plan


@pytest.mark.parametrize("family", families())
def test_weights_that_ranks_would_read_in_another_order_are_refused(family: str) -> None:
    """FSDP cuts the first dimension: three tensors behind each other in it are not three parts."""
    mapping = get_checkpoint_conversion_mapping(family) or []
    alone = [getattr(rule, "operations", None) for rule in mapping]
    is_mixed = any(
        len(steps) == 1 and isinstance(steps[0], Concatenate) and steps[0].dim == 0
        for steps in alone
        if steps
    )
    if family not in ABSENT | NO_CAUSAL_CLASS:
        assert is_mixed == (family in READS_IN_PARTS)


def test_families_with_experts_and_no_plan_for_them_are_all_named() -> None:
    fields = ("num_experts", "num_local_experts", "n_routed_experts")
    without = {
        family
        for family in families()
        if family in CONFIG_MAPPING
        for config in [CONFIG_MAPPING[family]().get_text_config()]
        if any(getattr(config, field, None) for field in fields)
        and not getattr(config, "base_model_ep_plan", None)
    }
    assert without <= WITHOUT_EXPERT_PLAN
    assert set(AUTOEP) <= set(families())


@pytest.mark.parametrize("model", ["qwen3-vl-30b-a3b", "kimi-k3", "nemotron-3-nano-omni"])
def test_transformers_has_no_causal_class_of_some_models_with_towers(model: str) -> None:
    [rule] = model_rules(named_model(model).decoder, find_target("transformers"))
    assert "AutoModelForCausalLM has no class for it" in rule.what
