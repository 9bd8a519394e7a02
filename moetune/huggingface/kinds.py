"""Kinds of attention of a decoder's blocks: a list in the configuration, or its family's rule."""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeAlias, cast

from moetune.huggingface.fields import Fields

MixerKind = Literal[
    "full", "sliding", "chunked", "indexed", "borrowed", "linear", "conv", "compressed", "heavy"
]
"""`borrowed` reads the keys that an earlier block's indexer selected (`indexed`), `linear` is the
family's other mixer; `compressed` and `heavy` are DeepSeek-V4's two rates."""
KindsRule: TypeAlias = Callable[[Fields, int], tuple[MixerKind, ...]]
"""Kinds of so many blocks, where the configuration does not list them."""
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_NAMES: Mapping[str, MixerKind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "indexed",
    "deepseek_sparse_attention": "indexed",
    "minimax_m3_sparse": "indexed",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "conv",
    "compressed_sparse_attention": "compressed",
    "heavily_compressed_attention": "heavy",
}
_RATES: Mapping[object, MixerKind] = {0: "sliding", 4: "compressed", 128: "heavy"}
_FIRST_HEAVY = 2


def mixer_kinds(fields: Fields, rule: KindsRule) -> tuple[MixerKind, ...]:
    """Return the kind of every block's attention.

    A list of them with an unknown kind or too few entries is reported.
    """
    num_layers = fields.count(*LAYERS)
    ruled = rule(fields, num_layers)
    listed = fields.of_layers("layer_types", num_layers)
    if listed is None:
        return ruled
    unknown = [kind for kind in dict.fromkeys(listed) if kind not in _NAMES]
    if unknown:
        fields.report(
            f"layer_types has kinds of attention that are not known: {unknown}",
            f"known are {', '.join(_NAMES)}",
        )
        return ruled
    named = tuple(_NAMES[cast("str", kind)] for kind in listed)
    return tuple(
        "borrowed" if (kind, other) == ("indexed", "borrowed") else kind
        for kind, other in zip(named, ruled, strict=True)
    )


def _all(kind: MixerKind, num_layers: int) -> tuple[MixerKind, ...]:
    return (kind,) * num_layers


def _split(
    flags: Iterable[object], *, true: MixerKind = "full", false: MixerKind
) -> tuple[MixerKind, ...]:
    return tuple(true if flag else false for flag in flags)


def full(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Softmax attention over all earlier tokens in every block."""
    del fields
    return _all("full", num_layers)


def indexed(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Sparse attention, with an indexer of its own or an earlier block's.

    `indexer_types` says which; else every `index_topk_freq`-th block after an offset has its own.
    """
    every = fields.count("index_topk_freq", default=1)
    offset = max(1, fields.count("index_skip_topk_offset", default=0, least=0))
    listed = fields.of_layers("indexer_types", num_layers)
    if listed is None:
        own = (max(at + 1 - offset, 0) % every == 0 for at in range(num_layers))
        return _split(own, true="indexed", false="borrowed")
    unknown = [kind for kind in dict.fromkeys(listed) if kind not in {"full", "shared"}]
    if unknown:
        fields.report(
            f"indexer_types has kinds that are not known: {unknown}", "known are full and shared"
        )
    return _split((kind == "full" for kind in listed), true="indexed", false="borrowed")


def windowed(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """A window in every block where the configuration has one (Mistral)."""
    has_window = fields.optional("sliding_window") is not None
    return _split([has_window] * num_layers, true="sliding", false="full")


def qwen_window(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """A window from block `max_window_layers` on, with `use_sliding_window`."""
    fields.skip("sliding_window", "max_window_layers")
    if not fields.flag("use_sliding_window"):
        return _all("full", num_layers)
    first = fields.count("max_window_layers", least=0)
    return _split((at >= first for at in range(num_layers)), true="sliding", false="full")


def interval(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Softmax attention in every fourth block (Qwen3-Next), or as `full_attention_interval`."""
    every = fields.count("full_attention_interval", default=4)
    return _split(((at + 1) % every == 0 for at in range(num_layers)), false="linear")


def alternate(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Window and full attention in turn (gpt-oss)."""
    del fields
    return _split((at % 2 for at in range(num_layers)), false="sliding")


def every_fourth(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Full attention in every n-th block and windows between, or a pattern such as "LLLG"."""
    if not fields.has("sliding_window"):
        fields.skip("sliding_window_pattern", "global_attn_every_n_layers")
        return _all("full", num_layers)
    if isinstance(fields.values.get("sliding_window_pattern"), str):
        pattern = fields.text("sliding_window_pattern")
        return _split(
            (pattern[at % len(pattern)] == "G" for at in range(num_layers)), false="sliding"
        )
    every = fields.count("global_attn_every_n_layers", "sliding_window_pattern", default=4)
    return _split(((at + 1) % every == 0 for at in range(num_layers)), false="sliding")


def lightning(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """`attn_type_list` with 1 for softmax attention, else in turn (MiniMax-Text-01)."""
    listed = fields.of_layers("attn_type_list", num_layers)
    return _split(
        [at % 2 == 0 for at in range(num_layers)] if listed is None else listed, false="linear"
    )


def softmax_listed(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """`attn_type_list` with 1 for softmax attention, else all of them (MiniMax-M2)."""
    listed = fields.of_layers("attn_type_list", num_layers)
    return _split([True] * num_layers if listed is None else listed, false="linear")


def sparse_listed(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """`sparse_attention_freq` with 1 for an indexer (MiniMax-M3)."""
    nested = fields.nested("sparse_attention_config")
    listed = None if nested is None else nested.of_layers("sparse_attention_freq", num_layers)
    return _split([False] * num_layers if listed is None else listed, true="indexed", false="full")


def kimi(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Blocks of `full_attn_layers`, counted from 1; else every fourth."""
    nested = fields.nested("linear_attn_config")
    if nested is None:
        return _split(((at + 1) % 4 == 0 for at in range(num_layers)), false="linear")
    chosen = nested.sequence("full_attn_layers")
    nested.skip("kda_layers")
    if chosen is None:
        nested.missing("full_attn_layers")
    return _split((at + 1 in (chosen or ()) for at in range(num_layers)), false="linear")


def grouped_layers(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Softmax attention at the end of every `layer_group_size` blocks (Ling)."""
    every = fields.count("layer_group_size")
    return _split(((at + 1) % every == 0 for at in range(num_layers)), false="linear")


def ratios(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """DeepSeek-V4's `compress_ratios`; else two heavily compressed blocks, then in turn."""
    listed = fields.of_layers("compress_ratios", num_layers)
    if listed is None:
        return _split(
            (at < _FIRST_HEAVY or at % 2 == 0 for at in range(num_layers)),
            true="heavy",
            false="compressed",
        )
    unknown = [rate for rate in dict.fromkeys(listed) if rate not in _RATES]
    if unknown:
        fields.report(
            f"compress_ratios has rates that are not known: {unknown}", "known are 0, 4 and 128"
        )
    return tuple(_RATES.get(rate, "sliding") for rate in listed)


def periodic(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Softmax attention in one block of every `attn_layer_period` (Jamba)."""
    period = fields.count("attn_layer_period")
    offset = fields.count("attn_layer_offset", least=0)
    return _split((at % period == offset for at in range(num_layers)), false="linear")


def chunked(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Chunks wherever positions are rotary: `no_rope_layers`, else three of four (Llama 4)."""
    step = fields.count("no_rope_layer_interval", default=4)
    listed = fields.of_layers("no_rope_layers", num_layers)
    rotary = listed or [(at + 1) % step for at in range(num_layers)]
    return _split(rotary, true="chunked", false="full")


def convolutions(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Convolutions but for `full_attn_idxs` (LFM2); reported where this and `layer_types` lack."""
    chosen = fields.sequence("full_attn_idxs")
    if chosen is None:
        if not fields.has("layer_types"):
            fields.missing("layer_types", "full_attn_idxs")
        return _all("full", num_layers)
    return _split((at in chosen for at in range(num_layers)), false="conv")


def mimo(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """`hybrid_layer_pattern` with 1 for a window; else full at first and in every sixth block."""
    listed = fields.of_layers("hybrid_layer_pattern", num_layers)
    if listed is None:
        return _split((at == 0 or (at + 1) % 6 == 0 for at in range(num_layers)), false="sliding")
    return _split(listed, true="sliding", false="full")


def gemma3(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Full attention in every `sliding_window_pattern`-th block, else in every sixth (Gemma 3)."""
    every = fields.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _split(((at + 1) % every == 0 for at in range(num_layers)), false="sliding")


def gemma(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Full attention in every sixth block, and in the last one (Gemma 4)."""
    del fields
    last = num_layers - 1
    return _split(((at + 1) % 6 == 0 or at == last for at in range(num_layers)), false="sliding")
