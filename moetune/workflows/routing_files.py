"""Loads of the experts, by name or from a file."""

from pathlib import Path

from moetune.domain.errors import InputError
from moetune.domain.routing import BALANCED, NATURAL, ExpertLoads, LayerRouting
from moetune.domain.routing_record import RoutingRecord, routing_record
from moetune.workflows.files import read_text

_NAMES = {one.name: one for one in (BALANCED, NATURAL)}


def read_routing(wanted: str | None, *, top_k: int) -> ExpertLoads:
    """Return the routing of that name, or of a file.

    Args:
        wanted: None for balanced; a file is a record of `MoELayer.routing_record`, or has one load
            for each expert: a JSON list, or numbers apart by spaces or commas.
        top_k: experts of a token, of the layer to plan for.

    Raises:
        InputError: the file is missing, has something else, or is the record of a layer with
            another top_k.
    """
    return _read(wanted, top_k).loads


def read_layer_routing(wanted: str | None, *, top_k: int) -> str:
    """Return the text of a layer's `LayerRouting`; arguments and errors as of `read_routing`."""
    return str(_read(wanted, top_k))


def _read(wanted: str | None, top_k: int) -> LayerRouting:
    if wanted is None or wanted in _NAMES:
        return LayerRouting(loads=_NAMES[wanted or BALANCED.name])
    path = Path(wanted)
    if not path.is_file():
        raise InputError(
            f"routing {wanted!r} is neither a name nor a file",
            "use balanced, natural, or a file with one load for each expert",
        )
    text = read_text(path, "routing").strip()
    if text.startswith("{"):
        return _of_record(routing_record(text, f"routing {path}"), path.name, top_k)
    try:
        loads = tuple(float(word) for word in text.strip("[]").replace(",", " ").split())
    except ValueError:
        raise InputError(
            f"routing {wanted}: the file must have one number for each expert",
            "write a JSON list, or numbers apart by spaces",
        ) from None
    return LayerRouting(loads=ExpertLoads(name=path.name, loads=loads))


def _of_record(record: RoutingRecord, name: str, top_k: int) -> LayerRouting:
    if record.top_k != top_k:
        raise InputError(
            f"routing {name} was recorded with top_k {record.top_k}, and this layer has {top_k}",
            "record the routing of this layer, or plan with the top_k of the record",
        )
    return LayerRouting(
        loads=record.expert_loads(name), spread=record.fullest_p99 / record.fullest_p50
    )
