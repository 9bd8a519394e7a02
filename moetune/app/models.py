"""The model of a plan, and what `models show` says of a decoder."""

from pathlib import Path
from typing import TYPE_CHECKING

from moetune.domain.architecture import Block, Decoder
from moetune.domain.errors import InputError
from moetune.domain.model import MODELS
from moetune.huggingface.registry import FoundModel, find_decoder_model, is_decoder_name

if TYPE_CHECKING:  # its module loads numpy, and lists of models need none
    from moetune.domain.training_document import TrainingInputs


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
