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
    Withdrawn("PlacementChoice", "replicas", _PLAN_AGAIN),
    Withdrawn("ModelPlacement", "replicas", _PLAN_AGAIN),
)  # fmt: skip

WITHDRAWN_VALUES = (
    Withdrawn("expert_placement", "once", "--expert-placement planned places each expert once"),
)
"""Values of a key, whose name stands in place of the owner."""


def withdrawn_value(name: str, value: object) -> Withdrawn | None:
    """Return the row of a withdrawn value of a key; None for other values."""
    return next((row for row in WITHDRAWN_VALUES if (row.owner, row.key) == (name, value)), None)


def withdrawn_key(owner: str, key: str) -> Withdrawn | None:
    """Return the row of a withdrawn key; None for other keys."""
    return next((row for row in WITHDRAWN if (row.owner, row.key) == (owner, key)), None)
