"""Rules of the pins in a request: which contradict each other, or the kind of plan."""

from dataclasses import replace
from typing import Protocol

from moetune.domain.constraint_texts import (
    EXPERT_PARALLEL,
    EXPERT_PLACEMENT,
    NO_OFFLOAD,
    ROUTING,
    SEQUENCE_PARALLEL,
    encode_constraints,
)
from moetune.domain.constraints import Constraints
from moetune.domain.errors import InputError
from moetune.domain.model import Transformer
from moetune.domain.spelling import Spelling

_LAYOUT_FLAGS = ("dp", "ep", "tp", "pp", "micro-batch", "zero", "offload", NO_OFFLOAD, "overlap")


class Pinned(Protocol):
    """What a request pins, and for which kind of plan."""

    @property
    def constraints(self) -> Constraints:
        """The pins."""
        ...

    @property
    def spelling(self) -> Spelling:
        """How the caller writes their names, for errors."""
        ...

    @property
    def whole(self) -> Transformer | None:
        """The whole model to plan for; None for a layer."""
        ...


def check_pins(request: Pinned) -> None:
    """Raise InputError where no plan has what is pinned."""
    if request.constraints.sequence_parallel:
        _check_shards(request)
    _check_routing(request)
    if request.whole is None:
        _check_pins_of_layer(request)
    else:
        _check_pins_of_model(request)


def _check_shards(request: Pinned) -> None:
    """Raise InputError where no plan has the sequence shards of the request."""
    spelling = request.spelling
    shards, experts = spelling(SEQUENCE_PARALLEL), spelling(EXPERT_PARALLEL)
    if request.whole is not None:
        raise InputError(
            f"{shards} is for one layer, and this is a whole model",
            f"omit it, or plan its layer: {spelling('layer')}",
        )
    if request.constraints.pins.expert_parallel != "tensor":
        raise InputError(
            f"{shards} needs {experts} tensor: with all_to_all every rank has tokens of its own "
            "anyway",
            f"add {experts} tensor, or omit {shards}",
        )


def _check_routing(request: Pinned) -> None:
    """Raise InputError where no plan has the routing of the request: only all-to-alls wait."""
    spelling, routing = request.spelling, request.spelling(ROUTING)
    if not request.constraints.routing:
        rule = request.constraints.expert_placement
        if rule != "planned":
            flag = spelling(EXPERT_PLACEMENT)
            raise InputError(
                f"{flag} {rule} needs {routing}: without loads of experts none is placed",
                f"omit {flag}, or give the record of a layer's routing with {routing}",
            )
        return
    if request.whole is not None:
        raise InputError(
            f"{routing} is for one layer and for Hugging Face models, and this is a paper's model",
            f"omit it, or plan its layer: {spelling('layer')}",
        )
    if request.constraints.pins.expert_parallel == "tensor":
        raise InputError(
            f"{routing} excludes {spelling(EXPERT_PARALLEL)} tensor, whose ranks all have every "
            "token",
            f"omit {routing}, or take {spelling(EXPERT_PARALLEL)} all_to_all",
        )


def _check_pins_of_model(request: Pinned) -> None:
    """Raise InputError where a whole model gets pins that only single layers are planned with."""
    spelling, constraints = request.spelling, request.constraints
    _check_overlap(request)
    if constraints.bounds.strategy not in {None, "none"}:
        raise InputError(
            f"{spelling('strategy')} {constraints.bounds.strategy} is not planned in a whole model",
            f"omit {spelling('strategy')}: where memory binds, blocks are recomputed",
        )


def _check_overlap(request: Pinned) -> None:
    """Raise InputError where exchanges are to be cut into chunks and not to be hidden.

    Or where micro-batches are to hide them, which Megatron's plans of Hugging Face models do.
    """
    spelling, bounds = request.spelling, request.constraints.bounds
    if request.constraints.pins.overlap == "batch":
        raise InputError(
            f"{spelling('overlap')} batch is for Hugging Face models on megatron-core and "
            "megatron-bridge",
            f"take {spelling('overlap')} chunks",
        )
    for flag in ("forward-degree", "backward-degree"):
        degree = getattr(bounds, flag.replace("-", "_")) or 1
        if degree > 1 and request.constraints.pins.overlap == "none":
            raise InputError(
                f"{spelling(flag)} {degree} excludes {spelling('overlap')} none, which has one "
                "chunk",
                f"omit one of them, or take {spelling('overlap')} chunks",
            )


def _check_pins_of_layer(request: Pinned) -> None:
    """Raise InputError where one layer gets a layout, or a tensor group pins of dispatches."""
    spelling, constraints = request.spelling, request.constraints
    pins = replace(constraints.pins, expert_parallel=None)
    for flag in encode_constraints(replace(constraints, pins=pins)):
        if flag in _LAYOUT_FLAGS:
            raise InputError(
                f"{spelling(flag)} is for a whole model, and this is one layer",
                f"name a whole model (ppmoe-6.7b), or give {spelling('num-layers')}, "
                f"{spelling('num-heads')}, {spelling('seq')} and {spelling('vocab')}",
            )
    if constraints.pins.expert_parallel != "tensor":
        return
    bounds, experts = constraints.bounds, spelling(EXPERT_PARALLEL)
    reasons = {
        "strategy": (bounds.strategy, "nothing is dispatched and no memory reused"),
        "order": (bounds.order, "a chunk has one transfer"),
    }
    for flag, (value, reason) in reasons.items():
        if value not in {None, "none"}:
            raise InputError(
                f"{spelling(flag)} {value} excludes {experts} tensor, where {reason}",
                f"omit {spelling(flag)}, or take {experts} all_to_all",
            )
