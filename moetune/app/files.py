"""Profile files (TOML) and plan files (JSON): errors with their place, and atomic writing.

Reading `profile_to_toml(…)`, or a plan's `text`, gives a value equal to the written value.
"""

import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias

from moetune.app.profile_keys import in_si
from moetune.app.wiring import StoreFinder
from moetune.domain.any_plan import AnyPlan, plan_from_json
from moetune.domain.document import decode, encode, refuse_pointer, refuse_zip, shown
from moetune.domain.errors import InputError
from moetune.domain.profile import (
    CollectiveLine,
    CopyLine,
    GemmLine,
    Profile,
    RowsLine,
    profile_from_document,
)
from moetune.domain.reference import Network, Table
from moetune.domain.samples import Sample
from moetune.domain.spelling import nearest_then
from moetune.domain.units import format_bytes
from moetune.fit.based import BaseScaling, scaled_base, without_foreign
from moetune.runtime.files import replace_file

_PACKAGE = Path(__file__).resolve().parent.parent
_MOST_BYTES = 16 * 2**20
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_Row: TypeAlias = GemmLine | CollectiveLine | CopyLine | RowsLine | Table | Network | Sample

_UNIQUE: Mapping[str, tuple[str, ...]] = {
    "gemm": ("dtype",),
    "collective": ("op", "group_size", "num_nodes", "in_flight"),
    "copy": ("direction", "pinned", "both_ways"),
    "rows": ("op", "dtype"),
}
"""Keys that identify a row of a table: of two rows with equal keys the second would not count."""


def load_profile_file(path: Path) -> Profile:
    """Return the profile in a TOML file: see `profile_in_toml`.

    Raises:
        InputError: it is missing or not a profile; the message names the file and the line or key.
    """
    document = parse_toml(read_text(path, "profile"), f"profile {path}")
    try:
        return profile_in_toml(document)
    except InputError as error:
        raise InputError(f"{path}: {error.what}", error.hint) from None


def parse_toml(text: str, where: str) -> dict[str, object]:
    """Return the values of a TOML text from `where`, or raise InputError that names the line."""
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


def profile_in_toml(document: Mapping[str, object]) -> Profile:
    """Return the profile in the plain values of a profile file.

    With `base = "NAME"` the file's keys replace those of the reference profile NAME, tables key by
    key. `[scaled]` gives the peaks of both machines, whose ratios scale the base's times. Only
    reference profiles can be a base: no other file is read.

    Raises:
        InputError: the message names the key.
    """
    values = dict(document)
    name, scaled = values.pop("base", None), values.pop("scaled", None)
    if name is None:
        if scaled is not None:
            raise InputError("profile.scaled needs a base", 'add a base, such as base = "h100-x8"')
        profile = profile_from_document(in_si(values, devices_per_node=_per_node(values)))
    else:
        profile = _on_base(values, _base_of(name), scaled)
    _check_unique(profile)
    return profile


def _on_base(stated: Mapping[str, object], base: Profile, scaled: object) -> Profile:
    """Return the profile of a file's `stated` keys over a base, which `scaled` adapts first."""
    per_node = _per_node(stated) or base.machine.devices_per_node
    values = in_si(stated, devices_per_node=per_node)
    if scaled is not None:
        base = scaled_base(base, decode(BaseScaling, scaled, "profile.scaled"))
    whole: dict[str, object] = encode(base)
    for key, value in values.items():
        inherited = whole.get(key)
        is_table = isinstance(value, dict) and isinstance(inherited, dict)
        whole[key] = {**inherited, **value} if is_table else value  # type: ignore[dict-item]
    for key in {"schema", "name"} - values.keys():
        del whole[key]  # of the file, never of the base
    profile, fingerprint = profile_from_document(whole), values.get("fingerprint")
    has_facts = isinstance(fingerprint, Mapping) and "hardware" in fingerprint
    facts = profile.fingerprint.hardware if has_facts else {}
    return without_foreign(profile, base, stated=values.keys(), facts=facts)


def _per_node(document: Mapping[str, object]) -> object:
    machine = document.get("machine")
    return machine.get("devices_per_node") if isinstance(machine, Mapping) else None


def _base_of(name: object) -> Profile:
    references = bundled_profiles()
    if not isinstance(name, str) or name not in references:
        raise InputError(
            f"base: no reference profile is named {shown(name)}",
            nearest_then(f"use one of {', '.join(references)}", name, references),
        )
    return reference_profile(name)


@cache
def reference_profile(name: str) -> Profile:
    """Return a reference profile; the process reads its file once, as that takes long."""
    return load_profile_file(bundled_profiles()[name])


def _check_unique(profile: Profile) -> None:
    for table, names in _UNIQUE.items():
        rows = getattr(profile, table)
        _check_rows((tuple(getattr(row, name) for name in names) for row in rows), table, names)
    for number, table_of in enumerate(profile.tables):
        sizes = (point[:-1] for point in table_of.points)
        _check_rows(sizes, f"tables[{number}].points", ("size",))


def _check_rows(keys: Iterable[tuple[object, ...]], table: str, names: tuple[str, ...]) -> None:
    places: dict[tuple[object, ...], int] = {}
    for number, key in enumerate(keys):
        if (first := places.setdefault(key, number)) != number:
            values = ", ".join(map(str, key))
            raise InputError(
                f"profile.{table}[{number}] repeats profile.{table}[{first}]: "
                f"{' and '.join(names)} {values}",
                "keep one of them",
            )


def load_plan_file(path: Path) -> AnyPlan:
    """Return the plan in a JSON file; raise InputError that names the file and the line or key."""
    return plan_from_json(read_text(path, "plan"), str(path))


def profile_to_toml(profile: Profile) -> str:
    """Return the profile file's text, without default values and without empty tables."""
    return "\n".join(_profile_lines(profile)) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, but a device or a pipe directly; raise InputError on failure."""
    target = path.resolve()
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(target, text.encode())
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}",
            "name a file in an existing folder that you may write to",
        ) from None
    except UnicodeEncodeError as error:
        raise InputError(f"{path} cannot hold this text: {error.reason}") from None


def bundled_profiles() -> dict[str, Path]:
    """Return the reference profiles' files by name, from the package or the checkout."""
    for folder in (_PACKAGE / "_profiles", _PACKAGE.parent / "profiles"):
        if folder.is_dir():
            return dict(sorted((file.stem, file) for file in folder.glob("*.toml")))
    return {}


def read_text(path: Path, what: str) -> str:
    """Return the text of a file; error messages call the file `what`.

    Raises:
        InputError: it cannot be read, is larger than 16 MiB, not UTF-8, or a Git LFS pointer.
    """
    try:
        with path.open("rb") as file:  # a device may never end
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise InputError(f"{what} {path} is larger than {format_bytes(_MOST_BYTES)}")
    refuse_zip(content, f"{what} {path}", "unpack it, and name the file inside")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{what} {path} is not UTF-8 text") from None
    refuse_pointer(text, f"{what} {path}")
    return text


def _profile_lines(profile: Profile) -> Iterator[str]:
    yield f"schema = {profile.schema}"
    for key in ("name", "provenance", "citation"):
        yield f"{key} = {toml_value(getattr(profile, key))}"
    yield from _table("machine", encode(profile.machine))
    if profile.network is not None:
        yield from _table("network", _without_defaults(profile.network))
    for key in (field.name for field in dataclasses.fields(profile)):
        rows = getattr(profile, key)
        if isinstance(rows, tuple) and key != "samples":
            yield from _rows(key, rows)
    if not profile.interference.is_none:
        yield from _table("interference", encode(profile.interference))
    for key in ("hardware", "software"):
        if facts := getattr(profile.fingerprint, key):
            yield from _table(f"fingerprint.{key}", facts)
    yield from _rows("samples", profile.samples)


def _table(name: str, values: Mapping[str, object]) -> Iterator[str]:
    yield f"\n[{name}]"
    yield from _pairs(values)


def _rows(name: str, rows: Iterable[_Row]) -> Iterator[str]:
    for row in rows:
        yield f"\n[[{name}]]"
        yield from _pairs(_without_defaults(row))


def _without_defaults(row: _Row) -> dict[str, object]:
    items = ((item, getattr(row, item.name)) for item in dataclasses.fields(row))
    return {
        item.name: encode(value)
        for item, value in items
        if value != item.default or item.name == "kind"
    }


def _pairs(values: Mapping[str, object]) -> Iterator[str]:
    for key, value in values.items():
        text = toml_value(value)
        if key == "points" and isinstance(value, list):  # a row a line
            text = "[\n" + "".join(f"  {toml_value(row)},\n" for row in value) + "]"
        yield f"{_key(key)} = {text}"


def toml_value(value: object) -> str:
    """Return a plain value in TOML's notation."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        # TOML's escapes are JSON's, except for DEL, which JSON does not escape.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    raise TypeError(f"TOML has no {value!r}")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)


def is_plan_path(wanted: str) -> bool:
    """Return whether a text names a plan's file and not a plan's id."""
    return wanted.endswith(".json") or "/" in wanted


def find_plan(wanted: str | os.PathLike[str], *, stores: StoreFinder) -> AnyPlan:
    """Return the plan of a file, or of an id in the store.

    Args:
        wanted: a path, a text that ends in .json or has a slash, another file, or an id or its
            beginning.

    Raises:
        InputError: the file is missing, a folder or broken; or no plan, or several, match the id.
    """
    text, path = os.fspath(wanted), Path(wanted).expanduser()
    if not isinstance(wanted, str) or is_plan_path(text) or path.is_file():
        if path.is_dir():
            raise InputError(f"{text} is a folder, not a plan", "name one of its files")
        return load_plan_file(path)
    with stores() as store:
        plan = store.plan(text) if store and text else None
        newest = store.plans(limit=1) if store and plan is None else ()
    if plan is not None:
        return plan
    hint = f"the newest is {newest[0].id[:6]}" if newest else "make it:  moetune plan --model gpt-s"
    raise InputError(f"no plan has an id that begins with {text!r}", hint)
