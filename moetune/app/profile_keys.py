"""Keys of a profile file that take units, as well as SI keys: `rate = "42GB/s"`."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import NamedTuple

from moetune.domain.cluster import HOST_MEMORY, NUM_NICS, Machine
from moetune.domain.document import shown
from moetune.domain.errors import InputError
from moetune.domain.profile import CollectiveLine, CopyLine, GemmLine, RowsLine
from moetune.domain.reference import Network
from moetune.domain.spelling import nearest_or
from moetune.domain.units import full_dtype, parse_bytes, parse_flops, parse_rate, parse_startup


class UnitKey(NamedTuple):
    """A key with a unit.

    Args:
        si: the profile's key for the same value in SI units.
        read: returns the value in SI units from a text.
        example: a value for error messages.
    """

    si: str
    read: Callable[[str], float]
    example: str


_ALPHA = UnitKey("alpha_seconds", parse_startup, "12us")
_RATE = UnitKey("beta_seconds_per_byte", lambda text: 1 / parse_rate(text), "42GB/s")
_FLOPS = UnitKey("beta_seconds_per_mac", lambda text: 2 / parse_flops(text), "700TFLOP/s")
UNIT_KEYS: Mapping[str, Mapping[str, UnitKey]] = MappingProxyType(
    {
        "machine": {"memory": UnitKey("memory_bytes", parse_bytes, "80GB")},
        "network": {
            "startup": UnitKey("startup_seconds", parse_startup, "180us"),
            "startup_per_node": UnitKey("startup_seconds_per_node", parse_startup, "2us"),
            "posted_chunk": UnitKey("posted_chunk_seconds", parse_startup, "7.3us"),
        },
        "gemm": {"alpha": _ALPHA, "rate": _FLOPS},
        "collective": {"alpha": _ALPHA, "rate": _RATE},
        "copy": {"alpha": _ALPHA, "rate": _RATE},
        "rows": {"alpha": _ALPHA},
        "tables": {},
    }
)
"""Unit keys by table and key; a network's `nics` and `nic_rate` belong together: see `in_si`."""


def in_si(document: Mapping[str, object], *, devices_per_node: object) -> dict[str, object]:
    """Return a file's plain values with every unit key replaced by its SI key.

    `nics` cards in a node, each with a rate of `nic_rate`, give a device's share of the network,
    `nic_bytes_per_second`. Their number, and a machine's `host_memory`, become hardware facts of
    the fingerprint.

    Args:
        devices_per_node: value of the file or its base; checked if the network needs it.

    Raises:
        InputError: a value has no unit or a wrong unit, or a key is given in both forms.
    """
    values_in_si = _with_facts(document)
    for section in UNIT_KEYS:
        where, values = f"profile.{section}", values_in_si.get(section)
        if isinstance(values, Mapping):
            values_in_si[section] = _table_in_si(values, section, where)
        elif isinstance(values, list):
            values_in_si[section] = [
                _table_in_si(row, section, f"{where}[{index}]") if isinstance(row, Mapping) else row
                for index, row in enumerate(values)
            ]
    if isinstance(network := values_in_si.get("network"), dict):
        values_in_si["network"] = _network_in_si(network, devices_per_node)
    return values_in_si


def _with_facts(document: Mapping[str, object]) -> dict[str, object]:
    """Return the values with host memory and network cards as hardware facts."""
    made, facts = dict(document), {}
    machine, network = made.get("machine"), made.get("network")
    if isinstance(machine, Mapping) and "host_memory" in machine:
        size = _read(machine["host_memory"], parse_bytes, "2TiB", "profile.machine.host_memory")
        facts[HOST_MEMORY] = str(int(size))
        made["machine"] = {key: machine[key] for key in machine if key != "host_memory"}
    if isinstance(network, Mapping) and "nics" in network:
        facts[NUM_NICS] = str(network["nics"])
    if facts:
        fingerprint = made.get("fingerprint", {})
        hardware = fingerprint.get("hardware", {}) if isinstance(fingerprint, Mapping) else {}
        if isinstance(hardware, Mapping):
            made["fingerprint"] = {**fingerprint, "hardware": {**hardware, **facts}}  # type: ignore[dict-item]
    return made


_CARDS = ("nics", "nic_rate")
_OUTSIDE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"machine": ("host_memory",), "network": _CARDS}
)
_OWNERS: Mapping[str, type] = MappingProxyType(
    {
        "machine": Machine, "network": Network, "gemm": GemmLine, "collective": CollectiveLine,
        "copy": CopyLine, "rows": RowsLine,
    }
)  # fmt: skip


def _table_in_si(table: Mapping[str, object], section: str, where: str) -> dict[str, object]:
    made: dict[str, object] = {}
    keys = UNIT_KEYS[section]
    _check_known(table, section, where)
    for key, value in table.items():
        unit = keys.get(key)
        if unit is None:
            _check_number(table, key, keys, where)
            is_short = key == "dtype" and isinstance(value, str)
            made[key] = full_dtype(str(value)) if is_short else value
            continue
        _check_single_form(table, key, unit.si, where)
        made[unit.si] = _read(value, unit.read, unit.example, f"{where}.{key}")
    return made


def _check_known(table: Mapping[str, object], section: str, where: str) -> None:
    """Raise InputError for an unknown key; the hint lists keys of both forms."""
    owner = _OWNERS.get(section)
    if owner is None:
        return
    names = [item.name for item in fields(owner)]
    readable = [*names, *UNIT_KEYS[section], *_OUTSIDE.get(section, ())]
    for key in table:
        if key not in readable:
            hint = nearest_or(f"known keys: {', '.join(readable)}", key, readable)
            raise InputError(f"{where} has the unknown key {shown(key)}", hint)


def _network_in_si(network: dict[str, object], devices_per_node: object) -> dict[str, object]:
    """Return the network with `nics` and `nic_rate` as bytes a second of each device."""
    if not any(key in network for key in _CARDS):
        return network
    where, si = "profile.network", "nic_bytes_per_second"
    for key, partner in (_CARDS, _CARDS[::-1]):
        _check_single_form(network, key, si, where)
        if partner not in network:
            raise InputError(
                f"{where} lacks the key {partner!r}",
                'nics = 8 with nic_rate = "400Gbit/s" are a node of eight cards',
            )
    made = {key: value for key, value in network.items() if key not in _CARDS}
    rate = _read(network["nic_rate"], parse_rate, "400Gbit/s", f"{where}.nic_rate")
    nics = _whole(network["nics"], f"{where}.nics")
    return {**made, si: nics * rate / _whole(devices_per_node, "profile.machine.devices_per_node")}


def _whole(value: object, where: str) -> int:
    if type(value) is not int or value < 1:
        raise InputError(f"{where} must be a whole number of at least 1, got {shown(value)}")
    return value


def _read(value: object, read: Callable[[str], float], example: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InputError(f"{where} must be a text such as {example!r}, got {shown(value)}")
    try:
        return read(value if isinstance(value, str) else f"{value}")
    except InputError as error:
        raise InputError(f"{where}: {error.what}", error.hint) from None


def _check_single_form(table: Mapping[str, object], key: str, si: str, where: str) -> None:
    if si in table:
        raise InputError(f"{where} has both {key!r} and {si!r}", "keep one of them")


def _check_number(
    table: Mapping[str, object], key: str, keys: Mapping[str, UnitKey], where: str
) -> None:
    if isinstance(value := table[key], str):
        for name, unit in keys.items():
            if unit.si == key:
                raise InputError(
                    f"{where}.{key} must be a number, got {shown(value)}",
                    f"with a unit it is {name} = {unit.example!r}",
                )
