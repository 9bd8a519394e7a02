"""Names of what was taken away, as files of before have them: the page "Withdrawn" has the rest."""

from collections.abc import Mapping
from typing import NamedTuple

from moetune.domain.errors import InputError


class Withdrawn(NamedTuple):
    """A key of a document that no longer is one.

    Args:
        place: the class that had it.
        since: the day from which on it is not read.
        instead: what to do with a file that has it.
    """

    place: str
    key: str
    what: str
    since: str
    instead: str

    def refusal(self, where: str) -> InputError:
        """Return the error of a document that has the name in that place."""
        return InputError(
            f"{where} has {self.key!r}: {self.what} was withdrawn on {self.since}", self.instead
        )


_AGAIN = "plan again: `moetune plan` makes a plan that runs"
_TURNS = "two batches in turns (moetune.BatchOverlap)"
_BETWEEN = "dense gradients between exchanges (moetune.replicate)"
_KEYS = (
    Withdrawn("TransformerPlan", "batches_in_flight", _TURNS, "2026-11-28", _AGAIN),
    Withdrawn("TransformerPlan", "split", _TURNS, "2026-11-28", _AGAIN),
    Withdrawn("TransformerPlan", "gradients", _BETWEEN, "2026-11-28", _AGAIN),
    Withdrawn("Observation", "overlap", _TURNS, "2026-11-28", "send observations without it"),
)
UNREAD_KEYS = frozenset({("Profile", "turns")})
"""Keys that are left out where they are read: what else the document says holds without them."""
UNREAD_POINTS = frozenset({"turns"})
"""Kinds of a profile's points that are left out in the same way."""


def withdrawn_key(place: str, key: object) -> Withdrawn | None:
    """Return what was taken away of a class's documents by that key."""
    return next((row for row in _KEYS if (row.place, row.key) == (place, key)), None)


def without_unread_points(document: object) -> object:
    """Return a profile's plain values without the samples of points that are left out."""
    samples = document.get("samples") if isinstance(document, Mapping) else None
    if not isinstance(document, Mapping) or not isinstance(samples, list):
        return document
    return {**document, "samples": [one for one in samples if not _is_unread(one)]}


def _is_unread(sample: object) -> bool:
    point = sample.get("point") if isinstance(sample, Mapping) else None
    return isinstance(point, Mapping) and point.get("kind") in UNREAD_POINTS
