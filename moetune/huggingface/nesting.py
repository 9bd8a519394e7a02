"""The language model's fields inside a configuration, and towers beside it that are not counted."""

from collections.abc import Iterator, Mapping

from moetune.huggingface.harmless import is_harmless

_NESTED = (
    "text_config", "thinker_config", "llm_config", "language_config", "language_model",
    "llm_text_config",
)  # fmt: skip
_SHARED = ("model_type", "tie_word_embeddings")
"""Fields that a nested configuration has from the outer one where it lacks them."""
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


def language_model(document: Mapping[str, object]) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """Return the fields of the language model, and what the parts beside it are for.

    A vision-language model nests its language model. Configurations next to it are of towers, such
    as ("vision", "audio"), and no part of the fields that are returned.
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
        values = _flattened(values)
    return {key: value for key, value in values.items() if key not in _TOWERS}, tuple(towers)


def _towers_of(values: Mapping[str, object]) -> Iterator[str]:
    return (_TOWERS[key] for key in values if key in _TOWERS and values[key])


def _others_of(values: Mapping[str, object]) -> Iterator[str]:
    """Return names of nested configurations that are neither the language model nor known."""
    for key, value in values.items():
        is_named = key in _NESTED or key in _TOWERS or is_harmless(key, value)
        if isinstance(value, Mapping) and value and key.endswith("_config") and not is_named:
            yield key.removesuffix("_config").replace("_", " ")


def _flattened(values: Mapping[str, object]) -> Mapping[str, object]:
    """Return DBRX's fields with those of its two nested configurations."""
    flat = dict(values)
    for key in ("ffn_config", "attn_config"):
        inner = flat.pop(key, None)
        if isinstance(inner, Mapping):
            flat |= {name: value for name, value in inner.items() if name != "model_type"}
    return flat
