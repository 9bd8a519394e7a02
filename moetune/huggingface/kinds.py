"""Kinds of a decoder's blocks, by attention and experts, from a list or the family's rule."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from moetune.huggingface.fields import Fields

MixerKind = Literal[
    "full", "sliding", "chunked", "indexed", "borrowed", "linear", "conv", "compressed", "heavy"
]
"""`borrowed` reads the keys that an earlier block's indexer selected (`indexed`). `linear` is the
family's other mixer. `compressed` and `heavy` are DeepSeek-V4's two rates."""
KindsRule: TypeAlias = Callable[[Fields, int], tuple[MixerKind, ...]]
"""Returns the kinds of a number of blocks, where the configuration does not list them."""
Flags: TypeAlias = Callable[[Fields, int], Sequence[bool]]
"""Returns which of a number of blocks have a property."""
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_NAMES: Mapping[object, MixerKind] = {
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
_INDEXERS: Mapping[object, MixerKind] = {"full": "indexed", "shared": "borrowed"}
_FIRST_HEAVY = 2
_HAS_EXPERTS: Mapping[object, bool] = {
    "sparse": True, "moe": True, "hash_moe": True, "dense": False, "mlp": False,
}  # fmt: skip


def mixer_kinds(fields: Fields, rule: KindsRule) -> tuple[MixerKind, ...]:
    """Return the kind of attention of every block.

    A list with an unknown kind or with too few entries is reported.
    """
    num_layers = fields.count(*LAYERS)
    ruled = rule(fields, num_layers)
    named = fields.named_layers("layer_types", num_layers, _NAMES)
    if named is None:
        return ruled
    return tuple(
        "borrowed" if (kind, rule) == ("indexed", "borrowed") else kind
        for kind, rule in zip(named, ruled, strict=True)
    )


def _split(
    flags: Iterable[object], *, true: MixerKind = "full", false: MixerKind
) -> tuple[MixerKind, ...]:
    return tuple(true if flag else false for flag in flags)


def _by(flags: Flags, *, true: MixerKind = "full", false: MixerKind) -> KindsRule:
    """Return the rule of kind `true` in blocks with the flag, and of kind `false` elsewhere."""
    return lambda fields, num_layers: _split(flags(fields, num_layers), true=true, false=false)


def every_block(_: Fields, num_layers: int) -> tuple[bool, ...]:
    """Flag all blocks."""
    return (True,) * num_layers


def no_block(_: Fields, num_layers: int) -> tuple[bool, ...]:
    """Flag no block."""
    return (False,) * num_layers


def every_nth(*names: str, default: int | None = None) -> Flags:
    """Return the flags of every n-th block; n is a field, or the class's default."""

    def flags(fields: Fields, num_layers: int) -> Sequence[bool]:
        step = fields.count(*names, default=default)
        return [(block + 1) % step == 0 for block in range(num_layers)]

    return flags


def periodic(period: str, offset: str) -> Flags:
    """Return the flags of a single block in every period, at an offset from its start (Jamba)."""

    def flags(fields: Fields, num_layers: int) -> Sequence[bool]:
        step, first = fields.count(period), fields.count(offset, least=0)
        return [block % step == first for block in range(num_layers)]

    return flags


def if_experts(rule: Flags, *, least: int = 1) -> Flags:
    """Return the flags of a rule; no block has experts where there are fewer than `least`."""
    names = "num_experts", "num_local_experts"

    def flags(fields: Fields, num_layers: int) -> Sequence[bool]:
        ruled = rule(fields, num_layers)
        if not fields.has(*names) or fields.count(*names, default=least, least=0) >= least:
            return ruled
        fields.skip("num_experts_per_tok")
        return no_block(fields, num_layers)

    return flags


def _from_list(name: str, otherwise: Flags) -> Flags:
    """Return the flags of a list, or `otherwise` if the configuration does not have the list."""

    def flags(fields: Fields, num_layers: int) -> Sequence[bool]:
        values = fields.of_layers(name, num_layers)
        return otherwise(fields, num_layers) if values is None else [*map(bool, values)]

    return flags


full = _by(every_block, false="linear")
"""Softmax attention over all earlier tokens in every block."""
interval = _by(every_nth("full_attention_interval", default=4), false="linear")
"""Softmax attention in every `full_attention_interval`-th block, or every fourth (Qwen3-Next)."""
grouped_layers = _by(every_nth("layer_group_size"), false="linear")
"""Softmax attention at the end of every `layer_group_size` blocks (Ling)."""
jamba = _by(periodic("attn_layer_period", "attn_layer_offset"), false="linear")
"""Softmax attention in one block of every `attn_layer_period`."""
gemma3 = _by(
    every_nth("sliding_window_pattern", "_sliding_window_pattern", default=6), false="sliding"
)
"""Full attention in every `sliding_window_pattern`-th block, else in every sixth (Gemma 3)."""
alternate = _by(
    lambda _, num_layers: [block % 2 > 0 for block in range(num_layers)], false="sliding"
)
"""Window and full attention alternate (gpt-oss)."""
gemma = _by(
    lambda _, num_layers: [
        (block + 1) % 6 == 0 or block + 1 == num_layers for block in range(num_layers)
    ],
    false="sliding",
)
"""Full attention in every sixth block, and in the last block (Gemma 4)."""
lightning = _by(
    _from_list(
        "attn_type_list", lambda _, num_layers: [block % 2 == 0 for block in range(num_layers)]
    ),
    false="linear",
)
"""`attn_type_list` with 1 for softmax attention, or else in every other block (MiniMax-Text-01)."""
softmax_listed = _by(_from_list("attn_type_list", every_block), false="linear")
"""`attn_type_list` with 1 for softmax attention, or else in all blocks (MiniMax-M2)."""
mimo = _by(
    _from_list(
        "hybrid_layer_pattern",
        lambda _, num_layers: [block > 0 and (block + 1) % 6 > 0 for block in range(num_layers)],
    ),
    true="sliding",
    false="full",
)
"""`hybrid_layer_pattern` with 1 for a window; else full in the first and every sixth block."""


def indexed(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Sparse attention, with the block's indexer or an earlier block's selection.

    `indexer_types` says which; else every `index_topk_freq`-th block from an offset has an indexer.
    """
    step = fields.count("index_topk_freq", default=1)
    offset = max(1, fields.count("index_skip_topk_offset", default=0, least=0))
    return fields.named_layers("indexer_types", num_layers, _INDEXERS) or _split(
        (max(block + 1 - offset, 0) % step == 0 for block in range(num_layers)),
        true="indexed",
        false="borrowed",
    )


def windowed(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """A window in every block if the configuration has `sliding_window` (Mistral)."""
    has_window = fields.optional("sliding_window") is not None
    return _split([has_window] * num_layers, true="sliding", false="full")


def qwen_window(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """A window from block `max_window_layers` on, with `use_sliding_window`."""
    fields.skip("sliding_window", "max_window_layers")
    if not fields.flag("use_sliding_window"):
        return full(fields, num_layers)
    first = fields.count("max_window_layers", least=0)
    return _split((block >= first for block in range(num_layers)), true="sliding", false="full")


def every_fourth(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Full attention in every n-th block and windows elsewhere, or a pattern such as "LLLG"."""
    names = "global_attn_every_n_layers", "sliding_window_pattern"
    if not fields.has("sliding_window"):
        fields.skip(*names)
        return full(fields, num_layers)
    if isinstance(fields.values.get("sliding_window_pattern"), str):
        pattern = fields.text("sliding_window_pattern")
        return _split(
            (pattern[block % len(pattern)] == "G" for block in range(num_layers)), false="sliding"
        )
    return _split(every_nth(*names, default=4)(fields, num_layers), false="sliding")


def sparse_listed(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Indexers in blocks with 1 in `sparse_attention_freq` (MiniMax-M3)."""
    nested = fields.nested_fields("sparse_attention_config")
    flags = _from_list("sparse_attention_freq", no_block)
    listed = () if nested is None else flags(nested, num_layers)
    return _split(listed or [False] * num_layers, true="indexed", false="full")


def kimi(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Full attention in blocks of `full_attn_layers`, counted from 1; else in every fourth."""
    nested = fields.nested_fields("linear_attn_config")
    if nested is None:
        return _split(((block + 1) % 4 == 0 for block in range(num_layers)), false="linear")
    chosen = nested.sequence("full_attn_layers")
    nested.skip("kda_layers")
    if chosen is None:
        nested.missing("full_attn_layers")
    return _split((block + 1 in (chosen or ()) for block in range(num_layers)), false="linear")


def ratios(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """DeepSeek-V4's `compress_ratios`; else two `heavy` blocks, and then alternating kinds."""
    return fields.named_layers("compress_ratios", num_layers, _RATES) or _split(
        (block < _FIRST_HEAVY or block % 2 == 0 for block in range(num_layers)),
        true="heavy",
        false="compressed",
    )


def chunked(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Chunks where positions are rotary: by `no_rope_layers`, else in three of four (Llama 4)."""
    step = fields.count("no_rope_layer_interval", default=4)
    listed = fields.of_layers("no_rope_layers", num_layers)
    rotary = listed or [(block + 1) % step for block in range(num_layers)]
    return _split(rotary, true="chunked", false="full")


def convolutions(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Convolutions except in `full_attn_idxs` (LFM2); report that and `layer_types` missing."""
    chosen = fields.sequence("full_attn_idxs")
    if chosen is None:
        if not fields.has("layer_types"):
            fields.missing("layer_types", "full_attn_idxs")
        return full(fields, num_layers)
    return _split((block in chosen for block in range(num_layers)), false="conv")


def blocks_with_experts(fields: Fields, rule: Flags) -> tuple[bool, ...]:
    """Return whether each block has experts.

    A list with unknown entries or too few, or that contradicts another field, is reported.

    Args:
        rule: the family's rule, where the configuration does not list the blocks.
    """
    num_layers = fields.count(*LAYERS)
    flags = fields.of_layers("is_moe_layer", num_layers)
    named = fields.named_layers("mlp_layer_types", num_layers, _HAS_EXPERTS)
    if flags is not None:
        fields.skip("first_last_k_dense_replace", "first_k_dense_replace")
        listed = tuple(flag is True for flag in flags)
        if named not in (None, listed):
            fields.report("is_moe_layer and mlp_layer_types differ", "keep the one that is right")
        return listed
    ruled = tuple(rule(fields, num_layers))
    if named is None:
        return ruled
    if fields.has("first_k_dense_replace") and named != ruled:
        first = fields.count("first_k_dense_replace", least=0)
        dense = named.index(True) if True in named else num_layers
        fields.report(
            f"first_k_dense_replace ({first}) and mlp_layer_types (the first {dense} are dense) "
            "differ",
            "keep the field that is right",
        )
    return named


def after_dense(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Experts after the first dense blocks, in all blocks or by `moe_layer_freq` (n, or a list).

    It is reported if no field says how many blocks are dense, or if it says too many.
    """
    is_listed = fields.has("mlp_layer_types") or isinstance(
        fields.values.get("moe_layer_freq"), list
    )
    return _after(fields, num_layers, default=0 if is_listed else None)


def after_any_dense(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """As `after_dense`, but no block is dense if no field says so."""
    return _after(fields, num_layers, default=0)


def _after(fields: Fields, num_layers: int, *, default: int | None) -> tuple[bool, ...]:
    names = ("first_k_dense_replace", "num_dense_layers")
    first = fields.count(*names, default=default, least=0)
    if first > num_layers:
        fields.report(
            f"there are {first} dense blocks first, but {num_layers} blocks",
            "correct first_k_dense_replace or num_hidden_layers",
        )
    if isinstance(fields.values.get("moe_layer_freq"), list):
        return tuple(map(bool, fields.of_layers("moe_layer_freq", num_layers) or ()))
    period = fields.count("moe_layer_freq", default=1)
    return tuple(block >= first and block % period == 0 for block in range(num_layers))


def step_experts(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Experts in the blocks of `moe_layers_enum`, such as "3,4,5"; else as `after_dense`."""
    fields.only("moe_every_n_layer", (1,))
    if not fields.has("moe_layers_enum"):
        return after_dense(fields, num_layers)
    stated = fields.values["moe_layers_enum"]
    fields.skip("moe_layers_enum")
    chosen = stated.split(",") if isinstance(stated, str) else fields.sequence("moe_layers_enum")
    blocks = {str(block).strip() for block in chosen or ()}
    return tuple(str(block) in blocks for block in range(num_layers))


def qwen_experts(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Experts in every `decoder_sparse_step`-th block that `mlp_only_layers` does not name."""
    step = fields.count("decoder_sparse_step", default=1)
    dense = fields.sequence("mlp_only_layers") or ()
    return tuple(block not in dense and (block + 1) % step == 0 for block in range(num_layers))


def llama4_experts(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Experts in the blocks of `moe_layers`, else in every `interleave_moe_layer_step`-th.

    It is reported if the two differ.
    """
    step = fields.optional("interleave_moe_layer_step")
    chosen = fields.sequence("moe_layers")
    regular = tuple((block + 1) % (step or 1) == 0 for block in range(num_layers))
    if chosen is None:
        return regular
    flags = tuple(block in chosen for block in range(num_layers))
    if step is not None and flags != regular:
        fields.report(
            f"interleave_moe_layer_step ({step}) and moe_layers differ",
            "keep the field that is right",
        )
    return flags


def ernie_experts(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Experts in every `moe_layer_interval`-th block, from a first to a last block."""
    step = fields.count("moe_layer_interval", default=1)
    first = fields.count("moe_layer_start_index", default=1, least=0)
    last = fields.optional("moe_layer_end_index", least=-1)
    end = num_layers - 1 if last is None or last < 0 else last
    return tuple((block + 1) % step == 0 and first <= block <= end for block in range(num_layers))


def gemma_experts(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Experts in every block with `enable_moe_block`, next to its dense FFN.

    Embeddings of each block and wide FFNs are reported: they are not supported.
    """
    fields.only("hidden_size_per_layer_input", (0,))
    fields.only("use_double_wide_mlp", (False,))
    return (fields.flag("enable_moe_block"),) * num_layers
