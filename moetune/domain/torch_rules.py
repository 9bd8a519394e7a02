"""Rules of the runtimes around torch's modules: torchtitan, transformers, and DeepSpeed.

The rules were read in torchtitan 0.3.0 with torch 2.13, transformers 5.23 and 5.24, and DeepSpeed
0.19.8, which trains the models of transformers. Messages name files of the runtime's package.

Models of torchtitan are flavors of its `model_registry` (`models/*/__init__.py`), with recipes in
`config_registry.py`. A configuration is a flavor's if layers, width, vocabulary and the number of
parameters are equal; names do not matter. The tensor and expert plans of a family of transformers
are `base_model_tp_plan` and `base_model_ep_plan` of its configuration class.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from moetune.domain.architecture import Decoder
from moetune.domain.rules import Asked, Rule, indivisible
from moetune.domain.training import DEDUPLICATING

ABSENT = frozenset({
    "bailing_moe", "bailing_moe_v2", "deepseek", "grok-1", "kimi_k2", "longcat_flash_ngram", "mimo",
    "minimax_m1", "minimax_m3", "minimax_text_01",
})  # fmt: skip
"""Families without a class in transformers: their configurations name code on the Hub."""
NO_CAUSAL_CLASS = frozenset({
    "glm4v_moe_text", "glm5_next_text", "hy_v4_vl_text", "mistral4", "muse_spark_text",
    "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker",
    "qwen3_vl_moe_text", "qwen3_vl_text", "step3p5", "step3p7",
})  # fmt: skip
"""Families whose configuration `AutoModelForCausalLM` refuses, which the export calls."""
_LOADED_WITH_TOWERS = frozenset({
    "dots3_note_text", "gemma3_text", "gemma4_text", "llama4_text", "qwen3_5_moe_text",
    "qwen3_5_text",
})  # fmt: skip
"""Families that `AutoModelForCausalLM` also loads from a configuration with towers."""
CUTS_ATTENTION = frozenset({
    "llama", "mistral", "nemotron", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe",
    "qwen3_vl_moe_text", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "laguna", "mellum",
    "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "glm4_moe", "glm4v_moe_text",
    "dots1", "exaone_moe", "solar_open", "hy_v3", "mimo_v2_flash", "beam", "ernie4_5_moe",
    "llama4_text", "longcat_flash", "cohere2_moe", "dots3_note_text", "hy_v4", "gemma4_text",
})  # fmt: skip
"""Families whose tensor plan cuts every mixer by heads. Other families leave attention whole on
each rank, or gather the outputs of projections (`colwise_gather_output`)."""
WITHOUT_EXPERT_PLAN = frozenset({"llama4_text", "longcat_flash", "dbrx"})
"""Families with experts whose expert plan is empty."""

READS_IN_PARTS = frozenset({"bailing_hybrid", "kimi_linear"})
"""Families whose convolution is read from three tensors, concatenated in the dimension that FSDP
cuts. A rank reads its part of each tensor, which together are not its part of the concatenation
(`conversion_mapping.py`, `distributed/sharding_utils.py`)."""


AUTOEP: MappingProxyType[str, str] = MappingProxyType({
    "mixtral": "mixtral",
    "qwen2_moe": "qwen3_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "minimax_m3_vl_text": "minimax_m3",
})  # fmt: skip
"""AutoEP's presets by the model's family (`module_inject/auto_ep_presets/`)."""
AUTOTP = frozenset({"llama", "mistral", "nemotron", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"})
"""Families whose heads AutoTP cuts. AutoTP has no gradient of the rotary keys that heads of latent
attention share, and none of delta nets (`module_inject/tp_plan_converter.py`)."""


def key_heads(source: str) -> Rule:
    """Return the rule against numbers of key heads that tp does not divide."""
    return Rule(
        "tp {layout.tp} with {cause[0]} key heads", "--tp {cause[1]}", source,
        lambda asked: indivisible(asked.decoder.kv_head_counts, asked.layout.tp),
    )  # fmt: skip


def _cuts_experts(asked: Asked, families: frozenset[str]) -> bool:
    """Return whether tp also cuts experts, which it does without expert parallelism."""
    has_experts = asked.decoder.num_moe_layers > 0 and asked.decoder.family in families
    return asked.layout.tp > 1 and asked.layout.ep == 1 and has_experts


TRANSFORMERS = (
    Rule("ep {layout.ep}: the expert plan of {decoder.family} is empty", "--ep 1",
         "distributed/mixin.py",
         lambda asked: asked.layout.ep > 1 and asked.decoder.family in WITHOUT_EXPERT_PLAN),
    Rule("dp {layout.dp}: the convolutions of {decoder.family} load in another order",
         "--world-size 1", "distributed/sharding_utils.py",
         lambda asked: asked.layout.dp > 1 and asked.decoder.family in READS_IN_PARTS),
    Rule("tp {layout.tp}: the tensor plan of {decoder.family} leaves attention whole", "--tp 1",
         "configuration class, base_model_tp_plan",
         lambda asked: asked.layout.tp > 1 and asked.decoder.family not in CUTS_ATTENTION),
    Rule("tp {layout.tp} with ep 1: its tensor plan cuts the experts, too",
         "--ep {layout.tp}, or --tp 1", "distributed/mixin.py",
         lambda asked: _cuts_experts(asked, CUTS_ATTENTION)),
    key_heads("distributed/tensor_parallel.py"),
)  # fmt: skip
TRANSFORMERS_MODELS = (
    Rule("{decoder.name}: transformers has no class for {decoder.family}",
         "a model of another family",
         "models/auto/configuration_auto.py", lambda asked: asked.decoder.family in ABSENT),
    Rule("{decoder.name}: AutoModelForCausalLM has no class for it", "a model of text alone",
         "models/auto/modeling_auto.py",
         lambda asked: asked.decoder.family in NO_CAUSAL_CLASS
         or (asked.decoder.uncounted and asked.decoder.family not in _LOADED_WITH_TOWERS
             and asked.decoder.family not in ABSENT)),
)  # fmt: skip
DEEPSPEED = (
    Rule("ep {layout.ep}: AutoEP has no preset for {decoder.family}", "--ep 1",
         "module_inject/auto_ep_presets/registry.py",
         lambda asked: asked.layout.ep > 1 and asked.decoder.family not in AUTOEP),
    Rule("tp {layout.tp}: AutoTP does not cut the attention of {decoder.family}", "--tp 1",
         "module_inject/tp_plan_converter.py",
         lambda asked: asked.layout.tp > 1 and asked.decoder.family not in AUTOTP),
    Rule("tp {layout.tp} with ep 1: AutoEP with AutoTP asks for autoep_size above 1",
         "--ep above 1, or --tp 1", "module_inject/auto_ep_folding.py",
         lambda asked: _cuts_experts(asked, AUTOTP)),
    key_heads("runtime/engine.py"),
    Rule("the optimizer adam-8bit with ep {layout.ep}, whose groups of parameters the engine makes "
         "for its AdamW alone", "--ep 1, or --optimizer adam", "runtime/engine.py",
         lambda asked: asked.layout.ep > 1 and asked.job is not None
         and asked.job.optimizer == "adam-8bit"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model of torchtitan 0.3.0.

    Args:
        family: module of `torchtitan.models`.
        flavor: name in the module's `model_registry`.
        base: module of `torchtitan.models` whose recipe the export changes. That recipe trains by
            AdamW in bfloat16; the flavor's may not (Kimi by Muon, Llama 405B in 8 bits).
        function: the recipe in the base's `config_registry` that is nearest in size.
        num_parameters: parameters of the text model, without towers and multi-token prediction.
        max_length: longest sequence of the flavor's rotary embedding.
        shares_sequence: whether `parallelize.py` supports context parallelism.
        tower: whether there is a vision encoder, in the first stage, or dropped for text alone.
    """

    family: str
    flavor: str
    base: str
    function: str
    num_layers: int
    d_model: int
    vocab_size: int
    num_parameters: int
    max_length: int
    shares_sequence: bool = True
    tower: Literal["none", "kept", "dropped"] = "none"

    def is_of(self, decoder: Decoder) -> bool:
        """Return whether a decoder has the flavor's sizes."""
        return (
            decoder.num_layers == self.num_layers
            and decoder.d_model == self.d_model
            and decoder.vocab_size == self.vocab_size
            and int(decoder.parameters.total) == self.num_parameters
        )


def recipe_of(decoder: Decoder) -> Recipe | None:
    """Return the recipe with a decoder's sizes; None if torchtitan has none."""
    return next((recipe for recipe in RECIPES if recipe.is_of(decoder)), None)


def recipe_names() -> str:
    """Return the flavors of all recipes by family, as text."""
    families = dict.fromkeys(recipe.family for recipe in RECIPES)
    return "; ".join(
        f"{family}: {', '.join(recipe.flavor for recipe in RECIPES if recipe.family == family)}"
        for family in families
    )


_Row: TypeAlias = tuple[str, str, int, int, int]
"""Flavor, function of the base, layers, width and parameters."""


def _family(
    family: str,
    *rows: _Row,
    base: str = "",
    **same: Any,  # noqa: ANN401 - fields of a recipe
) -> Iterator[Recipe]:
    for flavor, function, layers, width, parameters in rows:
        yield Recipe(
            family=family, flavor=flavor, base=base or family, function=function,
            num_layers=layers, d_model=width, num_parameters=parameters, **same,
        )  # fmt: skip


RECIPES: tuple[Recipe, ...] = (
    *_family(
        "llama3",
        ("1B", "llama3_8b", 16, 2048, 1_235_814_400),
        ("3B", "llama3_8b", 28, 3072, 3_212_749_824),
        ("8B", "llama3_8b", 32, 4096, 8_030_261_248),
        ("70B", "llama3_70b", 80, 8192, 70_553_706_496),
        ("405B", "llama3_70b", 126, 16_384, 405_853_388_800),
        vocab_size=128_256, max_length=131_072,
    ),
    *_family(
        "qwen3",
        ("0.6B", "qwen3_0_6b", 28, 1024, 596_049_920),
        ("1.7B", "qwen3_1_7b", 28, 2048, 1_720_574_976),
        ("4B", "qwen3_1_7b", 36, 2560, 4_022_468_096),
        ("8B", "qwen3_14b", 36, 4096, 8_190_735_360),
        ("14B", "qwen3_14b", 40, 5120, 14_768_307_200),
        ("32B", "qwen3_32b", 64, 5120, 32_762_123_264),
        ("30B-A3B", "qwen3_30b_a3b", 48, 2048, 30_532_122_624),
        ("235B-A22B", "qwen3_30b_a3b", 94, 4096, 235_093_634_560),
        vocab_size=151_936, max_length=40_960,
    ),
    *_family(
        "qwen3_5",
        ("0.8B", "qwen35_0_8b", 24, 1024, 1_006_672_704),
        ("2B", "qwen35_2b", 24, 2048, 2_390_384_448),
        ("4B", "qwen35_4b", 32, 2560, 4_841_450_496),
        ("9B", "qwen35_9b", 32, 4096, 8_953_803_264),
        ("27B", "qwen35_27b", 64, 5120, 26_895_998_464),
        ("35B-A3B", "qwen35_35b_a3b", 40, 2048, 34_660_610_688),
        ("122B-A10B", "qwen35_122b_a10b", 48, 3072, 122_111_526_912),
        ("397B-A17B", "qwen35_397b_a17b", 60, 4096, 396_346_350_336),
        vocab_size=248_320, max_length=262_144, shares_sequence=False, tower="kept",
    ),
    *_family("deepseek_v3", ("16B", "deepseek_v3_16b", 27, 2048, 15_706_484_224),
             ("236B", "deepseek_v3_671b", 60, 5120, 235_741_434_880),
             vocab_size=102_400, max_length=16_384),
    *_family("deepseek_v3", ("671B", "deepseek_v3_671b", 61, 7168, 671_026_404_352),
             vocab_size=129_280, max_length=16_384),
    *_family("gpt_oss", ("20b", "gpt_oss_20b", 24, 2880, 20_914_757_184),
             ("120b", "gpt_oss_120b", 36, 2880, 116_829_156_672),
             vocab_size=201_088, max_length=131_072),
    *_family("kimi_k2_7", ("moonlight-16B-A3B", "deepseek_v3_16b", 27, 2048, 15_960_108_544),
             base="deepseek_v3", vocab_size=163_840, max_length=8192, shares_sequence=False,
             tower="dropped"),
    *_family("kimi_k2_7", ("Kimi-K2.5", "deepseek_v3_671b", 61, 7168, 1_026_408_209_408),
             base="deepseek_v3", vocab_size=163_840, max_length=262_144, shares_sequence=False,
             tower="dropped"),
)  # fmt: skip
_MASK_BLOCK = 128
"""Positions of a block of FlexAttention's mask; a rank's part of a sequence has whole blocks."""


def _bound(asked: Asked) -> Recipe | None:
    """Return the recipe if its rotary embedding is shorter than the sequences."""
    recipe, job = recipe_of(asked.decoder), asked.job
    is_bound = recipe is not None and job is not None and job.length > recipe.max_length
    return recipe if is_bound else None


def _keeps_sequence(asked: Asked) -> str | None:
    """Return the family of a recipe that cp cannot share sequences of."""
    recipe = recipe_of(asked.decoder) if asked.layout.cp > 1 else None
    return None if recipe is None or recipe.shares_sequence else recipe.family


def _cutting_unit(asked: Asked, unit: int) -> int | None:
    """Return the unit of positions, under cp, if it does not divide the sequences."""
    return (
        unit if asked.layout.cp > 1 and asked.job is not None and asked.job.length % unit else None
    )


def _odd_width(asked: Asked) -> tuple[int, int] | None:
    """Return the shards of an expert, and its width that they do not divide.

    More shards than experts cut the experts' width, evenly (`distributed/fsdp.py`;
    `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`).
    """
    layer, shards = asked.decoder.layer, asked.layout.stage_ranks // asked.layout.ep
    if not asked.decoder.num_moe_layers or shards * asked.layout.ep <= layer.num_experts:
        return None
    indivisible_width = indivisible((layer.d_hidden, asked.decoder.d_model), shards)
    return None if indivisible_width is None else (shards, indivisible_width[0])


def _few_batches(asked: Asked) -> int | None:
    layout, job = asked.layout, asked.job
    if layout.pp == 1 or layout.order != "1f1b" or job is None:
        return None
    return batches if (batches := job.micro_batches(layout)) < layout.pp else None


TORCHTITAN_MODELS = (
    Rule("{decoder.name}: it has no recipe of these sizes", f"a model of {recipe_names()}",
         "models/*/__init__.py", lambda asked: recipe_of(asked.decoder) is None),
)  # fmt: skip
TORCHTITAN = (
    Rule("sequences of {job.length} tokens: {cause.flavor} embeds {cause.max_length}",
         "--seq {cause.max_length} or less", "models/common/decoder.py", _bound),
    Rule("cp {layout.cp} of {cause}", "--cp 1", "models/{cause}/parallelize.py", _keeps_sequence),
    # Context parallelism cuts FlexAttention's mask by whole blocks (`distributed/context_parallel/
    # api.py`; `torch/distributed/tensor/experimental/_context_parallel/_attention.py`).
    Rule("sequences of {job.length} tokens, which 2·cp·tp ({cause}) does not divide",
         "--cp 1 or another --seq", "trainer.py",
         lambda asked: _cutting_unit(asked, 2 * asked.layout.cp * asked.layout.tp)),
    Rule(f"sequences of {{job.length}} tokens, which {_MASK_BLOCK}·cp ({{cause}}) does not divide",
         "--cp 1 or another --seq", "torch's _create_cp_block_mask",
         lambda asked: _cutting_unit(asked, _MASK_BLOCK * asked.layout.cp)),
    key_heads("models/common/decoder.py"),
    Rule("tp {layout.tp} with delta nets of {cause[0]} key and {cause[1]} value heads", "--tp 1",
         "models/qwen3_5/model.py",
         lambda asked: next((heads for heads in asked.decoder.delta_heads
                             if heads[0] % asked.layout.tp or heads[1] % asked.layout.tp), None)),
    Rule("{layout.dispatcher} with ep 1", "--dispatcher all_to_all",
         "models/common/token_dispatcher.py",
         lambda asked: asked.decoder.num_moe_layers and asked.layout.ep == 1
         and asked.layout.dispatcher in DEDUPLICATING),
    # Without expert parallelism, tensor parallelism cuts each expert.
    Rule("tp {layout.tp} with ep 1: it cuts the experts, too", "--ep above 1, or --tp 1",
         "models/common/moe_sharding.py",
         lambda asked: asked.decoder.num_moe_layers and asked.layout.tp > 1
         and asked.layout.ep == 1),
    Rule("experts in {cause[0]} shards, which the width {cause[1]} does not divide by",
         "--ep {decoder.layer.num_experts}", "distributed/fsdp.py", _odd_width),
    Rule("deepep with mxfp8, which pads rows", "--dispatcher all_to_all or hybrid_ep",
         "components/quantization/utils.py",
         lambda asked: asked.job is not None and asked.job.dtype == "mxfp8"
         and asked.layout.dispatcher == "deepep" and asked.layout.ep > 1),
    Rule("pp {layout.pp} with an embedding that is the head, too", "--pp 1",
         "models/common/decoder.py",
         lambda asked: asked.layout.pp > 1 and asked.decoder.is_tied),
    Rule("{cause} micro-batches in {layout.pp} stages",
         "a larger --global-batch, or a smaller --pp or --micro-batch",
         "torch/distributed/pipelining/schedules.py", _few_batches),
)  # fmt: skip
