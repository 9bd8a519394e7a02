"""Stored plans of a list, numbers of observed runs from their ids, and times by age."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import InputError
from moetune.domain.records import PlanInfo

if TYPE_CHECKING:
    from moetune.store import SqlStore

_MOST_DAYS = 36_500


class StoredPlan(NamedTuple):
    """A stored plan's list entry, and the plan.

    Args:
        plan: None if its document cannot be read because another program changed it.
    """

    info: PlanInfo
    plan: AnyPlan | None


def read_plans(store: "SqlStore | None", infos: Sequence[PlanInfo]) -> tuple[StoredPlan, ...]:
    """Return list entries with their plans; None as the plan if it cannot be read."""
    if store is None:
        return ()
    stored = []
    for info in infos:
        plan = None
        with suppress(InputError):
            plan = store.plan(info.id)
        stored.append(StoredPlan(info=info, plan=plan))
    return tuple(stored)


def run_numbers(ids: Iterable[str]) -> list[int]:
    """Return the numbers of observed runs such as "r7"; raise InputError for other ids."""
    numbers = []
    for text in ids:
        if not text.startswith("r") or not text[1:].isdigit():
            hint = "`moetune observations list` has them, such as r3"
            raise InputError(f"{text!r} is no id of an observed run", hint)
        numbers.append(int(text[1:]))
    return numbers


def time_ago(seconds: float) -> str:
    """Return the time `seconds` ago in the store's format; raise InputError beyond a century."""
    if seconds > _MOST_DAYS * 86_400:
        raise InputError(f"{seconds / 86_400:,.0f} days are beyond a century", "give fewer")
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="microseconds")
