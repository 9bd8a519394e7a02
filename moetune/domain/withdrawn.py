"""Keys of plans, profiles and settings whose feature is withdrawn: they are refused by name."""

from typing import NamedTuple

SINCE = "0.2"
"""The first version without the features of `WITHDRAWN`."""


class Withdrawn(NamedTuple):
    """A withdrawn key of a document.

    Args:
        owner: class of the document's part that had the key.
        instead: what to do with such a file.
    """

    owner: str
    key: str
    instead: str


_PLAN_AGAIN = "make the plan again"
WITHDRAWN = (
    Withdrawn("TrainingInputs", "search_trials", f"{_PLAN_AGAIN} without --search-trials"),
    Withdrawn("LayoutRequest", "dispatcher_sms", f"{_PLAN_AGAIN} without --dispatcher-sms"),
    Withdrawn("TrainingLayout", "dispatcher_sms", f"{_PLAN_AGAIN} without --dispatcher-sms"),
    Withdrawn("Profile", "corrections", "delete its [[corrections]], or measure it again"),
)  # fmt: skip


def withdrawn_key(owner: str, key: str) -> Withdrawn | None:
    """Return the row of a withdrawn key; None for other keys."""
    for row in WITHDRAWN:
        if (row.owner, row.key) == (owner, key):
            return row
    return None
