"""Rules of the pins in a layer's request: which contradict each other."""

from typing import Protocol

from moetune.domain.constraint_texts import (
    EXPERT_PARALLEL,
    EXPERT_PLACEMENT,
    ROUTING,
    SEQUENCE_PARALLEL,
)
from moetune.domain.constraints import Constraints
from moetune.domain.errors import InputError
from moetune.domain.spelling import Spelling


class Pinned(Protocol):
    """What a request pins."""

    @property
    def constraints(self) -> Constraints:
        """The pins."""
        ...

    @property
    def spelling(self) -> Spelling:
        """How the caller writes their names, for errors."""
        ...


def check_pins(request: Pinned) -> None:
    """Raise InputError where no plan has what is pinned."""
    if request.constraints.sequence_parallel:
        _check_shards(request)
    _check_routing(request)
    if request.constraints.expert_parallel == "tensor":
        _check_tensor(request)


def _check_shards(request: Pinned) -> None:
    """Raise InputError where no plan has the sequence shards of the request."""
    spelling = request.spelling
    shards, experts = spelling(SEQUENCE_PARALLEL), spelling(EXPERT_PARALLEL)
    if request.constraints.expert_parallel != "tensor":
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
    if request.constraints.expert_parallel == "tensor":
        raise InputError(
            f"{routing} excludes {spelling(EXPERT_PARALLEL)} tensor, whose ranks all have every "
            "token",
            f"omit {routing}, or take {spelling(EXPERT_PARALLEL)} all_to_all",
        )


def _check_tensor(request: Pinned) -> None:
    """Raise InputError where a tensor group gets pins of dispatches."""
    spelling, constraints = request.spelling, request.constraints
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
