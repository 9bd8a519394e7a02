"""The form that describes a machine: its fields, and the profile that they make."""

import re
from collections.abc import Mapping

from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.service.profiles import check_name
from moetune.service.uploads import check_same_machine, text_of
from moetune.workflows.describe import Description, describe, gpus
from moetune.workflows.open_planner import ServicePlanner

LABELS = {
    "name": "Name", "gpu": "GPU", "gpus_per_node": "GPUs in a node", "nodes": "Nodes",
    "nics": "Network cards of a node", "nic_rate": "Rate of a card", "memory": "Memory of a GPU",
}  # fmt: skip
"""The form's fields, which are options of `moetune profiles new`, and how the page calls them."""
_MOST = 100_000
_FLAG = re.compile(r"--([a-z-]+)")


def is_description(fields: Mapping[str, bytes]) -> bool:
    """Return whether the form describes a machine, and sends no file."""
    return "gpu" in fields


def described_values(fields: Mapping[str, bytes]) -> dict[str, str]:
    """Return what the form's fields say; nothing of a form that sends a file."""
    return {name: text_of(fields, name) for name in LABELS} if is_description(fields) else {}


def described_profile(fields: Mapping[str, bytes], planner: ServicePlanner) -> Profile:
    """Return the profile of the machine that the form describes.

    Raises:
        InputError: a field is missing or cannot be, or the name is another machine's profile.
    """
    given = {name: text_of(fields, name) for name in LABELS}
    if given["gpu"] not in gpus():
        raise InputError(
            f"GPU: no reference machine has {given['gpu'][:40]!r}",
            "other GPUs are described by the command below, with --tflops",
        )
    nodes = _count(given, "nodes")
    try:
        found = describe(
            Description(
                name=check_name(given["name"]), gpu=given["gpu"],
                gpus_per_node=_count(given, "gpus_per_node"), nodes=nodes,
                nics=_count(given, "nics") if given["nics"] else None,
                nic_rate=given["nic_rate"], memory=given["memory"],
            )
        )  # fmt: skip
    except InputError as error:
        raise InputError(_in_labels(error.what), _in_labels(error.hint)) from None
    check_same_machine(found.profile, planner)
    return found.profile


def _count(given: Mapping[str, str], name: str) -> int:
    text = given[name]
    if not text.isdecimal() or len(text) > len(str(_MOST)) or not 1 <= int(text) <= _MOST:
        raise InputError(
            f"{LABELS[name]}: {text[:40]!r} is not a number of at least 1 and at most {_MOST:,}"
        )
    return int(text)


def _in_labels(text: str) -> str:
    """Return a message of the command with the page's words in the place of options."""

    def label(match: re.Match[str]) -> str:
        return LABELS.get(match[1].replace("-", "_"), match[0])

    return _FLAG.sub(label, text)
