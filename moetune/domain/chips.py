"""Facts of accelerators by their names: vendor, generation, links, and rates of data sheets.

Names are those that torch gives, or that people write: "NVIDIA H100 80GB HBM3", "L40S", "MI300X".
Compute capabilities are from NVIDIA's table (developer.nvidia.com/cuda-gpus). AMD's generations
are from the ROCm documentation's list of accelerators (gfx942 is CDNA 3, gfx950 CDNA 4).

Peak rates are for one device, without sparsity and with sums in float32. The rate of float32 is
without TF32, as torch multiplies by default. A GPU that is not listed has no peak, nor has a format
whose rate the maker gives for other boards only. No other peak replaces it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal

from moetune.domain.cluster import FASTER

Vendor = Literal["nvidia", "amd", "cpu"]
Generation = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna3", "cdna4"]
Links = Literal["nvlink", "xgmi", "pcie"]
Capability = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of accelerator.

    Args:
        capability: compute capability; None where the vendor has none.
        links: links between the devices of a node without extra bridges.
        most_per_host: devices of one operating system, where a domain of links spans several
            systems; 0 where a host has all devices of its node.
        is_slower_board: whether another board of the chip has more power and NVLink.
    """

    name: str
    vendor: Vendor
    generation: Generation | None
    capability: Capability | None = None
    links: Links
    most_per_host: int = 0
    is_slower_board: bool = False


def _nvidia(
    names: str, generation: Generation, capability: Capability, links: Links = "pcie",
    *, hosts: int = 0,
) -> Iterator[Chip]:  # fmt: skip
    for name in names.split():
        yield Chip(
            name=name, vendor="nvidia", generation=generation, capability=capability,
            links=links, most_per_host=hosts,
        )  # fmt: skip


def _amd(names: str, generation: Generation | None) -> Iterator[Chip]:
    for name in names.split():
        yield Chip(name=name, vendor="amd", generation=generation, links="xgmi")


CHIPS = (
    *_nvidia("v100", "volta", (7, 0), "nvlink"),
    *_nvidia("t4 rtx2080ti rtx2080 titanrtx rtx8000", "turing", (7, 5)),
    *_nvidia("a100 a800", "ampere", (8, 0), "nvlink"),
    *_nvidia("a30", "ampere", (8, 0)),
    *_nvidia("a10 a10g a16 a40 a6000 a5000 rtx3090 rtx3090ti rtx3080", "ampere", (8, 6)),
    *_nvidia("l40s", "ada", (8, 9)),
    *_nvidia("l4 l20 l40 rtx4090 rtx4090d rtx4080 rtx6000ada rtx5000ada", "ada", (8, 9)),
    *_nvidia("h100 h800 h200 gh200", "hopper", (9, 0), "nvlink"),
    *_nvidia("h20", "hopper", (9, 0), "nvlink"),
    *_nvidia("b200", "blackwell", (10, 0), "nvlink"),
    *_nvidia("gb200", "blackwell", (10, 0), "nvlink", hosts=4),
    *_nvidia("b300", "blackwell", (10, 3), "nvlink"),
    *_nvidia("gb300", "blackwell", (10, 3), "nvlink", hosts=4),
    *_nvidia("rtxpro6000 rtx5090 rtx5080", "blackwell", (12, 0)),
    *_nvidia("gb10", "blackwell", (12, 1)),
    *_amd("mi210 mi250 mi250x", None),
    *_amd("mi300a mi300x mi308x mi325x", "cdna3"),
    *_amd("mi350x mi355x", "cdna4"),
)
_AFTER = r"(?=sxm|pcie|nvl|oam|[^a-z0-9]|$)"
_OF_CAPABILITY: tuple[tuple[Capability, Generation], ...] = (
    ((10, 0), "blackwell"), ((9, 0), "hopper"), ((8, 9), "ada"), ((8, 0), "ampere"),
    ((7, 5), "turing"), ((7, 0), "volta"),
)  # fmt: skip
_MAJOR_AFTER_ALL = 13
"""Compute capabilities from this major number on belong to no generation listed here."""


@cache
def chip_of(device: str) -> Chip | None:
    """Return the chip of a device by its name; None if none is recognized.

    A board named "PCIe" or "NVL" has PCI Express links: NVL bridges join only two or four boards.
    """
    text = re.sub(r"\b(rtx|titan|pro)[ -]", r"\1", device.strip().lower())
    text = re.sub(r"\b(rtx\w*)[ -](ti|ada|d)\b", r"\1\2", text)
    text = re.sub(r"\brtxa(?=\d)", "a", text)
    for chip in sorted(CHIPS, key=lambda chip: -len(chip.name)):  # "gb200" before "b200"
        name = re.sub(r"^rtx(?=\d0\d0)", "(rtx)?", re.sub("x$", "x?", chip.name))
        if re.search(rf"(?<![a-z0-9]){name}{_AFTER}", text):
            is_slower = chip.links == "nvlink" and re.search(r"pcie|nvl\b", text)
            return replace(chip, links="pcie", is_slower_board=True) if is_slower else chip
    return None


def generation_of(capability: Capability) -> Generation | None:
    """Return the NVIDIA generation of a compute capability; None if none is known."""
    if capability[0] >= _MAJOR_AFTER_ALL:
        return None
    return next((name for least, name in _OF_CAPABILITY if capability >= least), None)


def _peaks(
    *, half: float, eight: float = 0.0, four: float = 0.0, full: float = 0.0, **further: float
) -> Mapping[str, float]:
    """Return FLOP/s by number format from rates in TFLOP/s; formats with rate 0 are left out."""
    rates = {
        "float16": half, "bfloat16": half, "fp8": eight, "fp8_rowwise": eight, "mxfp8": eight,
        "nvfp4": four, "float32": full, **further,
    }  # fmt: skip
    return MappingProxyType({name: rate * 1e12 for name, rate in rates.items() if rate})


_A100 = _peaks(half=312.0, full=19.5)
_HOPPER = _peaks(half=989.5, eight=1979.0, full=67.0)
_V100 = MappingProxyType({"float16": 125e12, "float32": 15.7e12})
PEAK_FLOPS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        # NVIDIA V100 data sheet, SXM2; tensor cores multiply no bfloat16.
        "v100": _V100,
        # NVIDIA Turing GPU Architecture, WP-09183-001, table 1, reference board: 107.6 TFLOP/s
        # where sums are in float16; tensor cores multiply no bfloat16.
        "rtx2080ti": MappingProxyType({"float16": 53.8e12, "float32": 13.4e12}),
        # NVIDIA A100 data sheet, for both boards. The A800's tensor cores are the A100's.
        "a100": _A100,
        "a100 pcie": _A100,
        "a800": _A100,
        # NVIDIA L40S data sheet.
        "l40s": _peaks(half=362.05, eight=733.0, full=91.6),
        # NVIDIA Ada GPU Architecture: half of the rate where sums are in float16.
        "rtx4090": _peaks(half=165.2, full=82.6),
        # NVIDIA H100 and H200 data sheets, SXM: half of the rates with sparsity. The H800's and
        # the GH200's tensor cores are the H100's.
        "h100": _HOPPER,
        "h200": _HOPPER,
        "h800": _HOPPER,
        "gh200": _HOPPER,
        # aiconfigurator, systems/h20_sxm.yaml.
        "h20": _peaks(half=148.0, eight=294.0),
        # NVIDIA HGX B200 and HGX B300 data sheets, an eighth of a board.
        "b200": _peaks(half=2250.0, eight=4500.0, four=9000.0),
        "b300": _peaks(half=2250.0, eight=4500.0, four=13_500.0),
        # NVIDIA GB200 NVL72 and GB300 NVL72 data sheets, a 72nd of a rack.
        "gb200": _peaks(half=2500.0, eight=5000.0, four=10_000.0),
        "gb300": _peaks(half=2500.0, eight=5000.0, four=15_000.0),
        # AMD Instinct data sheets. NVFP4 is NVIDIA's, and MX formats begin with CDNA 4.
        "mi300x": _peaks(half=1307.4, eight=2614.9, mxfp8=0.0),
        "mi355x": _peaks(half=2500.0, eight=5000.0),
    }
)
"""Peak FLOP/s of number formats, by `Chip.name`. Slower boards of a chip have " pcie" after the
name."""


def peak_flops(device: str, dtype: str) -> float | None:
    """Return a device's peak in FLOP/s in a dtype or narrow format; None if it is not known."""
    chip = None if FASTER in device else chip_of(device)
    if chip is None:
        return None
    board = " pcie" if chip.is_slower_board else ""
    return PEAK_FLOPS.get(f"{chip.name}{board}", {}).get(dtype)


_MEMORY_BYTES_PER_SECOND: Mapping[str, float] = MappingProxyType(
    {"v100": 900e9, "rtx2080ti": 616e9}
)
"""Rate of a device's memory, by `Chip.name`, for chips whose reference profiles do not time
it."""


def memory_bytes_per_second(device: str) -> float | None:
    """Return the rate of a device's memory; None if no data sheet is known."""
    chip = None if FASTER in device else chip_of(device)
    return None if chip is None else _MEMORY_BYTES_PER_SECOND.get(chip.name)


LINK_BYTES_PER_SECOND: Mapping[str, float] = MappingProxyType(
    {
        "a100": 300e9, "a800": 200e9, "h100": 450e9, "h200": 450e9, "h800": 200e9, "h20": 450e9,
        "gh200": 450e9, "b200": 900e9, "b300": 900e9, "gb200": 900e9, "gb300": 900e9,
        "l40s": 31.5e9, "rtx4090": 10e9, "mi300x": 448e9, "mi355x": 537.6e9,
    }
)  # fmt: skip
"""Rate from one GPU to all others of its node together, one way, by `Chip.name`: NVLink, xGMI or 16
lanes of PCI Express. NVIDIA's data sheets give both ways together. GeForce cards send through the
host: their rate is what NCCL assumes for such a path (NVIDIA/nccl-tests#307)."""
