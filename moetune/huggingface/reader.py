"""Reading of a `config.json`: from its fields to a decoder, or to an error that names a field."""

from collections.abc import Mapping

from moetune.domain.architecture import Block, Decoder, Part, Prediction
from moetune.domain.errors import InputError
from moetune.domain.spelling import nearest_then
from moetune.huggingface.families import FAMILIES
from moetune.huggingface.family import Family, has_bias
from moetune.huggingface.ffn import dense_ffn, routed_experts
from moetune.huggingface.fields import HEADS, WIDTH, Fields, looks_relevant
from moetune.huggingface.hybrid import hybrid_blocks, hybrid_predictions
from moetune.huggingface.kinds import MixerKind, mixer_kinds
from moetune.huggingface.sparse import blocks_with_experts

_NESTED = ("text_config", "thinker_config", "llm_config", "language_config", "language_model")
PREDICTIONS = (
    "num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers",
    "mtp_num_layers",
)  # fmt: skip


def read_decoder(document: Mapping[str, object], *, name: str, where: str) -> Decoder:
    """Return the language model that a configuration describes.

    Args:
        document: the values of a `config.json`; those of a vision-language model hold the language
            model's in `text_config`.
        name: of the model.
        where: the file or name, for errors.

    Raises:
        InputError: the architecture is unknown (with the fields that were not understood), a field
            is missing, wrong or contradicts another, or one that looks relevant is not understood.
    """
    fields = Fields(values=_language_model(document), where=where)
    family_name = fields.text("model_type")
    family = FAMILIES.get(family_name)
    if family is None:
        raise _unknown(fields, family_name)
    fields.skip(*family.harmless)
    try:
        decoder = _decoder(fields, family, name=name, family_name=family_name)
    except InputError as error:
        if error.what.startswith(where):
            raise
        hint = error.hint or "correct the fields in the configuration"
        raise InputError(f"{where}: {error.what}", hint) from None
    unread = fields.unread()
    if unread:
        raise InputError(
            f"{where}: {family_name} does not have these fields, which may change sizes: "
            f"{', '.join(unread)}",
            "remove them if they change nothing; else this variant is not supported",
        )
    return decoder


def _language_model(document: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields of the language model: those of a nested configuration, if there is one."""
    values = document
    for _ in range(2):
        for key in _NESTED:
            inner = values.get(key)
            if isinstance(inner, Mapping):
                tied = values.get("tie_word_embeddings")
                values = {**({} if tied is None else {"tie_word_embeddings": tied}), **inner}
                break
    if values.get("model_type") == "dbrx":
        return _flattened(values)
    return values


def _flattened(values: Mapping[str, object]) -> Mapping[str, object]:
    """Return DBRX's fields with those of its two nested configurations."""
    rest = {key: value for key, value in values.items() if key not in {"ffn_config", "attn_config"}}
    ffn, attention = values.get("ffn_config"), values.get("attn_config")
    if isinstance(ffn, Mapping):
        rest |= {key: ffn[key] for key in ("ffn_hidden_size", "moe_num_experts", "moe_top_k")
                 if key in ffn}  # fmt: skip
    if isinstance(attention, Mapping) and "kv_n_heads" in attention:
        rest["num_key_value_heads"] = attention["kv_n_heads"]
    return rest


def _unknown(fields: Fields, name: str) -> InputError:
    if not name:
        return fields.missing("model_type")
    relevant = [key for key in sorted(fields.values) if looks_relevant(key)]
    return InputError(
        f"{fields.where}: architecture {name!r} is unknown; its fields that were not understood: "
        f"{', '.join(relevant) or 'none'}",
        nearest_then(f"known are {', '.join(sorted(FAMILIES))}", name, FAMILIES),
    )


def _decoder(fields: Fields, family: Family, *, name: str, family_name: str) -> Decoder:
    d_model, vocabulary = fields.count(*WIDTH), fields.count("vocab_size", "padded_vocab_size")
    streams = 1 if family.streams == "one" else fields.count("hc_mult", default=4)
    if family_name == "nemotron_h":
        blocks = hybrid_blocks(fields, family)
        predictions = hybrid_predictions(fields, family)
    else:
        blocks = _blocks(fields, family, family_name, streams=streams)
        predictions = _predictions(fields, blocks, family_name)
    norms = d_model * (2 if family.has_norm_biases else 1)
    if family.streams != "one" and family_name != "glm5_next_text":
        norms += streams * (streams * d_model + 1) + 1
    positions = fields.count(*family.positions) if family.positions else 0
    return Decoder(
        name=name,
        family=family_name,
        d_model=d_model,
        vocab_size=vocabulary,
        blocks=blocks,
        norms=norms,
        is_tied=fields.flag("tie_word_embeddings", default=family.is_tied),
        embedding_extra=positions * d_model,
        head_biases=vocabulary if has_bias(fields, family.head_bias) else 0,
        predictions=predictions,
    )


def _blocks(fields: Fields, family: Family, family_name: str, *, streams: int) -> tuple[Block, ...]:
    d_model = fields.count(*WIDTH)
    kinds = mixer_kinds(fields, family.kinds)
    sparse = blocks_with_experts(fields, family.sparse)
    mixers: dict[tuple[MixerKind, str], Part] = {}
    _skip_unused(fields, family, kinds=kinds, sparse=sparse)
    norms = family.norms * d_model
    if family.streams != "one":
        is_full = family.streams == "full"
        mixing = streams * (2 + streams if is_full else 2)
        norms += 2 * (mixing * (streams * d_model + 1) + (3 if is_full else 2))
    found = []
    for at, (kind, has_experts) in enumerate(zip(kinds, sparse, strict=True)):
        own = fields.of_block(at)
        key = kind, repr(own.overrides)
        if key not in mixers:
            mixers[key] = _mixer(own, family, kind)
        mixer = mixers[key]
        ffn: Part = routed_experts(own, family, at) if has_experts else dense_ffn(own, family)
        extra = d_model * family.norms_of_experts if has_experts else 0
        parts: tuple[Part, ...] = (mixer, ffn)
        if family.has_dense_beside and has_experts:
            parts = (mixer, dense_ffn(own, family), ffn)
        if family_name == "longcat_flash":  # experts run beside the second attention
            dense = dense_ffn(fields, family)
            parts, extra = (mixer, ffn, dense, mixer, dense), norms
        found.append(Block(parts=parts, norms=norms + extra, streams=streams))
    return tuple(found)


def _skip_unused(
    fields: Fields, family: Family, *, kinds: tuple[MixerKind, ...], sparse: tuple[bool, ...]
) -> None:
    """Count fields as read that only blocks would use which this model does not have."""
    if all(sparse) and not family.has_dense_beside:
        fields.skip(*(set(family.dense_width) - set(family.expert_width)))
    if set(kinds) <= {"linear", "conv"}:
        fields.skip(*HEADS, "num_key_value_heads", "head_dim", "attention_bias")
    if fields.has("layer_types"):
        if "sliding" not in kinds:
            fields.skip("sliding_window")
        if "indexed" not in kinds:
            fields.skip(*(name for name in fields.values if name.startswith("index_")))


def _mixer(fields: Fields, family: Family, kind: MixerKind) -> Part:
    if kind in {"linear", "conv"}:
        if family.linear is None:
            raise fields.contradiction(
                f"{family.types[0]} has no {kind} attention", "correct layer_types"
            )
        return family.linear(fields, family, kind)
    return family.attention(fields, family, kind)


def _predictions(
    fields: Fields, blocks: tuple[Block, ...], family_name: str
) -> tuple[Prediction, ...]:
    """Return the steps of multi-token prediction: each a block like the last one."""
    d_model = fields.count(*WIDTH)
    fields.skip("mtp_transformer_layers", "mtp_use_dedicated_embeddings", "mtp_layer_types",
                "mtp_mlp_layer_types")  # fmt: skip
    steps = fields.count(*PREDICTIONS, default=0, least=0)
    if not fields.flag("use_mtp", default=True):
        steps = 0
    block = blocks[-1]
    if family_name == "deepseek_v4" and steps:
        sliding = _mixer(fields, FAMILIES[family_name], "sliding")
        block = Block(parts=(sliding, *block.parts[1:]), norms=block.norms)
    one = Prediction(blocks=(block,), projection=2 * d_model**2, norms=3 * d_model)
    return (one,) * steps
