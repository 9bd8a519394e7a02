"""Peaks of GPUs from their data sheets, to compare another GPU with a reference machine's."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """Peaks of one GPU.

    Args:
        tflops: of dense products in bfloat16, in 10¹² FLOP/s.
        link_bytes_per_second: to the other GPUs of its node, all of them together, one way.
    """

    tflops: float
    link_bytes_per_second: float


DATA_SHEETS: Mapping[str, DataSheet] = MappingProxyType(
    {
        "a100": DataSheet(tflops=312, link_bytes_per_second=300e9),
        "h100": DataSheet(tflops=989, link_bytes_per_second=450e9),
        "h200": DataSheet(tflops=989, link_bytes_per_second=450e9),
        "h800": DataSheet(tflops=989, link_bytes_per_second=200e9),
        "b200": DataSheet(tflops=2250, link_bytes_per_second=900e9),
        "b300": DataSheet(tflops=2250, link_bytes_per_second=900e9),
        "gb200": DataSheet(tflops=2500, link_bytes_per_second=900e9),
        "gb300": DataSheet(tflops=2500, link_bytes_per_second=900e9),
    }
)
"""By the first part of a reference machine's name. NVIDIA's data sheets, half of the rates that
they give with sparsity; NVLink's rates there are of both ways together."""
