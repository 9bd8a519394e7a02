"""The command that comes after a plan: one that works on this machine."""

import math

from moetune.config import environment
from moetune.domain.cluster import Machine
from moetune.domain.plan import Plan
from moetune.hardware.facts import num_cores, num_cuda_devices


def how_to_verify(plan: Plan, machine: Machine) -> str:
    """Return the command that runs the plan's layer: here, or on nodes with room for its ranks."""
    command, ranks = f"moetune verify {plan.id[:6]}", plan.layout.expert_ranks
    here = num_cuda_devices(environment().get("CUDA_VISIBLE_DEVICES")) or num_cores()
    if ranks <= here:
        return f"Verify it on this machine: {command}"
    per_node = min(ranks, machine.devices_per_node)
    nodes = math.ceil(ranks / per_node)
    return (
        f"Verify it on its {ranks} ranks, on each node:\n"
        f"  torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d \\\n"
        f"    --rdzv-endpoint NODE0:29500 -m {command}"
    )
