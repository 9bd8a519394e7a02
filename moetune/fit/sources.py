"""Which of the collectives that a profile knows stands for the one that is asked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moetune.domain.costs import Trust, least_trust
from moetune.domain.placement import Group
from moetune.domain.samples import CollectiveOp
from moetune.fit.book import Book, Points
from moetune.fit.curve import Line
from moetune.fit.wires import nearest_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The nearest thing known of a collective.

    Args:
        factor: its bytes that stand for one of what was asked for.
        cap: the best label of a prediction from it.
    """

    found: Points | Line
    label: str
    factor: float
    cap: Trust


def nearest_source(
    book: Book, op: CollectiveOp, group: Group, in_flight: int, *, allow_modelled: bool
) -> Source | None:
    """Return what to predict the collective from, None where nothing may stand for it.

    Args:
        allow_modelled: whether another group may.
    """
    known = book.groups(op)
    cap: Trust = "measured"
    factor = 1.0
    if group not in known:
        if not (known and allow_modelled):
            return None
        cap = "modelled"
        group, factor = nearest_group(op, group, known, book.profile.machine)
    flight, flight_cap = _nearest_flight(in_flight, book.in_flight(op, group))
    key = (op, *group, flight)
    return Source(
        found=book.collective(key),
        label=f"collective {key}",
        factor=factor,
        cap=least_trust((cap, flight_cap)),
    )


def _nearest_flight(wanted: int, known: Sequence[int]) -> tuple[int, Trust]:
    """Return the known number in flight that stands for another, and the best label of it."""
    if wanted in known:
        return wanted, "measured"
    several = [one for one in known if one > 1]
    if wanted > 1 and several:
        return _nearest(wanted, several), "interpolated"
    return _nearest(wanted, known), "extrapolated"


def _nearest(wanted: int, known: Sequence[int]) -> int:
    """Return the known number nearest in ratio, the smaller of two as near."""
    return min(known, key=lambda one: (abs(math.log(one / wanted)), one))
