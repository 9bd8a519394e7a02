"""Loads of the experts, given by a routing's name or in a file."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from moetune.app.files import read_text
from moetune.domain.architecture import Decoder
from moetune.domain.errors import InputError
from moetune.domain.routing import BALANCED, NATURAL, ExpertLoads, LayerRouting
from moetune.domain.routing_record import (
    ModelRoutingRecord,
    RecordedLayer,
    RecordedLayers,
    RoutingRecord,
    routing_record,
)

_NAMES = {loads.name: loads for loads in (BALANCED, NATURAL)}
_Sizes: TypeAlias = tuple[int, int]
"""Number of experts of a layer, and top_k."""


def read_routing(
    wanted: str | None, decoder: Decoder
) -> tuple[Decoder, ExpertLoads | RecordedLayers]:
    """Return the model, and the routing of a name or in a file.

    A record of each layer gives the model's layers numbers, so that each has its loads.

    Args:
        wanted: None for balanced. A file has a record of `moetune.routing_record`; or, for all
            layers, a record of `MoELayer.routing_record` or a load for each expert: a JSON list,
            or numbers separated by spaces or commas.

    Raises:
        InputError: the file is missing, has other contents, or is the record of another model.
    """
    routing, name = _read(wanted)
    if isinstance(routing, ModelRoutingRecord):
        layers = _of_model(routing, name, decoder)
        return layers.with_numbers(decoder), layers
    return decoder, _of_layer(routing, name, decoder.layer.top_k).loads


def read_layer_routing(wanted: str | None, *, top_k: int) -> str:
    """Return the text of the `LayerRouting` that a name, a text or a file gives.

    Args:
        wanted: None for balanced. A file has a record of `MoELayer.routing_record`, or a load for
            each expert.
        top_k: top_k of the planned layer.

    Raises:
        InputError: the file is missing, has other contents, or is the record of a layer with
            another top_k or of a whole model.
    """
    with suppress(InputError):
        return str(LayerRouting.of(wanted or ""))
    routing, name = _read(wanted)
    if isinstance(routing, ModelRoutingRecord):
        raise InputError(
            f"routing {name} is the record of a model's {len(routing.layers)} layers, and this "
            "plan is for one layer",
            "give the record of one layer, such as layers[0] of the file, or plan with --model",
        )
    return str(_of_layer(routing, name, top_k))


def _read(wanted: str | None) -> tuple[LayerRouting | RoutingRecord | ModelRoutingRecord, str]:
    if wanted is None or wanted in _NAMES:
        return LayerRouting(loads=_NAMES[wanted or BALANCED.name]), ""
    path = Path(wanted)
    if not path.is_file():
        raise InputError(
            f"routing {wanted!r} is neither a name nor a file",
            "use balanced, natural, or a file with one load for each expert",
        )
    text = read_text(path, "routing").strip()
    if text.startswith("{"):
        return routing_record(text, f"routing {path}"), path.name
    try:
        loads = tuple(float(word) for word in text.strip("[]").replace(",", " ").split())
    except ValueError:
        raise InputError(
            f"routing {wanted}: the file must have one number for each expert",
            "write a JSON list, or numbers apart by spaces",
        ) from None
    return LayerRouting(loads=ExpertLoads(name=path.name, loads=loads)), path.name


def _of_layer(routing: LayerRouting | RoutingRecord, name: str, top_k: int) -> LayerRouting:
    if isinstance(routing, LayerRouting):
        return routing
    if routing.top_k != top_k:
        raise InputError(
            f"routing {name} was recorded with top_k {routing.top_k}, and this layer has {top_k}",
            "record the routing of this layer, or plan with the top_k of the record",
        )
    return LayerRouting(loads=routing.expert_loads(name), spread=_spread(routing))


def _of_model(record: ModelRoutingRecord, name: str, decoder: Decoder) -> RecordedLayers:
    parts = [block.routed for block in decoder.blocks if block.routed is not None]
    recorded = [(layer.num_experts, layer.top_k) for layer in record.layers]
    wanted = [(part.layer.num_experts, part.layer.top_k) for part in parts]
    if recorded != wanted:
        raise InputError(
            f"routing {name} is the record of {_layers(recorded)}, and {decoder.name} has "
            f"{_layers(wanted)}",
            "record the routing of this model with moetune.routing_record, or plan for its model",
        )
    return RecordedLayers(
        name=name,
        layers=tuple(
            RecordedLayer(
                loads=layer.expert_loads(f"{name}, layer {number}"),
                spread=_spread(layer),
                top_k=part.mean_top_k,
            )
            for number, (layer, part) in enumerate(zip(record.layers, parts, strict=True))
        ),
    )


def _spread(record: RoutingRecord) -> float:
    return record.fullest_p99 / record.fullest_p50


def _layers(sizes: Sequence[_Sizes]) -> str:
    """Return "3 layers with 8 experts and top_k 2, …"; without any "no layers of experts"."""
    runs = [(len([*some]), *size) for size, some in groupby(sizes)]
    words = [
        f"{count} layer{'s' * (count > 1)} with {experts} experts and top_k {top_k}"
        for count, experts, top_k in runs
    ]
    return ", ".join(words) or "no layers of experts"
