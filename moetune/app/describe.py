"""A machine by description: what is known of it, and a reference machine for all else, as a file.

Whatever the description does not say is the reference's, and the file names it in a comment.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moetune.app.files import (
    bundled_profiles,
    parse_toml,
    profile_in_toml,
    reference_profile,
    toml_value,
)
from moetune.domain.ask import Group, asks_of, described
from moetune.domain.chips import LINK_BYTES_PER_SECOND, Chip, chip_of, peak_flops
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.site import site_of
from moetune.domain.spelling import flag_of, nearest_then
from moetune.domain.units import format_bytes, format_rate, parse_bytes, parse_flops, parse_rate
from moetune.report.section import plural
from moetune.solve.model.machine import ADAM_BYTES

_NODES_OF = re.compile(r"(\w+)-(?:x4|x8|nvl72)")
_SXM = re.compile(r"[ -]?sxm\d?$")
_FASTEST_PCIE = 64e9
"""Bytes a second, one way, that no link of PCI Express 5 reaches."""
_SIZES = "describe it by --tflops and --memory-bandwidth, with --memory and --link-rate"


_MACHINE = Group(title="What is known of the machine")
_MOST = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A machine as people know it; rates and sizes are texts with units, as they are written."""

    name: str
    gpu: str = described(
        _MACHINE, "GPU", "A reference machine's, such as h100; see --tflops.", default=""
    )
    gpus_per_node: int = described(
        _MACHINE, "GPUs of a node", "GPUs that NVLink or PCIe joins.", largest=_MOST
    )
    nodes: int = described(_MACHINE, "Nodes", "Nodes.", largest=_MOST)
    nics: int | None = described(_MACHINE, "Cards", "Network cards of a node.", largest=_MOST)
    nic_rate: str = described(
        _MACHINE, "Rate of a card", "Of one card, one way: 400Gbit/s.", form="RATE",
        parse=parse_rate, default="",
    )  # fmt: skip
    memory: str = described(
        _MACHINE, "Memory of a GPU", "Of one GPU, for a process: 80GB.", parse=parse_bytes,
        default="",
    )  # fmt: skip
    tflops: str = described(
        _MACHINE, "Peak of a GPU", "Peak of another GPU, dense, bfloat16: 362TFLOP/s. The "
        "reference's GEMMs are scaled by it.", form="RATE", parse=parse_flops, default="",
    )  # fmt: skip
    memory_bandwidth: str = described(
        _MACHINE, "Bandwidth of its memory", "Of a GPU's memory: 3.35TB/s.", form="RATE",
        parse=parse_rate, default="",
    )  # fmt: skip
    link_rate: str = described(
        _MACHINE, "Rate of its links", "Of one GPU to the others of its node, one way: 450GB/s.",
        form="RATE", parse=parse_rate, default="",
    )  # fmt: skip
    host_memory: str = described(
        _MACHINE, "Memory of a host", "Of one host: 2TiB.", parse=parse_bytes, default=""
    )
    base: str = described(
        _MACHINE, "Reference", "Reference machine for the rest. Default: the nearest.", default=""
    )

    @property
    def is_on_pcie(self) -> bool:
        """Whether the links that are described are too slow for any others."""
        return bool(self.link_rate) and parse_rate(self.link_rate) < _FASTEST_PCIE


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A profile file of a described machine.

    Args:
        stand_ins: what the reference machine stands in for, in words.
    """

    profile: Profile
    base: str
    text: str
    stand_ins: tuple[str, ...]


DESCRIBED = asks_of(Description)
_EXAMPLES = {
    "gpu": "h100", "gpus_per_node": "8", "nodes": "8", "nics": "8", "nic_rate": "400Gbit/s",
}  # fmt: skip
"""Values of the fields without which no machine is described; cards where it has a network."""


def description_of(name: str, texts: Mapping[str, str]) -> Description:
    """Return the description that the texts of flags make.

    Args:
        name: of the profile.
        texts: by field of `Description`.

    Raises:
        InputError: a text cannot be read, or a field is missing.
    """
    given: dict[str, Any] = {field: DESCRIBED[field].read(text) for field, text in texts.items()}
    for field, value in given.items():
        DESCRIBED[field].check(value)
    has_network = given.get("nodes", 1) > 1 or "nics" in given or "nic_rate" in given
    wanted = [field for field in _EXAMPLES if has_network or not field.startswith("nic")]
    if missing := [field for field in wanted if field not in given]:
        raise InputError(
            f"the description lacks {', '.join(map(flag_of, missing))}",
            f"such as {', '.join(f'{flag_of(field)} {_EXAMPLES[field]}' for field in missing)}",
        )
    return Description(name=name, **given)


def gpus() -> Mapping[str, str]:
    """Return the reference machine of each GPU that has whole nodes, by the GPU's name."""
    matches = ((name, _NODES_OF.fullmatch(name)) for name in bundled_profiles())
    return MappingProxyType({match[1]: name for name, match in matches if match})


def reference_of(gpu: str) -> Profile:
    """Return the reference machine of a GPU, by its chip's name or a device's.

    Raises:
        InputError: no reference machine has it; the hint says which there are.
    """
    machines, chip = gpus(), chip_of(gpu)
    name = _SXM.sub("", gpu.strip().lower().removeprefix("nvidia "))
    if chip is not None and chip.name in machines and _is_named(gpu, chip, machines):
        name = chip.name
    if name not in machines:
        there = f"known: {', '.join(machines)}\n  or {_SIZES}"
        near = machines if chip is None else _of_generation(chip, machines)
        raise InputError(
            f"no reference machine has the GPU {gpu!r}", nearest_then(there, name, near)
        )
    return reference_profile(machines[name])


def _is_named(gpu: str, chip: Chip, machines: Mapping[str, str]) -> bool:
    """Return whether a text is a chip's name, or its device's: other words may be other boards."""
    text = re.sub(r"[^a-z0-9]", "", gpu.lower())
    device = re.sub(r"[^a-z0-9]", "", reference_profile(machines[chip.name]).machine.device.lower())
    short = chip.name.removesuffix("x").removeprefix("rtx")
    return text in {chip.name, short, device, device.removeprefix("nvidia")}


def _of_generation(chip: Chip, names: Iterable[str]) -> list[str]:
    """Return those GPUs that are of a chip's generation: others are no misspellings of it."""
    return [
        name for name in names if (near := chip_of(name)) and near.generation == chip.generation
    ]


def describe(description: Description) -> Described:
    """Return the profile file of a description, checked by the reader of such files.

    Raises:
        InputError: a value that cannot be, an unknown GPU, or numbers that are missing.
    """
    _check(description)
    base = _base_of(description)
    stand_ins = tuple(_stand_ins(description, base))
    text = "\n".join(_lines(description, base, stand_ins)) + "\n"
    document = parse_toml(text, "the description")
    profile = profile_in_toml(document)
    return Described(profile=profile, base=base.name, text=text, stand_ins=stand_ins)


def _check(description: Description) -> None:
    name = description.name
    if name in bundled_profiles() or not name.strip() or not name.isprintable():
        why = "is that of a reference machine" if name in bundled_profiles() else "cannot be one"
        raise InputError(f"the name {name!r} {why}", "choose another name")


def _base_of(description: Description) -> Profile:
    if description.base:
        return _named_base(description)
    if not description.tflops:
        return reference_of(description.gpu)
    return min(map(reference_profile, gpus().values()), key=partial(_strangeness, description))


def _strangeness(description: Description, base: Profile) -> tuple[float, ...]:
    """Return how unlike a reference's GPU is: chip, vendor, links, generation, and its peak.

    Of those alike, machines that others measured come before those that rules derive.
    """
    chip, there = chip_of(description.gpu), chip_of(base.machine.device)
    assert there is not None  # noqa: S101 - a test has all reference machines with a network
    links = "pcie" if description.is_on_pcie else chip.links if chip else "nvlink"
    return (
        chip is None or chip.name != there.name,
        (chip.vendor if chip else "nvidia") != there.vendor,
        links != there.links,
        chip is not None and chip.generation != there.generation,
        base.provenance != "published",
        abs(math.log(parse_flops(description.tflops) / _peak(base))),
    )


def _named_base(description: Description) -> Profile:
    name, references = description.base, bundled_profiles()
    if name not in references or reference_profile(name).network is None:
        usable = [
            reference
            for reference in references
            if reference in gpus().values() or reference.endswith("-efa")
        ]
        why = "has no rule for other nodes" if name in references else "is no reference machine"
        raise InputError(
            f"--base: {name!r} {why}", nearest_then(f"known: {', '.join(usable)}", name, usable)
        )
    if not description.tflops and reference_of(description.gpu).machine.device != (
        reference_profile(name).machine.device
    ):
        raise InputError(
            f"{name} has another GPU than {description.gpu!r}",
            "omit --base, or say by --tflops how fast this GPU is",
        )
    return reference_profile(name)


def _peak(base: Profile) -> float:
    """Return the peak of a reference machine's GPU in bfloat16, in FLOP/s."""
    peak = peak_flops(base.machine.device, "bfloat16")
    assert peak is not None  # noqa: S101 - a test has all reference machines with a network
    return peak


def _link(base: Profile) -> float:
    """Return the rate of a reference machine's GPU to the others of its node, in bytes/s."""
    return LINK_BYTES_PER_SECOND[base.name.partition("-")[0]]


def _stand_ins(description: Description, base: Profile) -> Iterator[str]:
    """Yield the parts of the machine that are the base's, in words."""
    machine, rate = base.machine, format_rate(_link(base))
    if description.tflops:
        peak = f"{_peak(base) / 1e12:.0f} TFLOP/s"
        yield f"GEMMs of {machine.device} ({peak}), by the ratio of the peaks"
    else:
        yield f"GEMMs of {machine.device}"
    ratio = ", by the ratio of the rates" if description.link_rate else ""
    yield f"collectives inside a node ({rate} for each GPU){ratio}"
    if description.gpus_per_node > machine.devices_per_node:
        yield f"groups of {machine.devices_per_node} for those of more GPUs in a node"
    yield "copies between host and GPU"
    if not description.memory_bandwidth:
        yield "memory-bound operations, at the bandwidth of its memory"
    if not description.memory:
        yield f"memory of a GPU, {format_bytes(machine.memory_bytes)} for a process"
    host = site_of(base).host_memory_bytes
    if host is not None and not description.host_memory and _is_host_of(description, base):
        yield f"memory of a host, {format_bytes(host)}"
    if base.network is not None and description.nics is None:
        nic_rate = format_rate(base.network.nic_bytes_per_second)
        yield f"network between nodes, {nic_rate} for each GPU"
    else:
        yield "start-up of a network, and the share of its cards' rate that it reaches"


def _is_host_of(description: Description, base: Profile) -> bool:
    """Return whether a host has the GPUs of the reference's, whose memory it then has."""
    hosts = site_of(base).devices_per_node
    is_domain = base.machine.devices_per_node > hosts  # of NVLink, over several hosts
    here = min(description.gpus_per_node, hosts) if is_domain else description.gpus_per_node
    return not description.tflops and here == hosts


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
    yield from _scaled_lines(description, base)


def _machine_lines(description: Description) -> Iterator[str]:
    yield "\n[machine]"
    if description.tflops:
        yield f"device = {toml_value(description.gpu)}"
    num_devices = description.nodes * description.gpus_per_node
    yield f"num_devices = {num_devices}"
    yield f"devices_per_node = {description.gpus_per_node}"
    if description.memory:
        yield f"memory = {toml_value(description.memory)}    # of one GPU, what a process may use"
    if description.host_memory:
        yield f"host_memory = {toml_value(description.host_memory)}    # of one host"
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


def _scaled_lines(description: Description, base: Profile) -> Iterator[str]:
    memory = description.memory_bandwidth
    if not description.tflops and not description.link_rate and not memory:
        return
    yield f"\n# Times of {base.name} are scaled by the ratio of these peaks of data sheets."
    yield "[scaled]"
    if description.tflops:
        yield _peaks("computation", description.tflops, f"{_peak(base) / 1e12:.10g}TFLOP/s")
    rate = f"{_link(base) / 1e9:g}GB/s"
    unknown = "" if description.link_rate else "    # not described: taken to be alike"
    yield _peaks("links", description.link_rate or rate, rate) + unknown
    betas = {row.op: row.beta_seconds_per_element for row in base.rows}
    if memory and "adam" in betas:
        yield _peaks("memory", memory, f"{ADAM_BYTES / betas['adam'] / 1e9:.4g}GB/s")


def _peaks(key: str, here: str, base: str) -> str:
    return f"{key} = {{ here = {toml_value(here)}, base = {toml_value(base)} }}"


def check_new(path: Path, *, force: bool) -> None:
    """Raise InputError unless `--profile` takes the file by its name, and nothing is replaced."""
    if path.suffix != ".toml":
        raise InputError(f"{path} does not end in .toml", f"name it {path.with_suffix('.toml')}")
    if path.exists() and not force:
        raise InputError(f"{path} exists already", "replace it with --force, or name another file")
