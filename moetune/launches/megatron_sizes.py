"""The model of Megatron's arguments: a known model with the same sizes, or a decoder of the sizes.

A known model is compared by the fields that `export` would write for it (`megatron_model`).
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from moetune.domain.architecture import Decoder, Part
from moetune.domain.attention import GroupedQueryAttention
from moetune.domain.errors import InputError
from moetune.domain.target_rules import model_rules
from moetune.domain.targets import MegatronCore, find_target
from moetune.export.keys import Value
from moetune.export.megatron_model import megatron_model
from moetune.huggingface.reader import read_decoder
from moetune.huggingface.registry import (
    PublishedModel,
    find_decoder_model,
    model_names,
    named_model,
    resolve_name,
)

Values = Mapping[str, Value]
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_LATENT_DEFAULTS: Values = {
    "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
"""Defaults of `_add_mla_args` (`megatron/training/arguments.py`)."""
_ROUTED = ("num_moe_experts", "moe_router_topk", "moe_shared_expert_intermediate_size")
_LINEAR = (
    "experimental_attention_variant", "linear_key_head_dim", "linear_value_head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "dsa_indexer_topk_freq",
)  # fmt: skip
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
_WINDOWS = ("window_size", "window_attn_skip_freq")
TOKENIZER = frozenset({"tokenizer_model", "tokenizer_type", "vocab_file", "merge_file"})
"""Fields that set a vocabulary; a path in them may have variables without a value."""
SIZES = frozenset({
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "group_query_attention", "kv_channels", "moe_ffn_hidden_size", "moe_layer_freq",
    "mtp_num_layers", "multi_latent_attention", "qk_layernorm", "add_qkv_bias", "swiglu",
    "vocab_size", "padded_vocab_size", *TOKENIZER, "squared_relu",
    "untie_embeddings_and_output_weights", *_WINDOWS, *_LATENT, *_ROUTED, *_LINEAR, *_PATTERNS,
})  # fmt: skip
"""Fields that set a model's sizes."""
_DEFAULT_TOP_K = 2
_GPT2, _GPT2_TOKENS = "GPT2BPETokenizer", 50257
_SWIGLU_MULTIPLE = 64
_LARGEST_LIST = 10_000


class Recognised(NamedTuple):
    """A model, and words on how it was recognised."""

    decoder: Decoder
    words: str


def recognise(values: Values, *, name: str | None = None, reads_files: bool) -> Recognised:
    """Return the model that arguments describe.

    Args:
        name: name of the model; None to recognise it by its sizes.
        reads_files: whether that name may be a file.

    Raises:
        InputError: sizes are missing, or are of no model that is supported.
    """
    if name is not None:
        named = find_decoder_model(name, world_size=1, reads_files=reads_files)
        if named.decoder is None:
            raise InputError(f"{name} is a single layer, not a model", "name a whole model")
        return Recognised(_change_decoder(named.decoder, values), f"{named.title}, by its name")
    model = _by_sizes(values)
    return model._replace(decoder=_with_windows(model.decoder, values))


def _by_sizes(values: Values) -> Recognised:
    sizes = effective(values)
    hint = resolve_name(str(values.get("tokenizer_model", "")).rstrip("/"))
    fits = [model for model, theirs in _models_of(sizes["hidden_size"]) if _is_same(theirs, sizes)]
    if fits:
        vocabulary = _vocabulary(values)
        model = min(
            fits,
            key=lambda model: (
                model.decoder.name != hint, vocabulary not in (None, model.decoder.vocab_size),
                bool(model.decoder.uncounted), len(model.decoder.name),
            ),
        )  # fmt: skip
        decoder = _change_decoder(model.decoder, values)
        tokens = None if vocabulary else values.get("tokenizer_type")
        return Recognised(decoder, _words_on(model, decoder, tokens))
    vocabulary, whose = _vocabulary(values), ""
    if vocabulary is None:
        vocabulary, whose = _assumed_vocabulary(values, sizes, hint)
    words = f"a decoder of the script's sizes{whose}"
    return Recognised(_of_sizes(values, sizes, vocabulary), words)


def _words_on(model: Any, decoder: Decoder, tokenizer: object) -> str:  # noqa: ANN401
    """Return words on a model that is recognised, and on what of it the arguments change."""
    if decoder.num_layers != model.decoder.num_layers:
        return f"{model.title} with {decoder.num_layers} blocks, by its other sizes"
    if tokenizer == _GPT2 and decoder.vocab_size != _GPT2_TOKENS:  # of a file that is not read
        return f"{model.title} with its vocabulary, by its other sizes"
    return f"{model.title}, by its sizes"


def effective(values: Values) -> dict[str, Any]:
    """Return the sizes that arguments give, completed by Megatron's defaults.

    Raises:
        InputError: the width, the heads or the layers are missing.
    """
    pattern = next((str(values[name]) for name in _PATTERNS if values.get(name)), "")
    given: dict[str, Any] = dict(values)
    needed = ("hidden_size", "num_attention_heads", *(() if pattern else ("num_layers",)))
    for key in needed:
        if not isinstance(given.get(key), int) or given[key] is True or given[key] < 1:
            flag = f"--{key.replace('_', '-')}"
            raise InputError(f"the script gives no {flag}", "name the model with --model")
    width, heads = given["hidden_size"], given["num_attention_heads"]
    sizes: dict[str, Any] = {"hidden_size": width, "num_attention_heads": heads}
    is_gated = bool(given.get("swiglu") or given.get("quick_geglu"))
    ffn = given.get("ffn_hidden_size") or _usual_ffn(width, is_gated=is_gated)
    if pattern:
        sizes["pattern"] = pattern.partition("/")[0].replace("|", "")
    else:
        sizes["num_layers"] = given["num_layers"]
    if given.get("multi_latent_attention"):
        sizes |= {key: given.get(key, _LATENT_DEFAULTS.get(key)) for key in _LATENT}
    else:
        sizes["num_query_groups"] = (
            given.get("num_query_groups", heads) if given.get("group_query_attention") else heads
        )
        sizes["kv_channels"] = given.get("kv_channels") or width // heads
    sizes |= {key: given[key] for key in _LINEAR if given.get(key) not in (None, 0, 1)}
    routed = _routing_pattern(given) if given.get("num_moe_experts") else ()
    if routed:
        sizes |= {key: given.get(key) for key in _ROUTED}
        sizes["moe_router_topk"] = given.get("moe_router_topk") or _DEFAULT_TOP_K
        sizes["moe_ffn_hidden_size"] = given.get("moe_ffn_hidden_size") or ffn
    if not all(routed) or not routed or pattern:
        sizes["ffn_hidden_size"] = ffn
    sizes["first_routed"] = "".join(map(str, routed[:20]))
    return sizes


def _usual_ffn(width: int, *, is_gated: bool) -> int:
    return int(width * 8 / 3) // _SWIGLU_MULTIPLE * _SWIGLU_MULTIPLE if is_gated else 4 * width


def _with_windows(decoder: Decoder, values: Values) -> Decoder:
    """Return the decoder with the windows that arguments give, which no size tells."""
    width = re.match(r"\D*(\d+)", str(values.get("window_size") or ""))
    window = None if width is None else int(width[1]) + 1
    frequency = values.get("window_attn_skip_freq")
    if isinstance(frequency, str):
        frequency = _read_pattern(frequency, "--window-attn-skip-freq")
    if isinstance(frequency, int):
        flags = [number % max(1, frequency) for number in range(1, decoder.num_layers + 1)]
    else:
        flags = [*(frequency if isinstance(frequency, tuple) else ()), *([1] * decoder.num_layers)]
    blocks = (
        replace(block, parts=tuple(_read(part, window if flag else None) for part in block.parts))
        for block, flag in zip(decoder.blocks, flags, strict=False)
    )
    return replace(decoder, blocks=tuple(blocks))


def _read(part: Part, window: int | None) -> Part:
    return replace(part, window=window) if isinstance(part, GroupedQueryAttention) else part


def _routing_pattern(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return 1 for each layer with experts, and 0 for others."""
    layers, frequency = int(given.get("num_layers", 1)), given.get("moe_layer_freq", 1)
    if isinstance(frequency, str):
        frequency = _read_pattern(frequency, "--moe-layer-freq")
    if isinstance(frequency, int):
        return tuple(int(layer % max(1, frequency) == 0) for layer in range(layers))
    return tuple(frequency)


def _read_pattern(text: str, flag: str) -> tuple[int, ...] | int:
    """Return a number or a list that is written in Python, such as "[0]*1+[1]*60".

    Raises:
        InputError: the text is anything else.
    """

    def compute(node: ast.expr) -> Any:  # noqa: ANN401 - a list or a number
        match node:
            case ast.Constant(value=int() as value):
                return value
            case ast.List(elts=elements):
                return [compute(element) for element in elements]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return compute(left) + compute(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                first, second = compute(left), compute(right)
                listed = first if isinstance(first, list) else second
                times = second if isinstance(first, list) else first
                if isinstance(listed, list) and len(listed) * times > _LARGEST_LIST:
                    raise ValueError
                return first * second
            case _:
                raise ValueError

    try:
        value = compute(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, RecursionError):
        raise InputError(
            f"{flag} {text!r} is no number and no list", "such as '[0]*1+[1]*60'"
        ) from None
    return value if isinstance(value, int) else tuple(map(int, value))


@cache
def _models_of(width: int) -> tuple[tuple[PublishedModel, Mapping[str, Any]], ...]:
    """Return the registry's models of a width that Megatron can run, with their sizes."""
    target, described = find_target("megatron"), []
    for name in model_names():
        model = named_model(name)
        if model.decoder.d_model != width:
            continue
        if next(model_rules(model.decoder, target), None) is None:
            written = megatron_model(model.decoder, _NEWEST, model.config, 1)
            described.append((model, effective({**written.fields, **written.flags})))
    return tuple(described)


def _is_same(theirs: Mapping[str, Any], sizes: Mapping[str, Any]) -> bool:
    """Return whether a model has the sizes, except for its number of layers."""
    rest = {"num_layers", "first_routed"}
    if {key: value for key, value in theirs.items() if key not in rest} != {
        key: value for key, value in sizes.items() if key not in rest
    }:
        return False
    first, second = theirs["first_routed"], sizes["first_routed"]
    shorter = min(len(first), len(second))
    return bool(first[:shorter] == second[:shorter])


_NEWEST: MegatronCore = (0, 19)


def _change_decoder(decoder: Decoder, values: Values) -> Decoder:
    """Return a known model with the layers, predictions, vocabulary and head that arguments set."""
    layers = values.get("num_layers")
    if isinstance(layers, int) and layers != decoder.num_layers and not decoder.has_mamba:
        repeated = decoder.blocks[-1:] * max(0, layers - decoder.num_layers)
        blocks = (*decoder.blocks[:layers], *repeated)
        decoder = replace(decoder, name=f"{decoder.name} of {layers} blocks", blocks=blocks)
    steps = values.get("mtp_num_layers") or 0
    if isinstance(steps, int) and steps != len(decoder.predictions):
        decoder = replace(decoder, predictions=decoder.predictions[:1] * steps)
    vocabulary = _vocabulary(values)
    if vocabulary is not None and "hidden_size" in values:
        decoder = replace(decoder, vocab_size=vocabulary)
    if "hidden_size" in values:
        is_untied = bool(values.get("untie_embeddings_and_output_weights"))
        decoder = replace(decoder, is_tied=not is_untied)
    return decoder


def _vocabulary(values: Values) -> int | None:
    for key in ("padded_vocab_size", "vocab_size"):
        value = values.get(key)
        if isinstance(value, int) and value > 1:
            return value
    return None


def _assumed_vocabulary(
    values: Values, sizes: Mapping[str, Any], hint: str | None
) -> tuple[int, str]:
    """Return a vocabulary size that arguments do not give, and words on whose it is.

    Raises:
        InputError: no tokenizer and no model of that shape is known.
    """
    usual = _GPT2 if values.get("merge_file") else None  # merge files are GPT-2's
    if values.get("tokenizer_type", usual) == _GPT2:
        return _GPT2_TOKENS, ", with GPT-2's vocabulary"
    hint = hint or _near(sizes)
    if hint is None:
        raise InputError(
            "no model is known by the script's sizes, and it does not say its vocabulary",
            "name the model, or its config.json, with --model",
        )
    return named_model(hint).decoder.vocab_size, f", with the vocabulary of {hint}"


def _of_sizes(values: Values, sizes: Mapping[str, Any], vocabulary: int) -> Decoder:
    """Return a decoder with the sizes, of a family that has such parts.

    Raises:
        InputError: no family has such parts.
    """
    if "pattern" in sizes or "experimental_attention_variant" in sizes:
        raise InputError("no model is known by the script's sizes", "name it with --model")
    document = {**_document(values, sizes), "vocab_size": vocabulary}
    document["tie_word_embeddings"] = not values.get("untie_embeddings_and_output_weights")
    name = f"decoder of {sizes['num_layers']} blocks, {sizes['hidden_size']} wide"
    return _change_decoder(read_decoder(document, name=name, where="the script"), values)


def _near(sizes: Mapping[str, Any]) -> str | None:
    """Return a known model of the same width, heads and layers, to assume its vocabulary."""
    keys = ("hidden_size", "num_attention_heads", "num_layers")
    same = (model.decoder.name for model, theirs in _models_of(sizes["hidden_size"])
            if all(theirs.get(key) == sizes.get(key) for key in keys))  # fmt: skip
    return next(same, None)


def _document(values: Values, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of Hugging Face with the sizes."""
    width, layers = sizes["hidden_size"], sizes["num_layers"]
    common = {
        "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": sizes["num_attention_heads"],
        "num_key_value_heads": sizes.get("num_query_groups", sizes["num_attention_heads"]),
        "intermediate_size": sizes.get("ffn_hidden_size", sizes.get("moe_ffn_hidden_size")),
    }  # fmt: skip
    if "kv_channels" in sizes:
        common["head_dim"] = sizes["kv_channels"]
    if "num_moe_experts" not in sizes:
        return _dense(values, sizes, common)
    routed = sizes["first_routed"]
    dense_first = len(routed) - len(routed.lstrip("0"))
    experts = {
        "num_experts_per_tok": sizes["moe_router_topk"],
        "moe_intermediate_size": sizes["moe_ffn_hidden_size"],
    }
    shared = sizes["moe_shared_expert_intermediate_size"] or 0
    if "kv_lora_rank" in sizes or shared or dense_first:
        common |= {
            "model_type": "deepseek_v3" if "kv_lora_rank" in sizes else "glm4_moe",
            "n_routed_experts": sizes["num_moe_experts"], "first_k_dense_replace": dense_first,
            "n_shared_experts": shared // sizes["moe_ffn_hidden_size"], "n_group": 1,
            "topk_group": 1, "norm_topk_prob": True, "scoring_func": "sigmoid",
        }  # fmt: skip
        if "kv_lora_rank" in sizes:
            common |= {
                "q_lora_rank": sizes["q_lora_rank"], "kv_lora_rank": sizes["kv_lora_rank"],
                "qk_nope_head_dim": sizes["qk_head_dim"], "v_head_dim": sizes["v_head_dim"],
                "qk_rope_head_dim": sizes["qk_pos_emb_head_dim"],
            }  # fmt: skip
        return common | experts
    return common | experts | {
        "model_type": "qwen3_moe", "num_experts": sizes["num_moe_experts"],
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    }  # fmt: skip


def _dense(values: Values, sizes: Mapping[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    if values.get("squared_relu"):
        return {**common, "model_type": "nemotron"}
    heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    is_plain = (sizes.get("num_query_groups"), sizes.get("kv_channels")) == (heads, width // heads)
    if not values.get("swiglu") and is_plain:
        return {
            "model_type": "gpt2", "n_embd": sizes["hidden_size"], "n_layer": sizes["num_layers"],
            "n_head": sizes["num_attention_heads"], "n_inner": sizes["ffn_hidden_size"],
            "n_positions": values.get("max_position_embeddings") or values.get("seq_length"),
        }  # fmt: skip
    kinds = {"qk_layernorm": "qwen3", "add_qkv_bias": "qwen2"}
    kind = next((kind for key, kind in kinds.items() if values.get(key)), "llama")
    return {**common, "model_type": kind}
