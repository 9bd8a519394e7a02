"""Named models in Megatron's arguments: rotary bases and epsilons that their authors published."""

import pytest

from moetune.domain.target_rules import model_rules
from moetune.domain.targets import find_target
from moetune.export.megatron_model import MegatronModel, megatron_model
from moetune.huggingface.reader import language_model
from moetune.huggingface.registry import model_names, named_model

NEWEST = find_target("megatron")
UNKNOWN = {"hunyuan-a13b", "kimi-k2.5", "ling-flash-2.0", "mixtral-8x22b", "qwen3.5-122b-a10b",
           "qwen3.6-27b", "qwen3.8-27b"}  # fmt: skip
"""Models whose rotary base is in no source that was read."""


def described(name: str, **changes: object) -> MegatronModel:
    model = named_model(name)
    config = {**language_model(model.config)[0], **changes}
    assert NEWEST.core is not None
    return megatron_model(model.decoder, NEWEST.core, config, 4096)


def test_the_rotary_base_of_named_models_is_known() -> None:
    names = (
        name for name in model_names() if not [*model_rules(named_model(name).decoder, NEWEST)]
    )
    assert {name for name in names if "--rotary-base" in str(described(name).notes)} == UNKNOWN


@pytest.mark.parametrize(("name", "base", "percent", "epsilon"), [
    ("llama-3-8b", 500_000, None, 1e-5), ("qwen3-30b-a3b", 1_000_000, None, 1e-6),
    ("glm-4.5", 1_000_000, 0.5, 1e-5), ("minimax-m2", 5_000_000, 0.5, 1e-6),
    ("qwen3.5-35b-a3b", 10_000_000, 0.25, 1e-6), ("qwen3-omni-30b-a3b", 1_000_000, None, 1e-6),
    ("nemotron-4-15b", 10_000, 0.5, 1e-5), ("nemotron-3-nano", None, None, 1e-5),
    ("gpt-oss-20b", 150_000, None, 1e-5),
])  # fmt: skip
def test_positions_and_norms_are_those_of_its_authors(
    name: str, base: int | None, percent: float | None, epsilon: float
) -> None:
    model = described(name)
    assert model.flags.get("rotary_base") == base
    assert model.flags.get("rotary_percent") == percent
    assert model.fields["layernorm_epsilon"] == epsilon


def test_stretched_rotary_embeddings_have_arguments_or_are_said() -> None:
    latent = described("deepseek-v3")
    assert latent.fields["rotary_scaling_factor"] == 40
    assert latent.fields["mscale_all_dim"] == 1
    llama = described("llama-3-8b", rope_scaling={"rope_type": "llama3", "factor": 8.0})
    assert llama.flags["use_rope_scaling"] is True
    assert llama.flags["rope_scaling_factor"] == 8
    for name, kind in (("qwen3-8b", "yarn"), ("hunyuan-a13b", "dynamic")):
        other = described(name, rope_scaling={"type": kind, "factor": 4.0})
        assert f"the {kind} scaling of the rotary embedding" in other.notes
