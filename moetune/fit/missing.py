"""Errors for operations that a profile lacks, with the command that measures them."""

import math
from collections.abc import Sequence

from moetune.domain.cluster import Group, Machine, nodes_of, torchrun
from moetune.domain.cost_keys import CopyKey
from moetune.domain.errors import ProfileError
from moetune.domain.profile import Profile
from moetune.domain.request import gemm_dtypes
from moetune.domain.samples import CollectiveOp
from moetune.domain.site import check_format
from moetune.domain.targets import Target
from moetune.domain.training import TrainingJob
from moetune.domain.units import NARROW


def missing_gemm(profile: Profile, *, dtype: str, measured: Sequence[str]) -> ProfileError:
    """Return the error for a dtype without any measured GEMM."""
    hint = f"measure it:  moetune profile --dtype {dtype} {_name(profile)}"
    if dtype in NARROW:
        hint = (
            "narrow formats are not measured here: use --dtype bfloat16, or a --profile that has "
            "them, such as b200-x8"
        )
    return ProfileError(f"no GEMM measured in {dtype} ({_has(profile, measured)})", hint)


def check_numbers(profile: Profile, job: TrainingJob, target: Target) -> None:
    """Raise InputError if the GPUs lack the job's dtype, ProfileError if it is unmeasured."""
    check_format(profile, job.dtype)
    measured = gemm_dtypes(profile)
    if measured and job.dtype in target.dtypes and job.element not in measured:
        raise missing_gemm(profile, dtype=job.element, measured=measured)


def missing_collective(
    profile: Profile, *, op: CollectiveOp, group: Group, measured: Sequence[Group]
) -> ProfileError:
    """Return the error for a group; the hint offers an estimate if another group was measured."""
    launch = launcher(group, profile.machine)
    hint = f"measure it on the cluster:  {launch} {_name(profile)}"
    if measured:
        hint += "\n  or accept an estimate with --allow-modelled"
    group_size, num_nodes = group
    # Groups of equal size differ by nodes, so name both; otherwise the sizes suffice.
    placed = [group_name((size, nodes)) for size, nodes in measured if size == group_size]
    there = _has(profile, placed or sorted({size for size, _ in measured}))
    spread = f" on {num_nodes} nodes" if num_nodes else ""
    return ProfileError(f"no {op} measured for {group_size} ranks{spread} ({there})", hint)


def group_name(group: Group) -> str:
    """Return "4", or "4 on 2 nodes" if the ranks are spread over nodes."""
    size, num_nodes = group
    return f"{size} on {num_nodes} nodes" if num_nodes else str(size)


def missing_copy(profile: Profile, *, copy: CopyKey, measured: Sequence[str]) -> ProfileError:
    """Return the error for a kind of copy that was not measured."""
    return ProfileError(
        f"no {copy.words} measured ({_has(profile, measured)})",
        f"measure it:  moetune profile {_name(profile)}",
    )


def _has(profile: Profile, names: Sequence[object]) -> str:
    there = ", ".join(map(str, names)) or "none"
    return f'profile "{profile.name}" has {there}'


def _name(profile: Profile) -> str:
    """Return the options that resume a measured profile, or start a new profile."""
    if profile.provenance == "measured":
        return f"--name {profile.name} --resume"
    return "--name NAME"


def launcher(group: Group, machine: Machine) -> str:
    """Return the start of the command that launches ranks for such groups, on whole nodes."""
    per_node, nodes = machine.devices_per_node, nodes_of(group, machine)
    size, num_nodes = group
    is_one_host = machine.kind == "cpu" and machine.num_devices <= per_node
    if not num_nodes and (nodes == 1 or is_one_host):
        return "moetune profile" + (f" --nproc {size}" if size > 1 else "")
    here = per_node if num_nodes else math.ceil(size / nodes)
    return f"{torchrun(nodes, here)} -m moetune profile"
