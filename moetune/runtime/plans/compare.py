"""Plans that the ranks have themselves, compared in the exchanges that a job begins with.

The first rank's plans decide for all. A rank whose own file says something else was meant to run
something else: that is an error, and no rank goes on.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moetune.domain.document import digest
from moetune.domain.errors import RankMismatchError
from moetune.domain.plan import Plan

_LOGGER = logging.getLogger("moetune")
_MOST_PLANS = 3
_MOST_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlans:
    """The plans that one source of a book has on this rank.

    Args:
        digest: of all that they say; empty where they cannot be read.
        shown: names them, or why they cannot be read, in an error.
    """

    digest: str
    shown: str

    @classmethod
    def of(cls, plans: Sequence[Plan], where: str) -> "OwnPlans":
        """Return plans that were read from a place."""
        found = content_digest(plans)
        return cls(digest=found, shown=f"{where}: {described(plans, found)}")


def content_digest(plans: Sequence[Plan]) -> str:
    """Return the digest of all that plans say: an id has only what they were asked."""
    return digest(list(plans))


def described(plans: Sequence[Plan], digest_: str) -> str:
    """Return plans in a few words, which are equal only for equal plans."""
    listed = ", ".join(
        f"plan {plan.id[:6]} with {plan.pipeline.forward_degree} and "
        f"{plan.pipeline.backward_degree} chunks"
        for plan in plans[:_MOST_PLANS]
    )
    more = f" and {len(plans) - _MOST_PLANS} more" if len(plans) > _MOST_PLANS else ""
    return f"{listed or 'no plan'}{more} (digest {digest_[:12]})"


def found_own(find: Callable[[], Sequence[OwnPlans | None]]) -> tuple[OwnPlans | None, ...]:
    """Return what this rank has; nothing after an error, because the other ranks wait for it."""
    try:
        return tuple(find())
    except Exception as error:  # noqa: BLE001 - whatever it is, the first rank's plans decide
        _LOGGER.warning("this rank's own plans are not compared with the first rank's: %r", error)
        return ()


def check_own_plans(rows: Sequence[Sequence[OwnPlans | None]]) -> None:
    """Compare what every rank has with what the first one has, source by source.

    Args:
        rows: of every rank the plans of each source; None, or no entry, where it has none.

    Raises:
        RankMismatchError: a rank has other plans; the same text on all ranks.
    """
    different = [
        (rank, mine, first)
        for rank, row in enumerate(rows)
        for mine, first in zip(row, rows[0], strict=False)
        if mine is not None and first is not None and mine.digest != first.digest
    ]
    if not different:
        return
    firsts = dict.fromkeys(f"  rank 0: {first.shown}" for _, _, first in different)
    lines = [*firsts, *(f"  rank {rank}: {mine.shown}" for rank, mine, _ in different)]
    if (left := len(lines) - _MOST_LINES) > 0:
        lines = [*lines[:_MOST_LINES], f"  and {left} more"]
    raise RankMismatchError(
        "the ranks have different plans\n" + "\n".join(lines),
        "give every machine the first rank's files, or keep them on that machine alone",
    )
