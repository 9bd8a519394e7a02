"""Models by name or by path: from the papers, by sizes, from the registry or a `config.json`.

Each model of the registry is a JSON file: its `title`, the `source` of its configuration,
`aliases`, the `published` size, and the `config`. The config has the fields that give sizes, and is
read like a user's file.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from moetune.domain.architecture import Block, Decoder, Part
from moetune.domain.attention import GroupedQueryAttention
from moetune.domain.document import refuse_pointer, refuse_zip
from moetune.domain.errors import InputError
from moetune.domain.experts import DenseFfn, RoutedExperts, Router
from moetune.domain.layer import LayerShape
from moetune.domain.model import MODELS, WHOLE_MODELS, Model, Transformer, WholeModel, read_shape
from moetune.domain.spelling import nearest_then
from moetune.huggingface.reader import read_decoder

_FOLDER = Path(__file__).resolve().parent / "models"
_SUFFIX = re.compile(
    r"-(instruct|base|pretrain|chat|hf|it|pt|fp8|bf16|nvfp4|mxfp4|thinking|original|16e|128e|17b"
    r"|v0\.[0-9]+|v1|exp|speciale|terminus|[0-9]{4})$"
)
_PREFIX = re.compile(r"^(meta-|nvidia-)")
_DIFFUSION = ("_diffusers_version", "sample_size", "cross_attention_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """The model of a name or a path.

    Args:
        decoder: None for a layer alone.
        published: size that the authors state; "" if it is not known.
        paper: the entry of a paper's layer; None for other models.
        whole: the entry of a paper's whole model, or of a model named by its sizes; None for other
            models.
        config: fields of the Hugging Face configuration, as far as they are known.
    """

    title: str
    source: str
    layer: LayerShape
    decoder: Decoder | None
    published: str = ""
    paper: Model | None = None
    whole: WholeModel | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


def find_decoder_model(name: str, *, world_size: int, reads_files: bool = True) -> ResolvedModel:
    """Return a model by a paper's name, sizes, a `config.json` or its folder, or a registry's name.

    Args:
        world_size: ranks, for papers' layers whose experts grow with them.
        reads_files: whether the name may be a path on this machine.

    Raises:
        InputError: the model is unknown, or its configuration is wrong or not understood.
    """
    if name in MODELS:
        return _paper(MODELS[name], world_size)
    if (whole := _whole(name)) is not None:
        decoder = paper_decoder(name, whole.shape)
        return ResolvedModel(
            title=whole.title, source=whole.source, layer=decoder.layer, decoder=decoder,
            whole=whole,
        )  # fmt: skip
    if reads_files and _is_there(name):
        model = read_model(Path(name).expanduser())
    elif resolve_name(name) is not None:
        model = named_model(name)
    else:
        raise _unknown_model(name)
    return ResolvedModel(
        title=model.title,
        source=model.source,
        layer=model.decoder.layer,
        decoder=model.decoder,
        published=model.published,
        config=model.config,
    )


def is_decoder_name(name: str) -> bool:
    """Return whether a name is of a whole model, not of a layer."""
    return name not in MODELS and (known_name(name) is not None or _is_there(name))


def known_name(name: str) -> str | None:
    """Return a whole model's known name: of a paper, of sizes, or of the registry; else None."""
    return name if _whole(name) is not None else resolve_name(name)


def whole_names() -> tuple[str, ...]:
    """Return the names of all whole models of the papers and of the registry."""
    return *WHOLE_MODELS, *model_names()


def check_known(name: str) -> None:
    """Raise InputError with the nearest known name if a name is of no model."""
    if name not in MODELS and not is_decoder_name(name):
        raise _unknown_model(name)


def _is_there(name: str) -> bool:
    """Return whether a name is a path; the empty name, the working directory's, is not."""
    return bool(name) and (Path(name).expanduser().exists() or name.endswith(".json"))


def _unknown_model(name: str) -> InputError:
    names = (*MODELS, *whole_names())
    return InputError(
        f"model {name!r} is unknown, and no such file or folder exists",
        nearest_then(
            "`moetune models list` names them; or give the path of a config.json",
            name.rpartition("/")[2].lower(),
            names,
        ),
    )


def _paper(model: Model, world_size: int) -> ResolvedModel:
    return ResolvedModel(
        title=model.title, source=model.source, layer=model.layer(world_size), decoder=None,
        paper=model,
    )  # fmt: skip


def _whole(name: str) -> WholeModel | None:
    if name in WHOLE_MODELS:
        return WHOLE_MODELS[name]
    shape = read_shape(name)
    if shape is None:
        return None
    title = f"Transformer {shape.moe.d_model} wide, {shape.num_layers} layers"
    return WholeModel(name=name, title=title, source="its sizes", shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model as its authors published it, and as its configuration describes it.

    Args:
        source: source of the configuration.
        published: parameters in words, as the authors count them; "" for a user's file.
        config: the configuration; for models of the registry only the fields that give sizes.
    """

    title: str
    source: str
    decoder: Decoder
    published: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    """An entry of the registry."""

    name: str
    title: str
    source: str
    published: str


def registered_models() -> tuple[RegisteredModel, ...]:
    """Return every entry of the registry, in the order of names."""
    return tuple(
        RegisteredModel(
            name=name, title=entry["title"], source=entry["source"], published=entry["published"]
        )
        for name, entry in zip(model_names(), map(_entry, model_names()), strict=True)
    )


@cache
def model_names() -> tuple[str, ...]:
    """Return the names of the models of the registry, in alphabetic order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def resolve_name(name: str) -> str | None:
    """Return the registry's name of a model; None if the registry does not have the model.

    The owner before a slash, capitals, underscores and words such as "-Instruct" do not matter.
    """
    wanted = _PREFIX.sub("", name.rpartition("/")[2].lower().replace("_", "-"))
    spellings = [wanted]
    while (shorter := _SUFFIX.sub("", spellings[-1])) != spellings[-1]:
        spellings.append(shorter)
    names = model_names()
    for spelling in spellings:
        if spelling in names:
            return spelling
    aliased = (name for name in names if set(spellings) & {*_entry(name)["aliases"]})
    return next(aliased, None)


def named_model(name: str) -> PublishedModel:
    """Return a model of the registry.

    Raises:
        InputError: the registry does not have it; the error gives the nearest name.
    """
    registered = resolve_name(name)
    if registered is None:
        names = model_names()
        raise InputError(
            f"model {name!r} is unknown",
            nearest_then(
                f"known: {', '.join(names)}; or give the path of a config.json",
                name.rpartition("/")[2].lower(),
                names,
            ),
        )
    entry = _entry(registered)
    return PublishedModel(
        title=entry["title"],
        source=entry["source"],
        published=entry["published"],
        decoder=read_decoder(entry["config"], name=registered, where=registered),
        config=entry["config"],
    )


def read_model(path: Path) -> PublishedModel:
    """Return the model of a `config.json`, or of its folder.

    Raises:
        InputError: the file does not exist, is not JSON, or describes no known model.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"configuration {file} cannot be read: {error.strerror}",
            "give a config.json, its folder, or a model's name",
        ) from None
    refuse_pointer(content, f"configuration {file}")
    refuse_zip(content, f"configuration {file}", "unpack it, and name the config.json inside")
    try:
        document = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"configuration {file} is not valid JSON: {error}", "download the file again"
        ) from None
    if not isinstance(document, Mapping):
        raise InputError(
            f"configuration {file} is not an object of fields", "give a Hugging Face config.json"
        )
    check_fields(document, f"configuration {file}", "give the config.json next to it")
    full = file.resolve()
    name = full.parent.name if full.name == "config.json" else full.stem
    decoder = read_decoder(document, name=name, where=str(file))
    return PublishedModel(
        title=name, source=str(file), decoder=replace(decoder, path=str(full)), config=document
    )


def _entry(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return entry


def check_fields(document: Mapping[str, object], where: str, hint: str) -> None:
    """Raise InputError for documents that are not a configuration but are often next to it.

    Args:
        hint: what to give instead of an index of weights.
    """
    if "model_type" in document:
        return
    name = document.get("_class_name")
    if name is not None or any(key in document for key in _DIFFUSION):
        what = f" ({name[:80]})" if isinstance(name, str) else ""
        raise InputError(
            f"{where} is of a diffusion model{what}, and only language models are planned",
            "take the config.json of a Mixture-of-Experts or dense language model",
        )
    if "weight_map" in document:
        raise InputError(f"{where} is an index of weights, not a config.json", hint)


def paper_decoder(name: str, transformer: Transformer) -> Decoder:
    """Return a paper's transformer as a decoder: learned positions, layer norms, no biases."""
    layer, d_model = transformer.moe, transformer.moe.d_model
    attention = GroupedQueryAttention(
        d_model=d_model,
        num_heads=transformer.num_heads,
        num_kv_heads=transformer.num_heads,
        head_dim=transformer.head_dim,
        v_head_dim=transformer.head_dim,
    )
    dense = DenseFfn(
        d_model=d_model,
        d_hidden=layer.d_hidden,
        is_gated=layer.activation == "swiglu",
        function=layer.activation,
    )
    experts = RoutedExperts(
        d_model=d_model,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        d_hidden=layer.d_hidden,
        is_gated=dense.is_gated,
        function=layer.activation,
        router=Router(score="softmax", parameters=d_model * layer.num_experts),
    )
    parts: list[Part] = [
        experts if transformer.has_experts(block) else dense
        for block in range(transformer.num_layers)
    ]
    norm = 2 * d_model  # weight and bias
    return Decoder(
        name=name,
        family="gpt",
        d_model=d_model,
        vocab_size=transformer.vocab_size,
        blocks=tuple(Block(parts=(attention, part), norms=2 * norm) for part in parts),
        norms=norm,
        embedding_extra=transformer.length * d_model,
    )
