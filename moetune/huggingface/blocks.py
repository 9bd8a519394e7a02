"""Blocks of a decoder in order: which attention each has, and whether it has experts."""

from collections.abc import Callable, Mapping
from typing import cast

from moetune.huggingface.family import Family, MixerKind
from moetune.huggingface.fields import Fields

LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
NAMES: Mapping[str, MixerKind] = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "sliding_attention": "sliding",
    "local": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "indexed",
    "deepseek_sparse_attention": "indexed",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "conv",
    "compressed_sparse_attention": "compressed",
    "heavily_compressed_attention": "heavy",
}
_WITH_EXPERTS = {"sparse": True, "moe": True, "hash_moe": True, "dense": False, "mlp": False}
_RATES: Mapping[int, MixerKind] = {0: "sliding", 4: "compressed", 128: "heavy"}


def mixer_kinds(fields: Fields, family: Family) -> tuple[MixerKind, ...]:
    """Return the kind of every block's attention.

    Raises:
        InputError: a list of them has an unknown kind or too few entries.
    """
    num_layers = fields.count(*LAYERS)
    listed = fields.of_layers("layer_types", num_layers)
    ruled = _RULES.get(family.kinds, _full)(fields, num_layers)
    if listed is None:
        return ruled
    unknown = [kind for kind in dict.fromkeys(listed) if kind not in NAMES]
    if unknown:
        raise fields.contradiction(
            f"layer_types has kinds of attention that are not known: {unknown}",
            f"known are {', '.join(NAMES)}",
        )
    return tuple(NAMES[cast("str", kind)] for kind in listed)


def blocks_with_experts(fields: Fields, family: Family) -> tuple[bool, ...]:
    """Return for every block whether it has experts.

    Raises:
        InputError: a list has unknown entries, or contradicts another field.
    """
    num_layers = fields.count(*LAYERS)
    listed = fields.of_layers("mlp_layer_types", num_layers)
    ruled = _with_experts(fields, family, num_layers)
    if listed is None:
        return ruled
    unknown = [kind for kind in dict.fromkeys(listed) if kind not in _WITH_EXPERTS]
    if unknown:
        raise fields.contradiction(
            f"mlp_layer_types has kinds that are not known: {unknown}",
            f"known are {', '.join(_WITH_EXPERTS)}",
        )
    found = tuple(_WITH_EXPERTS[cast("str", kind)] for kind in listed)
    if fields.has("first_k_dense_replace") and found != ruled:
        first = fields.count("first_k_dense_replace", least=0)
        dense = found.index(True) if True in found else num_layers
        raise fields.contradiction(
            f"first_k_dense_replace ({first}) and mlp_layer_types ({dense} dense first) differ",
            "keep the one that is right",
        )
    return found


def _with_experts(fields: Fields, family: Family, num_layers: int) -> tuple[bool, ...]:
    layers = range(num_layers)
    if family.sparse == "first_dense":
        first = fields.count("first_k_dense_replace", "num_dense_layers", default=0, least=0)
        every = _frequency(fields)
        if isinstance(every, tuple):
            return tuple(bool(value) for value in every[:num_layers])
        return tuple(at >= first and at % every == 0 for at in layers)
    if family.sparse == "qwen":
        step = fields.count("decoder_sparse_step", default=1)
        dense = fields.sequence("mlp_only_layers") or ()
        return tuple(at not in dense and (at + 1) % step == 0 for at in layers)
    if family.sparse == "llama4":
        step = fields.count("interleave_moe_layer_step", default=1)
        chosen = fields.sequence("moe_layers")
        every = [(at + 1) % step == 0 for at in layers]
        return tuple(every if chosen is None else (at in chosen for at in layers))
    if family.sparse == "ernie":
        step = fields.count("moe_layer_interval", default=1)
        first = fields.count("moe_layer_start_index", default=1, least=0)
        last = fields.optional("moe_layer_end_index", least=-1)
        end = num_layers - 1 if last in {None, -1} else last or 0
        return tuple((at + 1) % step == 0 and first <= at <= end for at in layers)
    if family.sparse == "jamba":
        period, offset = fields.count("expert_layer_period"), fields.count(
            "expert_layer_offset", least=0
        )
        return tuple(at % period == offset for at in layers)
    return (family.sparse == "all",) * num_layers


def _frequency(fields: Fields) -> "int | tuple[object, ...]":
    """Return DeepSeek's `moe_layer_freq`: every so many blocks, or a list."""
    if isinstance(fields.values.get("moe_layer_freq"), list):
        return fields.sequence("moe_layer_freq") or ()
    return fields.count("moe_layer_freq", default=1)


def _full(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    """Softmax attention in every block, over a window where the configuration has one."""
    del fields
    return ("full",) * num_layers


def _windowed(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    kind: MixerKind = "full" if fields.optional("sliding_window") is None else "sliding"
    return (kind,) * num_layers


def _qwen_window(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    fields.skip("sliding_window", "max_window_layers")
    if not fields.flag("use_sliding_window"):
        return ("full",) * num_layers
    first = fields.count("max_window_layers", least=0)
    return tuple("sliding" if at >= first else "full" for at in range(num_layers))


def _interval(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    every = fields.count("full_attention_interval", default=4)
    return tuple("full" if (at + 1) % every == 0 else "linear" for at in range(num_layers))


def _alternate(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    del fields
    return tuple("full" if at % 2 else "sliding" for at in range(num_layers))


def _global(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    names = ("global_attn_every_n_layers", "sliding_window_pattern")
    if isinstance(fields.values.get("sliding_window_pattern"), str):
        pattern = fields.text("sliding_window_pattern")
        return tuple(
            "full" if pattern[at % len(pattern)] == "G" else "sliding" for at in range(num_layers)
        )
    every = fields.count(*names, default=4)
    return tuple("full" if (at + 1) % every == 0 else "sliding" for at in range(num_layers))


def _lightning(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    listed = fields.of_layers("attn_type_list", num_layers)
    if listed is None:
        return tuple("linear" if at % 2 else "full" for at in range(num_layers))
    return tuple("full" if kind else "linear" for kind in listed)


def _kimi(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    nested = fields.values.get("linear_attn_config")
    if not isinstance(nested, dict):
        return tuple("linear" if (at + 1) % 4 else "full" for at in range(num_layers))
    inner = Fields(values=nested, where=f"{fields.where}: linear_attn_config")
    full = inner.sequence("full_attn_layers") or ()  # counted from 1
    return tuple("full" if at + 1 in full else "linear" for at in range(num_layers))


def _groups(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    every = fields.count("layer_group_size")
    return tuple("full" if (at + 1) % every == 0 else "linear" for at in range(num_layers))


def _ratios(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    fields.skip("compress_rates", "compress_rate_csa", "compress_rate_hca", "num_hash_layers")
    listed = fields.of_layers("compress_ratios", num_layers)
    if listed is not None:
        unknown = [rate for rate in dict.fromkeys(listed) if rate not in _RATES]
        if unknown:
            raise fields.contradiction(
                f"compress_ratios has rates that are not known: {unknown}", "known are 0, 4, 128"
            )
        return tuple(_RATES[cast("int", rate)] for rate in listed)
    return tuple("heavy" if at < 2 or at % 2 == 0 else "compressed" for at in range(num_layers))


def _mamba(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    del fields
    return ("linear",) * num_layers


def _jamba(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    period = fields.count("attn_layer_period")
    offset = fields.count("attn_layer_offset", least=0)
    return tuple("full" if at % period == offset else "linear" for at in range(num_layers))


def _chunks(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    fields.optional("attention_chunk_size")
    listed = fields.of_layers("no_rope_layers", num_layers)
    step = fields.count("no_rope_layer_interval", default=4)
    if listed is not None:
        return tuple("chunked" if rope else "full" for rope in listed)
    return tuple("chunked" if (at + 1) % step else "full" for at in range(num_layers))


def _lfm(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    full = fields.sequence("full_attn_idxs")
    return tuple("full" if full is None or at in full else "conv" for at in range(num_layers))


def _mimo(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    listed = fields.of_layers("hybrid_layer_pattern", num_layers)
    if listed is None:
        return ("full",) * num_layers
    return tuple("sliding" if kind else "full" for kind in listed)


def _indexed(fields: Fields, num_layers: int) -> tuple[MixerKind, ...]:
    fields.skip("indexer_types")
    return ("indexed",) * num_layers


_RULES: Mapping[str, Callable[[Fields, int], tuple[MixerKind, ...]]] = {
    "windowed": _windowed,
    "qwen_window": _qwen_window,
    "interval": _interval,
    "alternate": _alternate,
    "global": _global,
    "lightning": _lightning,
    "kimi": _kimi,
    "groups": _groups,
    "ratios": _ratios,
    "mamba": _mamba,
    "jamba": _jamba,
    "chunks": _chunks,
    "lfm": _lfm,
    "mimo": _mimo,
    "indexed": _indexed,
}
