"""Withdrawn names that older files may have; the page "Withdrawn" describes the features."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from moetune.domain.errors import InputError
from moetune.domain.pipeline import SPLITTING

SINCE = "2026-11-28"
"""The day of the first version without these names, which is also the first release."""


class Withdrawn(NamedTuple):
    """A withdrawn key of a document, or a withdrawn value of a key.

    Args:
        place: the class that had the key, or the key that had the value.
        instead: what to do with a file that has it.
    """

    place: str
    key: str
    what: str
    instead: str

    def refusal(self, where: str) -> InputError:
        """Return the error of a document that has the withdrawn name at `where`."""
        return InputError(
            f"{where} has {self.key!r}: {self.what} was withdrawn on {SINCE}", self.instead
        )


_AGAIN = "plan again: `moetune plan` makes a plan that runs"
_HIERARCHICAL = "the hierarchical exchange, across the nodes and then inside them,"
_NARROW = "experts in 8 bits in a layer of moetune"
_WHOLE = "the planner of the papers' whole models as layers"
_REPLICAS = "replicas of hot experts"
_CORRECTED = "delete its [[corrections]], or measure the machine again"
_SIZE = "plan again: `moetune plan` with --{} {}, or for another --target"
_SPLIT = "backward passes in two halves, of inputs and of weights, in a pipeline of moetune"
_SHARDS = "shards of the tokens around experts of a tensor-parallel group"
_HIDDEN = "the layer that runs shared experts between its exchanges"
_OF_MOETUNE = tuple(
    Withdrawn("FoldedLayout", key, what, _SIZE.format(key, instead))
    for key, instead, what in (
        ("schedule", "1f1b", _SPLIT),
        ("etp", "1", "experts' width over ranks (etp) in a layer of moetune"),
        ("tp", "1", "tensor parallelism (tp) by layers of moetune"),
        ("cp", "1", "context parallelism (cp) by attention of moetune"),
        ("recompute", "full", "recomputation of single modules of moetune's blocks"),
    )
)
_IS_GONE: Mapping[str, Callable[[Any], object]] = MappingProxyType({
    "schedule": lambda name: name in SPLITTING,
    "recompute": lambda modules: {*modules} - {"full", "none"},
    **dict.fromkeys(("etp", "tp", "cp"), lambda size: size > 1),
})  # fmt: skip
"""Tests by key of whether a value was withdrawn."""
_ROWS = tuple(
    Withdrawn(place, key, what, instead)
    for places, key, what, instead in (
        ("PlanInputs Workload", "quantization", _NARROW, _AGAIN),
        ("Workload LayerKey", "sequence_parallel", _SHARDS, _AGAIN),
        ("PlanInputs", "sequence-parallel", _SHARDS, _AGAIN),
        ("PhaseTerms", "gathering_seconds", _SHARDS, _AGAIN),
        ("Pipeline Choice Alternative", "dispatcher", _HIERARCHICAL, _AGAIN),
        ("Plan", "transformer", _WHOLE, _AGAIN),
        ("Plan", "chunks", _WHOLE, _AGAIN),
        ("Alternative", "layout", _WHOLE, _AGAIN),
        ("Alternative", "memory_bytes", _WHOLE, _AGAIN),
        ("TrainingInputs", "search_trials", "the search by trials", _AGAIN),
        ("LayoutRequest FoldedLayout", "dispatcher_sms", "the choice of DeepEP's SMs", _AGAIN),
        ("TrainingStep", "hidden_by_shared_experts_seconds", _HIDDEN, _AGAIN),
        ("Profile", "corrections", "correction by observed steps", _CORRECTED),
        ("PlacementChoice ModelPlacement", "replicas", _REPLICAS, _AGAIN),
        ("dispatcher", "hierarchical", _HIERARCHICAL, _AGAIN),
        ("expert_placement", "once", "placing experts once, next to replicas", _AGAIN),
    )
    for place in places.split()
)
"""Withdrawn keys by their class, and withdrawn values by their key."""
UNREAD_KEYS = frozenset({("Profile", "turns"), ("Profile", "bursts")})
"""Keys that are skipped when a document is read; the rest of the document stays valid."""
UNREAD_POINTS = frozenset({"turns", "burst"})
"""Kinds of a profile's points that are skipped in the same way."""
UNREAD_OPS = frozenset({"all_to_all_2d", "quantize", "quantize_matrix", "quantize_wire"})
"""Operations of a profile's points and lines that are skipped in the same way."""
UNREAD_DTYPES = frozenset({"fp8_rowwise_emulated", "mxfp8_emulated"})


EQUAL_DEGREES = (
    "a layer runs as many chunks backward as forward, and unequal numbers were 1 to 15 % slower "
    "wherever they were measured"
)


def common_degree(forward: int, backward: int) -> int:
    """Return the chunks of both phases; raises InputError if they differ, as in older plans."""
    if forward != backward:
        raise InputError(
            f"{forward} chunks forward and {backward} backward are refused since {SINCE}: "
            f"{EQUAL_DEGREES}",
            _AGAIN,
        )
    return forward


def whole_model_refusal(inputs: object) -> InputError:
    """Return the error of a plan of a whole model as layers, from its inputs' plain values."""
    values: Mapping[str, object] = inputs if isinstance(inputs, Mapping) else {}
    model, profile = values.get("model"), values.get("profile")
    named = f"--model {model}" if model else "--num-layers, --num-heads, --seq, --vocab"
    machine = f" --world-size {values.get('world_size')} --profile {profile}" if profile else ""
    return InputError(
        f"the plan is of {model or 'a whole model'}, by {_WHOLE}, which was withdrawn on {SINCE}",
        f"plan it again:  moetune plan {named}{machine}",
    )


def withdrawal_of(place: str, key: object) -> Withdrawn | None:
    """Return the withdrawn key of a class, or the withdrawn value of a key; None for others."""
    return next((row for row in _ROWS if (row.place, row.key) == (place, key)), None)


def withdrawn_of_moetune(layout: object) -> Withdrawn | None:
    """Return the withdrawn choice of a layout for moetune's runtime; None if it has none."""
    for row in _OF_MOETUNE:
        value = getattr(layout, row.key)
        if row.key == "tp" and getattr(layout, "dispatcher", "") == "all_gather":
            continue  # moetune.TensorExpertLayer still has tp
        if _IS_GONE[row.key](value):
            return row
    return None


def without_unread_points(document: object) -> object:
    """Return a profile's plain values without points and lines that are skipped."""
    if not isinstance(document, Mapping):
        return document
    return {
        name: [row for row in rows if not _is_unread(row)] if isinstance(rows, list) else rows
        for name, rows in document.items()
    }


def _is_unread(row: object) -> bool:
    point = row.get("point", row) if isinstance(row, Mapping) else None
    if not isinstance(point, Mapping):
        return False
    workload = point.get("workload")
    return (
        point.get("op") in UNREAD_OPS
        or point.get("dtype") in UNREAD_DTYPES
        or point.get("kind") in UNREAD_POINTS
        or (isinstance(workload, Mapping) and "quantization" in workload)
    )
