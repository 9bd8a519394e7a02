"""The one reader of profile files: of the command line, of a service's uploads, of references.

Text becomes plain values, keys with units their SI keys, a file with a base the whole profile.
"""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from moetune.app.profile_keys import in_si
from moetune.domain.document import decode, encode, refuse_pointer, shown
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile, profile_from_document
from moetune.domain.spelling import nearest_then
from moetune.fit.based import BaseScaling, scaled_base, without_foreign

_UNIQUE: Mapping[str, tuple[str, ...]] = {
    "gemm": ("dtype",),
    "collective": ("op", "group_size", "num_nodes", "in_flight"),
    "copy": ("direction", "pinned", "both_ways"),
    "rows": ("op", "dtype"),
}
"""Keys of a table, of which no two rows have all in common: the second would not count."""


def parse_toml(text: str, where: str) -> dict[str, object]:
    """Return the plain values of a TOML text.

    Args:
        where: the text's source, for the error.

    Raises:
        InputError: the text is not TOML; the message names the line.
    """
    refuse_pointer(text, where)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        last_line = f"at line {len(text.splitlines())}, the end"
        what = str(error).replace("at end of document", last_line)
        is_cut = what != str(error)
        raise InputError(
            f"{where} is not valid TOML: {what}",
            "export or measure it again: a file that was cut short cannot be repaired"
            if is_cut
            else 'a text has quotes, such as rate = "42GB/s"; a table a name, such as [machine]',
        ) from None


def profile_in_toml(document: Mapping[str, object], *, references: Mapping[str, Path]) -> Profile:
    """Return the profile in the plain values of a profile file.

    With `base = "NAME"` the file has what differs from the reference profile of that name: each of
    its keys instead of the base's, tables key by key; `[scaled]` compares the two machines.

    Args:
        references: files of the reference profiles by name; no other file is read.

    Raises:
        InputError: the message names the key.
    """
    values = dict(document)
    name, scaled = values.pop("base", None), values.pop("scaled", None)
    if name is None:
        if scaled is not None:
            raise InputError("profile.scaled needs a base", 'add one, such as base = "h100-x8"')
        profile = profile_from_document(in_si(values, devices_per_node=_per_node(values)))
    else:
        profile = _on_base(values, _reference(name, references), scaled)
    _check_unique(profile)
    return profile


def _on_base(own: Mapping[str, object], base: Profile, scaled: object) -> Profile:
    per_node = _per_node(own) or base.machine.devices_per_node
    values = in_si(own, devices_per_node=per_node)
    if scaled is not None:
        base = scaled_base(base, decode(BaseScaling, scaled, "profile.scaled"))
    whole: dict[str, object] = encode(base)
    for key, value in values.items():
        known = whole.get(key)
        is_table = isinstance(value, dict) and isinstance(known, dict)
        whole[key] = {**known, **value} if is_table else value  # type: ignore[dict-item]
    for key in {"schema", "name"} - values.keys():
        del whole[key]  # the file's own, never the base's
    profile = profile_from_document(whole)
    facts = profile.fingerprint.hardware if _has_facts(values) else {}
    return without_foreign(profile, base, stated=values.keys(), facts=facts)


def _has_facts(values: Mapping[str, object]) -> bool:
    fingerprint = values.get("fingerprint")
    return isinstance(fingerprint, Mapping) and "hardware" in fingerprint


def _per_node(document: Mapping[str, object]) -> object:
    machine = document.get("machine")
    return machine.get("devices_per_node") if isinstance(machine, Mapping) else None


def _reference(name: object, references: Mapping[str, Path]) -> Profile:
    if not isinstance(name, str) or name not in references:
        raise InputError(
            f"base: no reference profile is named {shown(name)}",
            nearest_then(f"use one of {', '.join(references)}", name, references),
        )
    return reference_profile(references[name])


@cache
def reference_profile(path: Path) -> Profile:
    """Return a reference profile, read once: it does not change, and reading takes long."""
    references = {file.stem: file for file in path.parent.glob("*.toml")}
    text = path.read_text(encoding="utf-8")
    return profile_in_toml(parse_toml(text, f"profile {path}"), references=references)


def _check_unique(profile: Profile) -> None:
    for table, names in _UNIQUE.items():
        rows = getattr(profile, table)
        _check_rows((tuple(getattr(row, name) for name in names) for row in rows), table, names)
    for at, one in enumerate(profile.tables):
        sizes = (point[:-1] for point in one.points)
        _check_rows(sizes, f"tables[{at}].points", ("size",))


def _check_rows(keys: Iterable[tuple[object, ...]], table: str, names: tuple[str, ...]) -> None:
    known: dict[tuple[object, ...], int] = {}
    for at, key in enumerate(keys):
        if (first := known.setdefault(key, at)) != at:
            values = ", ".join(map(str, key))
            raise InputError(
                f"profile.{table}[{at}] repeats profile.{table}[{first}]: "
                f"{' and '.join(names)} {values}",
                "keep one of them",
            )
