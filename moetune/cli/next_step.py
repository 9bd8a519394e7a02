"""The command that comes after a plan: one that works on this machine."""

import math
import os
from pathlib import Path

from moetune.config import environment
from moetune.domain.any_plan import AnyPlan
from moetune.domain.cluster import Machine, torchrun


def what_runs_it(plan: AnyPlan, machine: Machine) -> str:
    """Return the command that writes a plan for its runtime, or runs a layer where it has room."""
    if plan.kind == "training":
        return f"Write it for {plan.target}: moetune export {plan.id[:6]}"
    command, ranks = f"moetune verify {plan.id[:6]}", plan.layout.expert_ranks
    if ranks <= num_devices(environment().get("CUDA_VISIBLE_DEVICES")):
        return f"Verify it on this machine: {command}"
    per_node = min(ranks, machine.devices_per_node)
    nodes = math.ceil(ranks / per_node)
    launch = torchrun(nodes, per_node).replace(" --rdzv-endpoint", " \\\n    --rdzv-endpoint")
    return f"Verify it on its {ranks} ranks, on each node:\n  {launch} -m {command}"


def num_devices(visible: str | None, devices: Path = Path("/dev")) -> int:
    """Return the NVIDIA devices that this process may use, else its cores, without loading torch.

    Args:
        visible: the variable CUDA_VISIBLE_DEVICES, which names them.
    """
    found = len(list(devices.glob("nvidia[0-9]*")))
    if visible is not None:
        found = min(found, len([one for one in visible.split(",") if one]))
    return found or len(os.sched_getaffinity(0))
