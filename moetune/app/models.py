"""Models by name or by path: of the papers, of sizes, of the registry, of a `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.domain.architecture import Block, Decoder
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.model import MODELS, WHOLE_MODELS, Model, WholeModel, paper_decoder, read_shape
from moetune.domain.spelling import nearest_then
from moetune.huggingface.registry import model_names, named_model, read_model, resolve_name

if TYPE_CHECKING:  # its module loads numpy, and lists of models need none
    from moetune.domain.training_document import TrainingInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model that was found.

    Args:
        decoder: None for a layer alone.
        published: what its authors say of its size; "" where nothing is known.
        paper: the entry of a paper's layer; None for others.
        whole: the entry of a paper's whole model, or of one that is named by its sizes; None for
            others.
        config: of Hugging Face, as far as it is known.
    """

    title: str
    source: str
    layer: LayerShape
    decoder: Decoder | None
    published: str = ""
    paper: Model | None = None
    whole: WholeModel | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


def find_decoder_model(name: str, *, world_size: int) -> FoundModel:
    """Return a model: a paper's name, sizes, a `config.json` or its folder, or a registry's name.

    Args:
        world_size: ranks, for papers' layers whose experts grow with them.

    Raises:
        InputError: there is none, or its configuration is wrong or not understood.
    """
    if name in MODELS:
        return _paper(MODELS[name], world_size)
    if (whole := _whole(name)) is not None:
        decoder = paper_decoder(name, whole.shape)
        return FoundModel(
            title=whole.title, source=whole.source, layer=decoder.layer, decoder=decoder,
            whole=whole,
        )  # fmt: skip
    if _is_there(name):
        model = read_model(Path(name).expanduser())
    elif resolve_name(name) is not None:
        model = named_model(name)
    else:
        raise _unknown(name)
    return FoundModel(
        title=model.title,
        source=model.source,
        layer=model.decoder.layer,
        decoder=model.decoder,
        published=model.published,
        config=model.config,
    )


def find_planned_model(inputs: "TrainingInputs", *, given: str | None) -> FoundModel:
    """Return the model of a plan: the one that is given, else its configuration, else its name.

    Raises:
        InputError: there is none, or its configuration is wrong or not understood.
    """
    path, name = inputs.model_path, inputs.model
    is_lost = not Path(path).is_file() if path else name not in MODELS and not is_decoder_name(name)
    if given is None and is_lost:
        raise InputError(
            f"the configuration of {name}, {path or 'which has no path in the plan'}, is not there",
            "name it with --model, such as --model path/to/config.json",
        )
    return find_decoder_model(given or path or name, world_size=inputs.world_size)


def is_decoder_name(name: str) -> bool:
    """Return whether a name is that of a whole model, and not of a layer."""
    return name not in MODELS and (known_name(name) is not None or _is_there(name))


def known_name(name: str) -> str | None:
    """Return the name of a whole model without a file: a paper's, sizes, or the registry's."""
    return name if _whole(name) is not None else resolve_name(name)


def whole_names() -> tuple[str, ...]:
    """Return the names of all whole models: of the papers, and of the registry."""
    return *WHOLE_MODELS, *model_names()


def check_known(name: str) -> None:
    """Raise InputError where a name is of no model, with the nearest of all names."""
    if name not in MODELS and not is_decoder_name(name):
        raise _unknown(name)


def _is_there(name: str) -> bool:
    """Return whether a name is a path; the empty one, which is the working directory's, is none."""
    return bool(name) and (Path(name).expanduser().exists() or name.endswith(".json"))


def _unknown(name: str) -> InputError:
    names = (*MODELS, *whole_names())
    return InputError(
        f"model {name!r} is unknown, and no such file or folder exists",
        nearest_then(
            "`moetune models list` names them; or give the path of a config.json",
            name.rpartition("/")[2].lower(),
            names,
        ),
    )


def _paper(model: Model, world_size: int) -> FoundModel:
    return FoundModel(
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


def decoder_document(decoder: Decoder | None, length: int) -> dict[str, object]:
    """Return what `models show --json` says of a decoder; every key with null for None.

    Args:
        length: tokens of a sequence, for FLOPs.
    """
    keys = ("num_layers", "num_moe_layers", "parameters", "active_parameters",
            "flops_per_token", "parts", "kinds", "runs", "layers", "mtp")  # fmt: skip
    if decoder is None:
        return dict.fromkeys(keys)
    flops = decoder.flops_per_token(length)
    kinds = [_kind(decoder, block, length) for block in decoder.kinds]
    return {
        "num_layers": decoder.num_layers,
        "num_moe_layers": decoder.num_moe_layers,
        "parameters": int(decoder.parameters.total),
        "active_parameters": int(decoder.active_parameters.total),
        "flops_per_token": flops.total,
        "parts": {
            "parameters": decoder.parameters,
            "active_parameters": decoder.active_parameters,
            "flops_per_token": flops,
        },
        "kinds": kinds,
        "runs": [
            {"first": first, "num_layers": count, "kind": kind}
            for first, count, kind in decoder.runs
        ],
        "layers": _layers(decoder),
        "mtp": {"steps": len(decoder.predictions), "parameters": decoder.prediction_parameters},
    }


def _kind(decoder: Decoder, block: Block, length: int) -> dict[str, object]:
    return {
        "num_layers": decoder.blocks.count(block),
        "parts": [
            {"part": type(part).__name__, "sizes": part, "widths": part.widths}
            for part in block.parts
        ],
        "parameters": block.parameters,
        "active_parameters": block.active_parameters,
        "flops_per_token": block.flops_per_token(length),
    }


def _layers(decoder: Decoder) -> list[dict[str, object]]:
    """Return each block's number, kind and parameters by part."""
    numbers = {kind: number for number, kind in enumerate(decoder.kinds)}
    return [
        {"layer": number, "kind": numbers[block], "parameters": block.parameters}
        for number, block in enumerate(decoder.blocks)
    ]
