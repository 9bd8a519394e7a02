"""What torchtitan's trainer needs to run on CPUs with torch 2.13; import it before torchtitan.

torchtitan asks its device for a name and for its memory, which `torch.cpu` does not tell, and torch
for the public name of a function that has none before 2.14. Nothing of torchtitan is replaced.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

_BYTES = 2**34


class CpuModule:
    """`torch.cpu`, and what else torchtitan asks a device module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, _device: object = None) -> str:
        return "CPU"

    def get_device_properties(self, _device: object = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=_BYTES)

    def memory_stats(self, _device: object = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def current_device(self) -> int:
        return 0


def prepare() -> None:
    """Make the CPU torchtitan's device."""
    utils.device_type, utils.device_module = "cpu", CpuModule()
    if not hasattr(torch.distributed, "set_timeout"):
        setattr(torch.distributed, "set_timeout", c10d._set_pg_timeout)  # noqa: B010, SLF001


def sum_gradients(model: nn.Module) -> nn.Module:
    """Let FSDP2 reduce by sums: gloo has no premultiplied ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


prepare()
