"""The form that describes a machine: its fields, and the profile that they make."""

from collections.abc import Mapping

from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.service.profiles import check_name
from moetune.service.uploads import check_same_machine, text_of
from moetune.workflows.describe import describe, description_of, gpus
from moetune.workflows.open_planner import ServicePlanner

LABELS = {
    "name": "Name", "gpu": "GPU", "gpus_per_node": "GPUs in a node", "nodes": "Nodes",
    "nics": "Network cards of a node", "nic_rate": "Rate of a card", "memory": "Memory of a GPU",
}  # fmt: skip
"""The form's fields, which are options of `moetune profiles new`, and how the page calls them."""


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
    given["name"] = check_name(given["name"])
    found = describe(description_of(given, spelled=LABELS.__getitem__))
    check_same_machine(found.profile, planner)
    return found.profile
