"""A described machine as a profile file; a reference machine stands in for the rest."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from moetune.app.files import (
    bundled_profiles,
    parse_toml,
    profile_in_toml,
    reference_profile,
    toml_value,
)
from moetune.domain.chips import LINK_BYTES_PER_SECOND, Chip, chip_of
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.site import site_of
from moetune.domain.spelling import about, nearest_then
from moetune.domain.units import format_bytes, format_rate, parse_bytes, parse_rate
from moetune.report.section import plural

_NODES_OF = re.compile(r"(\w+)-(?:x4|x8|nvl72)")
_SXM = re.compile(r"[ -]?sxm\d?$")
_FASTEST_PCIE = 64e9
"""Bytes a second in each direction; every PCI Express 5 link is slower."""
_BY_HAND = "or write a file with a base and [scaled] peaks: an example is in docs/profile-file.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A machine as people describe it; rates and sizes are texts with units, such as "80GB".

    Args:
        gpu: GPU of a reference machine, such as "h100".
        nics: network cards of a node; None, with a single node, for the reference machine's cards.
        nic_rate: rate of a card in each direction: "400Gbit/s".
        memory: bytes of a GPU that a process may use: "80GB".
        link_rate: rate in each direction from a GPU to the others of its node: "450GB/s".

    Raises:
        InputError: a rate or a size has no unit, or only one of `nics` and `nic_rate` is given.
    """

    name: str
    gpu: str
    gpus_per_node: int
    nodes: int
    nics: int | None = None
    nic_rate: str = ""
    memory: str = ""
    link_rate: str = ""

    def __post_init__(self) -> None:
        for name, parse in (
            ("nic_rate", parse_rate), ("memory", parse_bytes), ("link_rate", parse_rate)
        ):  # fmt: skip
            if text := getattr(self, name):
                with about(name):
                    parse(text)
        has_cards = self.nics is not None and bool(self.nic_rate)
        if not has_cards and (self.nodes > 1 or self.nics is not None or self.nic_rate):
            raise InputError(
                "the description of a network needs --nics and --nic-rate",
                "such as --nics 8 --nic-rate 400Gbit/s for a node of eight cards",
            )

    @property
    def is_on_pcie(self) -> bool:
        """Whether the described links are so slow that they must be PCI Express."""
        return bool(self.link_rate) and parse_rate(self.link_rate) < _FASTEST_PCIE


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A profile file of a described machine.

    Args:
        stand_ins: sentences on what the reference machine stands in for.
    """

    profile: Profile
    base: str
    text: str
    stand_ins: tuple[str, ...]


def gpus() -> Mapping[str, str]:
    """Return the name of the reference machine of whole nodes for each GPU, by the GPU's name."""
    matches = ((name, _NODES_OF.fullmatch(name)) for name in bundled_profiles())
    return MappingProxyType({match[1]: name for name, match in matches if match})


def reference_of(gpu: str) -> Profile:
    """Return the reference machine of a GPU's chip or device; raise InputError for other GPUs."""
    machines, chip = gpus(), chip_of(gpu)
    name = _SXM.sub("", gpu.strip().lower().removeprefix("nvidia "))
    if chip is not None and chip.name in machines and _is_named(gpu, chip, machines):
        name = chip.name
    if name not in machines:
        there = f"known: {', '.join(machines)}\n  {_BY_HAND}"
        # GPUs of another generation are no misspellings of a chip.
        near = [
            machine for machine in machines
            if chip is None or ((of := chip_of(machine)) and of.generation == chip.generation)
        ]  # fmt: skip
        raise InputError(
            f"no reference machine has the GPU {gpu!r}", nearest_then(there, name, near)
        )
    return reference_profile(machines[name])


def _is_named(gpu: str, chip: Chip, machines: Mapping[str, str]) -> bool:
    """Return whether a text is exactly a chip's or device's name; more words may mean another."""
    text = re.sub(r"[^a-z0-9]", "", gpu.lower())
    device = re.sub(r"[^a-z0-9]", "", reference_profile(machines[chip.name]).machine.device.lower())
    short = chip.name.removesuffix("x").removeprefix("rtx")
    return text in {chip.name, short, device, device.removeprefix("nvidia")}


def describe(description: Description) -> Described:
    """Return a description's profile file; raise InputError for wrong values and unknown GPUs."""
    name, base = description.name, reference_of(description.gpu)
    if name in bundled_profiles() or not name.strip() or not name.isprintable():
        why = "is that of a reference machine" if name in bundled_profiles() else "cannot be used"
        raise InputError(f"the name {name!r} {why}", "choose another name")
    stand_ins = tuple(_stand_ins(description, base))
    text = "\n".join(_lines(description, base, stand_ins)) + "\n"
    profile = profile_in_toml(parse_toml(text, "the description"))
    return Described(profile=profile, base=base.name, text=text, stand_ins=stand_ins)


def _link(base: Profile) -> float:
    return LINK_BYTES_PER_SECOND[base.name.partition("-")[0]]


def _stand_ins(description: Description, base: Profile) -> Iterator[str]:
    """Yield what a reference machine stands in for, as the description does not say it."""
    machine, rate = base.machine, format_rate(_link(base))
    yield f"GEMMs of {machine.device}"
    ratio = ", by the ratio of the rates" if description.link_rate else ""
    yield f"collectives inside a node ({rate} for each GPU){ratio}"
    if description.gpus_per_node > machine.devices_per_node:
        yield f"groups of {machine.devices_per_node} for those of more GPUs in a node"
    yield "copies between host and GPU"
    yield "memory-bound operations, at the bandwidth of its memory"
    if not description.memory:
        yield f"memory of a GPU, {format_bytes(machine.memory_bytes)} for a process"
    site = site_of(base)
    is_domain = machine.devices_per_node > site.devices_per_node  # of NVLink, over several hosts
    most = site.devices_per_node if is_domain else description.gpus_per_node
    is_same_host = min(description.gpus_per_node, most) == site.devices_per_node
    if site.host_memory_bytes is not None and is_same_host:
        yield f"memory of a host, {format_bytes(site.host_memory_bytes)}"
    if base.network is not None and description.nics is None:
        nic_rate = format_rate(base.network.nic_bytes_per_second)
        yield f"network between nodes, {nic_rate} for each GPU"
    else:
        yield "start-up of a network, and the share of its cards' rate that it reaches"


def _lines(description: Description, base: Profile, stand_ins: tuple[str, ...]) -> Iterator[str]:
    count = plural(description.nodes, "node")
    yield f"# {count} of {description.gpus_per_node} GPUs, described and not measured: a plan made"
    yield '# from it is labelled "modelled". docs/profile-file.md of moetune explains the keys.'
    yield "schema = 1"
    yield f"name = {toml_value(description.name)}"
    yield 'provenance = "modelled"'
    yield f"citation = {toml_value(f'described, with {base.name} for the rest')}"
    yield ""
    yield "# The reference machine that stands in for what is not described:"
    yield from (f"# - {part}" for part in stand_ins)
    yield f"base = {toml_value(base.name)}"
    yield from _machine_lines(description)
    yield from _network_lines(description)
    if description.link_rate:
        here, there = map(toml_value, (description.link_rate, f"{_link(base) / 1e9:g}GB/s"))
        yield f"\n# Times of {base.name} are scaled by the ratio of these peaks of data sheets."
        yield f"[scaled]\nlinks = {{ here = {here}, base = {there} }}"


def _machine_lines(description: Description) -> Iterator[str]:
    yield "\n[machine]"
    yield f"num_devices = {description.nodes * description.gpus_per_node}"
    yield f"devices_per_node = {description.gpus_per_node}"
    if description.memory:
        yield f"memory = {toml_value(description.memory)}    # of one GPU, what a process may use"
    if description.is_on_pcie:
        yield "\n[fingerprint.hardware]"
        yield 'nvlink_peers = "0"    # links of this rate are PCI Express'


def _network_lines(description: Description) -> Iterator[str]:
    if description.nics is None:
        return
    yield "\n[network]"
    words = f"{plural(description.nics, 'card')} of {description.nic_rate} in a node, as described"
    yield f"source = {toml_value(words)}"
    yield f"nics = {description.nics}    # of a node"
    yield f"nic_rate = {toml_value(description.nic_rate)}    # of one card, one way"


def check_new(path: Path, *, force: bool) -> None:
    """Raise InputError unless the name ends in .toml and no file is replaced without `force`."""
    if path.suffix != ".toml":
        raise InputError(f"{path} does not end in .toml", f"name it {path.with_suffix('.toml')}")
    if path.exists() and not force:
        raise InputError(f"{path} exists already", "replace it with --force, or name another file")
