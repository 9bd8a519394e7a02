"""Facts of accelerators by their names: vendor, generation, and how a node's devices are joined.

Names are those that torch gives, or that people write: "NVIDIA H100 80GB HBM3", "L40S", "MI300X".
Compute capabilities are NVIDIA's table (developer.nvidia.com/cuda-gpus); AMD's generations those
of the ROCm documentation's list of accelerators (gfx942 is CDNA 3, gfx950 CDNA 4).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

Vendor = Literal["nvidia", "amd", "cpu"]
Generation = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna3", "cdna4"]
Links = Literal["nvlink", "xgmi", "pcie"]
Capability = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of accelerator.

    Args:
        capability: compute capability; None where the vendor has none.
        links: that join the devices of a node where no bridge was bought.
        most_per_host: devices that one operating system has, where a domain of links spans
            several of them; 0 where a host has all of a node's.
        is_slower_board: whether others of the chip have more power and links of their own.
    """

    name: str
    vendor: Vendor
    generation: Generation | None
    capability: Capability | None = None
    links: Links = "pcie"
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


def _chips(*rows: Iterable[Chip]) -> tuple[Chip, ...]:
    """Return the chips, those with longer names first."""
    found = [chip for row in rows for chip in row]
    return tuple(sorted(found, key=lambda chip: -len(chip.name)))


CHIPS = _chips(
    _nvidia("v100", "volta", (7, 0), "nvlink"),
    _nvidia("t4 rtx2080ti rtx2080 titanrtx rtx8000", "turing", (7, 5)),
    _nvidia("a100 a800", "ampere", (8, 0), "nvlink"),
    _nvidia("a30", "ampere", (8, 0)),
    _nvidia("a10 a10g a16 a40 a6000 a5000 rtx3090 rtx3090ti rtx3080", "ampere", (8, 6)),
    _nvidia("l40s", "ada", (8, 9)),
    _nvidia("l4 l20 l40 rtx4090 rtx4090d rtx4080 rtx6000ada rtx5000ada", "ada", (8, 9)),
    _nvidia("h100 h800 h200 gh200", "hopper", (9, 0), "nvlink"),
    _nvidia("h20", "hopper", (9, 0), "nvlink"),
    _nvidia("b200", "blackwell", (10, 0), "nvlink"),
    _nvidia("gb200", "blackwell", (10, 0), "nvlink", hosts=4),
    _nvidia("b300", "blackwell", (10, 3), "nvlink"),
    _nvidia("gb300", "blackwell", (10, 3), "nvlink", hosts=4),
    _nvidia("rtxpro6000 rtx5090 rtx5080", "blackwell", (12, 0)),
    _nvidia("gb10", "blackwell", (12, 1)),
    _amd("mi210 mi250 mi250x", None),
    _amd("mi300a mi300x mi308x mi325x", "cdna3"),
    _amd("mi350x mi355x", "cdna4"),
)
_AFTER = r"(?=sxm|pcie|nvl|oam|[^a-z0-9]|$)"
_OF_CAPABILITY: tuple[tuple[Capability, Generation], ...] = (
    ((10, 0), "blackwell"), ((9, 0), "hopper"), ((8, 9), "ada"), ((8, 0), "ampere"),
    ((7, 5), "turing"), ((7, 0), "volta"),
)  # fmt: skip
_MAJOR_AFTER_ALL = 13
"""Compute capabilities from here on have no generation that is known here."""


@cache
def chip_of(device: str) -> Chip | None:
    """Return the chip that a device's name names; None where none is recognized.

    A board with PCI Express, or "NVL", whose bridges join two or four, has its links from there.
    """
    text = re.sub(r"\b(rtx|titan|pro)[ -]", r"\1", device.strip().lower())
    text = re.sub(r"\b(rtx\w*)[ -](ti|ada|d)\b", r"\1\2", text)
    text = re.sub(r"\brtxa(?=\d)", "a", text)
    for chip in CHIPS:
        name = re.sub(r"^rtx(?=\d0\d0)", "(rtx)?", re.sub("x$", "x?", chip.name))
        if re.search(rf"(?<![a-z0-9]){name}{_AFTER}", text):
            is_slower = chip.links == "nvlink" and re.search(r"pcie|nvl\b", text)
            return replace(chip, links="pcie", is_slower_board=True) if is_slower else chip
    return None


def generation_of(capability: Capability) -> Generation | None:
    """Return the NVIDIA generation of a compute capability; None where none is known."""
    if capability[0] >= _MAJOR_AFTER_ALL:
        return None
    return next((name for least, name in _OF_CAPABILITY if capability >= least), None)
