"""Facts behind the rules of torchtitan, transformers and DeepSpeed.

What transformers has is asked of its classes; the others judge in `tests/launch`.
"""

import re
from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moetune.domain.torch_rules import (
    ABSENT,
    AUTOEP,
    AUTOTP,
    CUTS_ATTENTION,
    NO_CAUSAL_CLASS,
    READS_IN_PARTS,
    RECIPES,
    WITHOUT_EXPERT_PLAN,
    recipe_of,
)
from moetune.huggingface.families import FAMILIES
from moetune.huggingface.registry import named_model

HEADS = re.compile(r"\.(k_proj|kv_b_proj)$")
MIXERS = re.compile(r"attn|attention|mixer(?!\.experts)")


def test_a_recipe_is_of_sizes_and_not_of_names() -> None:
    decoder = named_model("qwen3-30b-a3b").decoder
    recipe = recipe_of(replace(decoder, name="mine", family="other"))
    assert recipe is not None
    assert (recipe.flavor, recipe.function) == ("30B-A3B", "qwen3_30b_a3b")
    assert recipe_of(replace(decoder, vocab_size=1000)) is None
    assert recipe_of(replace(decoder, blocks=decoder.blocks[:-1])) is None
    assert len({(recipe.family, recipe.flavor) for recipe in RECIPES}) == len(RECIPES)


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
