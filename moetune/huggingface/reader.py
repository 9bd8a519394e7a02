"""Reading of a `config.json` into a decoder, or into an error that names all wrong fields."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from moetune.domain.architecture import Block, Decoder, Part, Prediction
from moetune.domain.errors import InputError
from moetune.domain.experts import DenseFfn
from moetune.huggingface import refusals
from moetune.huggingface.families import FAMILIES
from moetune.huggingface.family import (
    EXPERTS,
    GROUPS,
    SHARED,
    TOP_GROUPS,
    TOP_K,
    Family,
    dense_ffn,
    has_bias,
    routed_experts,
)
from moetune.huggingface.fields import HEADS, KEY_HEADS, WIDTH, Fields, is_harmless
from moetune.huggingface.kinds import LAYERS, MixerKind, blocks_with_experts, mixer_kinds
from moetune.huggingface.mixers import HEAD_WIDTH, compressed

_CLASS = re.compile(r"^(\w+?)(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$")
_LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
_PREDICTED = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
_KINDS = {
    "mamba": "mamba", "linear_attention": "mamba", "attention": "attention",
    "full_attention": "attention", "moe": "moe", "mlp": "mlp",
}  # fmt: skip

_NESTED = (
    "text_config", "thinker_config", "llm_config", "language_config", "language_model",
    "llm_text_config",
)  # fmt: skip
_SHARED = ("model_type", "tie_word_embeddings")
"""Fields that a nested configuration takes from the outer configuration if it lacks them."""
_TOWERS: Mapping[str, str] = {
    "vision_config": "vision",
    "visual_config": "vision",
    "visual": "vision",
    "vit_config": "vision",
    "vision_tower_config": "vision",
    "image_config": "vision",
    "img_token_compression_config": "vision",
    "perceiver_config": "vision",
    "projector_config": "vision",
    "vq_config": "image tokens",
    "audio_config": "audio",
    "sound_config": "audio",
    "speech_config": "audio",
    "audio_encoder_config": "audio",
    "talker_config": "speech",
    "code2wav_config": "speech",
    "token2wav_config": "speech",
    "tts_config": "speech",
    "audio_decoder_config": "speech",
}


def read_decoder(document: Mapping[str, object], *, name: str, where: str) -> Decoder:
    """Return the language model that a configuration describes.

    Args:
        document: the values of a `config.json`; a vision-language model has the values of its
            language model in `text_config`.
        name: name of the model.
        where: the file or name, for errors.

    Raises:
        InputError: the architecture is unknown, or fields are missing, wrong, contradict each
            other, or are not understood and may change sizes. The error names all of them.
    """
    values, towers = language_model(document)
    fields = Fields(values=values)
    stated = fields.text("model_type")
    family = _family_of(values, stated)
    if family is None:
        raise refusals.unknown_architecture(
            where, fields, stated or _class_of(values), _readings(values)
        )
    fields = replace(fields, values={**family.omitted, **values})
    decoder = _read(fields, family, name=name, towers=towers)
    if decoder is None:
        for tried, _ in _readings(values).values():  # fields that were not reached are not wrong
            fields.read |= tried.read
    if decoder is None or fields.is_flawed or fields.unread():
        raise refusals.unreadable(where, fields, family.name, decoder)
    return decoder


def language_model(document: Mapping[str, object]) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """Return the fields of the language model, and the purposes of the towers next to it.

    A vision-language model nests its language model. Configurations next to it are of towers, such
    as ("vision", "audio"), and are left out of the returned fields.
    """
    values, towers = document, dict.fromkeys(_towers_of(document))
    for _ in range(2):
        name = next((key for key in _NESTED if isinstance(values.get(key), Mapping)), "")
        inner = values.get(name)
        if isinstance(inner, Mapping):
            towers |= dict.fromkeys((*_others_of(values), *_towers_of(inner)))
            outer = {key: values[key] for key in _SHARED if values.get(key) is not None}
            values = {**outer, **inner}
    if values.get("model_type") == "dbrx":
        values = _flatten_dbrx(values)
    return {key: value for key, value in values.items() if key not in _TOWERS}, tuple(towers)


def _towers_of(values: Mapping[str, object]) -> Iterator[str]:
    return (_TOWERS[key] for key in values if key in _TOWERS and values[key])


def _others_of(values: Mapping[str, object]) -> Iterator[str]:
    """Yield names of nested configurations that are neither the language model nor known."""
    for key, value in values.items():
        is_named = key in _NESTED or key in _TOWERS or is_harmless(key, value)
        if isinstance(value, Mapping) and value and key.endswith("_config") and not is_named:
            yield key.removesuffix("_config").replace("_", " ")


def _flatten_dbrx(values: Mapping[str, object]) -> Mapping[str, object]:
    """Return DBRX's fields together with the fields of its two nested configurations."""
    flat = dict(values)
    for key in ("ffn_config", "attn_config"):
        inner = flat.pop(key, None)
        if isinstance(inner, Mapping):
            flat |= {name: value for name, value in inner.items() if name != "model_type"}
    return flat


def _family_of(values: Mapping[str, object], stated: str) -> Family | None:
    """Return the family by the type, else by the name of a class; None if neither is known."""
    for name in (stated, f"{stated}_text"):
        if name in FAMILIES:
            return FAMILIES[name]
    plain = {name.replace("_", "").replace("-", ""): row for name, row in FAMILIES.items()}
    return plain.get(_class_of(values).lower())


def _class_of(values: Mapping[str, object]) -> str:
    """Return the name of the model's class without its task; "" without a class."""
    classes = values.get("architectures")
    match = _CLASS.match(str(classes[0])) if isinstance(classes, list) and classes else None
    return "" if match is None else match[1]


def _readings(values: Mapping[str, object]) -> dict[str, tuple[Fields, Decoder | None]]:
    """Return the fields as each family reads them, with the resulting decoder or None."""
    readings = {}
    for name, family in FAMILIES.items():
        fields = Fields(values={**values, "model_type": name})
        fields.skip("model_type")
        readings[name] = fields, _read(fields, family, name=name, towers=())
    return readings


def _read(fields: Fields, family: Family, *, name: str, towers: tuple[str, ...]) -> Decoder | None:
    """Return the decoder, or None with problems reported in the fields."""
    fields.skip(*family.harmless.split())
    for flag, allowed in family.only.items():
        fields.only(flag, allowed)
    try:
        return _decoder(fields, family, name=name, towers=towers)
    except InputError as error:
        _report(fields, error)
        return None


def _report(fields: Fields, error: InputError) -> None:
    """Report sizes that contradict each other, unless a stand-in value may be the cause."""
    if not fields.stand_ins:
        fields.report(error.what, error.hint or "correct the fields in the configuration")


def _decoder(fields: Fields, family: Family, *, name: str, towers: tuple[str, ...]) -> Decoder:
    d_model, vocabulary = fields.count(*WIDTH), fields.count("vocab_size", "padded_vocab_size")
    streams = 1 if family.streams == "one" else fields.count("hc_mult", default=4)
    if family.has_pattern:
        blocks = _hybrid_blocks(fields, family)
    else:
        blocks = _blocks(fields, family, streams=streams)
    norms = d_model * (2 if family.has_norm_biases else 1)
    norms += _residual_norms(fields, family)
    if family.streams != "one" and family.mixes_streams_at_end:
        norms += streams * (streams * d_model + 1) + 1
    positions = fields.count(*family.positions) if family.positions else 0
    tables, projections = _tables(fields, vocabulary) if family.has_ngrams else (0, 0)
    return Decoder(
        name=name,
        family=family.name,
        d_model=d_model,
        vocab_size=vocabulary,
        blocks=blocks,
        norms=norms,
        is_tied=fields.flag("tie_word_embeddings", default=family.is_tied),
        embedding_extra=positions * d_model + projections,
        tables=tables,
        head_biases=vocabulary if has_bias(fields, family.head_bias) else 0,
        predictions=_predictions(fields, family, blocks),
        uncounted=towers,
    )


def _tables(fields: Fields, vocabulary: int) -> tuple[int, int]:
    """Return the parameters of LongCat's tables of n-grams, and of their projections.

    Table i has ratio·vocabulary + 2i + 1 rows. The k·(n − 1) tables divide the width; each projects
    to the whole width (arXiv 2601.21204; modeling_longcat_ngram.py of LongCat-Flash-Lite).
    """
    if not fields.has("ngram_vocab_size_ratio"):
        return 0, 0
    d_model, ratio = fields.count(*WIDTH), fields.count("ngram_vocab_size_ratio")
    longest = fields.count("emb_neighbor_num", least=2)
    count = fields.count("emb_split_num") * (longest - 1)
    width = d_model // count
    rows = count * ratio * vocabulary + count**2  # the sum of 2i + 1 over all tables
    return width * rows, count * width * d_model


def _blocks(fields: Fields, family: Family, *, streams: int) -> tuple[Block, ...]:
    d_model = fields.count(*WIDTH)
    kinds = mixer_kinds(fields, family.kinds)
    sparse = blocks_with_experts(fields, family.sparse)
    mixers: dict[tuple[MixerKind, str], Part] = {}
    ffns: dict[tuple[bool, str, str], Part] = {}
    lists = _expert_lists(fields, family)
    _skip_unused(fields, family, kinds=kinds, sparse=sparse)
    norms = family.norms * d_model + 2 * _residual_norms(fields, family)
    if family.streams != "one":
        is_full = family.streams == "full"
        mixing = streams * (2 + streams if is_full else 2)
        norms += 2 * (mixing * (streams * d_model + 1) + (3 if is_full else 2))
    blocks = []
    for number, (kind, has_experts) in enumerate(zip(kinds, sparse, strict=True)):
        block = fields.of_block(number)
        key = kind, repr(block.overrides)
        if key not in mixers:
            mixers[key] = _build(fields, partial(_mixer, block, family, kind))
        mixer = mixers[key]
        entries = [values[number : number + 1] for values in lists]
        width = has_experts, key[1], repr(entries) if has_experts and lists else ""
        if width not in ffns:
            experts = partial(routed_experts, block, family, number)
            build = experts if has_experts else partial(dense_ffn, block, family)
            ffns[width] = _build(fields, build)
        ffn = ffns[width]
        extra = d_model * family.norms_of_experts if has_experts else 0
        parts: tuple[Part, ...] = (mixer, ffn)
        if family.has_parallel_dense and has_experts:
            parts = (mixer, dense_ffn(block, family), ffn)
        if family.has_shortcut:  # experts run while the second attention does
            dense = dense_ffn(fields, family)
            parts, extra = (mixer, ffn, dense, mixer, dense), norms
        blocks.append(Block(parts=parts, norms=norms + extra, streams=streams))
    return tuple(blocks)


def _expert_lists(fields: Fields, family: Family) -> list[list[object]]:
    """Return the lists with the number of experts, the top-k or the width of every block."""
    values = (fields.values.get(name) for name in (*EXPERTS, *TOP_K, *family.expert_width))
    return [value for value in values if isinstance(value, list)]


def _build(fields: Fields, build: Callable[[], Part]) -> Part:
    """Return a part; report sizes that contradict each other, and return a stand-in part."""
    try:
        return build()
    except InputError as error:
        _report(fields, error)
        return DenseFfn(d_model=1, d_hidden=1)


def _residual_norms(fields: Fields, family: Family) -> int:
    """Return the parameters that weigh earlier residuals: a norm and a vector of the same width.

    Source: Megatron-Bridge, `kimi_k3_layers.py`: before attention, FFN and the head.
    """
    if not family.has_residual_bank or fields.optional("attn_res_block_size") is None:
        return 0
    return 2 * fields.count(*WIDTH)


def _skip_unused(
    fields: Fields, family: Family, *, kinds: tuple[MixerKind, ...], sparse: tuple[bool, ...]
) -> None:
    """Mark fields as read that belong to kinds of blocks which this model does not have."""
    if all(sparse) and not family.has_parallel_dense:
        fields.skip(*(set(family.dense_width) - set(family.expert_width)))
    if "sliding" not in kinds:
        fields.skip("max_window_layers")
    if family.linear is not None and "linear" not in kinds:
        fields.skip(*(name for name in fields.values if name.startswith("mamba_")))
    if set(kinds) <= {"linear", "conv"}:
        fields.skip(*HEADS, *KEY_HEADS, *HEAD_WIDTH, "attention_bias")
    if fields.has("layer_types"):
        if "sliding" not in kinds:
            fields.skip("sliding_window")
        if "indexed" not in kinds:
            fields.skip(*(name for name in fields.values if name.startswith("index_")))


def _mixer(fields: Fields, family: Family, kind: MixerKind) -> Part:
    if kind in {"linear", "conv"}:
        if family.linear is None:
            fields.report(f"{family.name} has no {kind} attention", "correct layer_types")
            return family.attention(fields, family, "full")
        return family.linear(fields, family, kind)
    return family.attention(fields, family, kind)


def _predictions(
    fields: Fields, family: Family, blocks: tuple[Block, ...]
) -> tuple[Prediction, ...]:
    """Return the steps of multi-token prediction, with the blocks of each step."""
    d_model = fields.count(*WIDTH)
    fields.skip("mtp_transformer_layers", "mtp_use_dedicated_embeddings", "mtp_layer_types",
                "mtp_mlp_layer_types")  # fmt: skip
    steps = fields.count(*family.predictions, default=0, least=0)
    predicts = fields.flag("use_mtp", default=True)
    pattern = _pattern(fields, *_PREDICTED) if family.has_pattern else None
    if not steps or not predicts:
        return ()
    predicted = blocks[-1:]
    if family.has_pattern:
        kinds = pattern or ("attention", "moe")
        predicted = tuple(_hybrid_block(fields, family, kind, 0) for kind in kinds)
    elif family.attention is compressed:
        sliding = _mixer(fields, family, "sliding")
        predicted = (Block(parts=(sliding, *blocks[-1].parts[1:]), norms=blocks[-1].norms),)
    return (Prediction(blocks=predicted, projection=2 * d_model**2, norms=3 * d_model),) * steps


def _hybrid_blocks(fields: Fields, family: Family) -> tuple[Block, ...]:
    """Return the blocks of the pattern; report a missing pattern and return ()."""
    kinds = _pattern(fields, "hybrid_override_pattern", "layers_block_type", "layer_types")
    if kinds is None:
        fields.missing("hybrid_override_pattern", "layers_block_type")
        return ()
    stated = fields.optional(*LAYERS)
    if stated is not None and stated != len(kinds):
        fields.report(
            f"num_hidden_layers ({stated}) and the pattern of blocks ({len(kinds)}) differ",
            "correct one of the two",
        )
    if "mlp" not in kinds:
        fields.skip(*family.dense_width)
    if "moe" not in kinds:
        fields.skip(*EXPERTS, *TOP_K, *SHARED, *GROUPS, *TOP_GROUPS, *family.expert_width,
                    *family.shared_width)  # fmt: skip
    return tuple(_hybrid_block(fields, family, kind, number) for number, kind in enumerate(kinds))


def _pattern(fields: Fields, letters: str, *lists: str) -> tuple[str, ...] | None:
    text = fields.text(letters)
    listed = fields.sequence(*lists)
    kinds = None
    if listed is not None:
        unknown = [kind for kind in dict.fromkeys(listed) if kind not in _KINDS]
        if unknown:
            fields.report(
                f"{lists[0]} has kinds of blocks that are not known: {unknown}",
                f"known are {', '.join(_KINDS)}",
            )
        kinds = tuple(_KINDS.get(str(kind), "mlp") for kind in listed)
    if text:
        wrong = [letter for letter in dict.fromkeys(text) if letter not in _LETTERS]
        if wrong:
            fields.report(
                f"{letters} has letters that are not known: {wrong}",
                "known are M (mamba), E (experts), * (attention) and - (dense FFN)",
            )
        spelled = tuple(_LETTERS.get(letter, "mlp") for letter in text)
        if kinds not in {None, spelled}:
            fields.report(f"{letters} and {lists[0]} differ", "keep one of them")
        kinds = spelled
    return kinds


def _hybrid_block(fields: Fields, family: Family, kind: str, number: int) -> Block:
    """Return a block of a hybrid's pattern, which is a single part."""
    part: Part
    if kind == "moe":
        part = routed_experts(fields, family, number)
    elif kind == "mlp":
        part = dense_ffn(fields, family)
    elif kind == "mamba" and family.linear is not None:
        part = family.linear(fields, family, "linear")
    else:
        part = family.attention(fields, family, "full")
    return Block(parts=(part,), norms=fields.count(*WIDTH))
