"""Conversion of frozen dataclasses to plain values and back, checked by their annotations.

Plans, profiles and samples travel as JSON or TOML. A document has exactly the keys of its
dataclass; errors name the path of a wrong value, as in `profile.gemm[2].alpha_seconds`.
"""

import dataclasses
import functools
import hashlib
import json
import math
import reprlib
import types
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from moetune.domain.errors import InputError
from moetune.domain.spelling import nearest_or
from moetune.domain.withdrawn import UNREAD_KEYS, withdrawal_of

T = TypeVar("T")
_LONGEST_KEY = 60
UNLESS_DEFAULT = MappingProxyType({"encoded": "unless default"})
"""Metadata of a field that was added later: documents omit it while it has its default."""
ALWAYS = MappingProxyType({"encoded": "always"})
"""Metadata of a field that documents must have, although callers have a default."""
DERIVED = "DOCUMENT_PROPERTIES"
"""Class attribute that names further properties in documents: written, and never read."""
_LFS_POINTER = b"version https://git-lfs.github.com/"
_ZIP = b"PK\x03\x04"
_SCALARS = frozenset({bool, float, int, str})
LARGEST = 2**63 - 1
"""The largest whole number of a document: the largest that a database's column holds."""


class Written(NamedTuple):
    """How documents write a field; the field's metadata has it as `written`.

    Args:
        kind: annotation of the written form.
        write: returns the written form of a value.
        read: returns the value of a written form; raises InputError for a wrong form.
    """

    kind: Any
    write: Callable[[Any], object]
    read: Callable[[Any], object]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDocument:
    """An error for programs, as every command prints it with `--json`.

    Args:
        hint: the next step; empty where there is none.
        plan: the document of a plan that does not fit; absent with other errors.
    """

    schema: Literal["moetune.error/1"] = "moetune.error/1"
    error: str
    hint: str
    exit_code: int
    plan: Mapping[str, object] | None = dataclasses.field(default=None, metadata=UNLESS_DEFAULT)


def encode(value: object) -> Any:  # noqa: ANN401 - plain values of any shape
    """Return the value as dicts, lists and scalars; fields of `UNLESS_DEFAULT` may be left out."""
    if value is None or type(value) in _SCALARS:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encode_dataclass(value)
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [item if type(item) in _SCALARS else encode(item) for item in value]
    return value


def _encode_dataclass(value: Any) -> dict[str, object]:  # noqa: ANN401 - any dataclass
    plain = {}
    for item in dataclasses.fields(value):
        content, form = getattr(value, item.name), item.metadata.get("written")
        if item.metadata.get("encoded") != "unless default" or content != _default(item):
            plain[item.name] = encode(content if form is None else form.write(content))
    for name in getattr(value, DERIVED, ()):
        plain[name] = encode(getattr(value, name))
    return plain


def _default(item: "dataclasses.Field[Any]") -> object:
    made = item.default_factory
    return item.default if made is dataclasses.MISSING else made()


def is_required(item: "dataclasses.Field[Any]") -> bool:
    """Return whether a document must have a field."""
    has_default = _default(item) is not dataclasses.MISSING
    return item.metadata.get("encoded") == "always" or not has_default


def decode(cls: type[T], plain: object, where: str) -> T:
    """Return the dataclass that `encode` wrote; raises InputError that names a wrong value."""
    return cast("T", _decode(cls, plain, where))


def decode_schema(
    cls: type[T], plain: object, where: str, *, schemas: tuple[int, ...], hint: str
) -> T:
    """Return the dataclass in a file's values; raises InputError with `hint` for another schema."""
    if not isinstance(plain, dict) or "schema" not in plain:
        raise InputError(f"{where} lacks the key 'schema'", f"is this a moetune {where} file?")
    if plain["schema"] not in schemas:
        raise InputError(
            f"{where} has schema {plain['schema']!r}, this moetune reads {_names(schemas)}", hint
        )
    return decode(cls, plain, where)


def canonical_json(value: object) -> str:
    """Return the canonical JSON text of a value: sorted keys, no spaces, finite numbers."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: object) -> str:
    """Return the sha256 of the canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def is_pointer(text: str | bytes) -> bool:
    """Return whether a file's text is the pointer that Git LFS left in its place."""
    start = len(_LFS_POINTER)
    return (text[:start].encode() if isinstance(text, str) else text[:start]) == _LFS_POINTER


def refuse_pointer(text: str | bytes, where: str) -> None:
    """Raise InputError if a file's text is the pointer that Git LFS left in its place."""
    if is_pointer(text):
        raise InputError(f"{where} is a Git LFS pointer, not the file itself", "run:  git lfs pull")


def refuse_zip(content: bytes, where: str, hint: str) -> None:
    """Raise InputError if a file is a zip archive, which people send without unpacking it."""
    if content.startswith(_ZIP):
        raise InputError(f"{where} is a zip archive", hint)


def shown(plain: object) -> str:
    """Return a value shortened for an error, since requests hold long and deep values."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 100
    short.maxlevel = 3
    return short.repr(plain)


def _decode(kind: Any, plain: object, where: str) -> object:  # noqa: ANN401 - any annotation
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(kind), plain, where)
    if origin is Literal:
        if plain in get_args(kind):
            return plain
        if (row := withdrawal_of(where.rpartition(".")[2], plain)) is not None:
            raise row.refusal(where)
        raise InputError(f"{where} must be one of {_names(get_args(kind))}, got {shown(plain)}")
    if origin is tuple:
        return _decode_tuple(get_args(kind), plain, where)
    if origin is not None and issubclass(origin, Mapping):
        return _decode_mapping(get_args(kind)[1], plain, where)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(cast("type", kind), plain, where)
    return _decode_scalar(kind, plain, where)


def _decode_scalar(kind: type, plain: object, where: str) -> object:
    if kind is float and _is_finite(plain):
        return float(cast("float", plain))
    if kind is int and type(plain) is int and abs(plain) > LARGEST:
        raise InputError(f"{where} is too large: at most {LARGEST}")
    if kind is object or (kind in (int, str, bool) and type(plain) is kind):
        return plain
    name = {float: "a finite number", int: "a whole number", str: "a text", bool: "true or false"}
    raise InputError(f"{where} must be {name.get(kind, kind.__name__)}, got {shown(plain)}")


def _is_finite(plain: object) -> bool:
    try:
        return type(plain) in (int, float) and math.isfinite(cast("float", plain))
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _decode_tuple(kinds: tuple[Any, ...], plain: object, where: str) -> tuple[object, ...]:
    if not isinstance(plain, (list, tuple)):
        raise InputError(f"{where} must be a list, got {shown(plain)}")
    if kinds == (float, ...) and all(map(_is_finite, plain)):
        return tuple(map(float, plain))  # faster: a profile has tens of thousands
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(plain)
    if len(kinds) != len(plain):
        raise InputError(f"{where} must have {len(kinds)} entries, got {len(plain)}")
    return tuple(
        _decode(kind, item, f"{where}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, plain, strict=True))
    )


def _decode_mapping(kind: Any, plain: object, where: str) -> Mapping[str, object]:  # noqa: ANN401
    if not isinstance(plain, Mapping):
        raise InputError(f"{where} must be a table, got {shown(plain)}")
    names = (shown(key) if len(str(key)) > _LONGEST_KEY else str(key) for key in plain)
    items = zip(names, plain.items(), strict=True)
    return {str(key): _decode(kind, item, f"{where}.{name}") for name, (key, item) in items}


def _decode_union(kinds: tuple[Any, ...], plain: object, where: str) -> object:
    if plain is None and type(None) in kinds:
        return None
    choices = [kind for kind in kinds if kind is not type(None)]
    if len(choices) == 1:
        return _decode(choices[0], plain, where)
    tags = {get_args(written_kinds(kind)["kind"])[0]: kind for kind in choices}
    tag = plain.get("kind") if isinstance(plain, Mapping) else None
    if not isinstance(tag, str) or tag not in tags:
        raise InputError(f"{where}.kind must be one of {_names(tags)}, got {shown(tag)}")
    return _decode(tags[tag], plain, where)


@functools.cache
def written_kinds(kind: type) -> Mapping[str, Any]:
    """Return the annotations of a dataclass's fields as documents have them, looked up once."""
    hints, forms = get_type_hints(kind), _forms(kind)
    names = [item.name for item in dataclasses.fields(kind)]
    return {name: forms[name].kind if name in forms else hints[name] for name in names}


@functools.cache
def _forms(kind: type) -> Mapping[str, Written]:
    items = dataclasses.fields(kind)
    return {item.name: item.metadata["written"] for item in items if "written" in item.metadata}


def _decode_dataclass(kind: type, plain: object, where: str) -> object:
    if not isinstance(plain, Mapping):
        raise InputError(f"{where} must be a table, got {shown(plain)}")
    items = {item.name: item for item in dataclasses.fields(kind)}
    names = {*items, *getattr(kind, DERIVED, ())}
    for key in plain:
        if key not in names and (kind.__name__, key) not in UNREAD_KEYS:
            _refuse_key(kind, key, plain[key], where)
    kinds = written_kinds(kind)
    values: dict[str, object] = {}
    for name, item in items.items():
        if name in plain:
            values[name] = _decode(kinds[name], plain[name], f"{where}.{name}")
        elif is_required(item):
            raise InputError(f"{where} lacks the key {name!r}")
    try:
        for name in _forms(kind).keys() & values.keys():
            values[name] = _forms(kind)[name].read(values[name])
        return kind(**values)
    except InputError as error:
        raise InputError(f"{where}: {error.what}", error.hint) from None


def _refuse_key(kind: type, key: object, value: object, where: str) -> None:
    """Raise InputError for a key that the class does not have, or has no longer."""
    if (row := withdrawal_of(kind.__name__, key)) is not None:
        if not value:  # null or empty: older files say that it was not used
            return
        raise row.refusal(where)
    names = [item.name for item in dataclasses.fields(kind)]
    hint = nearest_or(f"known keys: {_names(names)}", key, names)
    raise InputError(f"{where} has the unknown key {shown(key)}", hint)


def _names(values: object) -> str:
    return ", ".join(str(value) for value in cast("tuple[object, ...]", values))
