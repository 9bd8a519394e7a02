"""The JSON schema of a document, read from the dataclass that `encode` writes and `decode` reads.

Documents that are put together from values have `Keys` with the values' types.

Source: JSON Schema, draft 2020-12. What no annotation says (ranges, hashes) `decode` checks alone.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moetune.domain.document import DERIVED, is_required, written_kinds

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCALARS: Mapping[object, dict[str, object]] = types.MappingProxyType(
    {
        int: {"type": "integer"},
        float: {"type": "number"},
        str: {"type": "string"},
        bool: {"type": "boolean"},
        types.NoneType: {"type": "null"},
        object: {},
        Any: {},
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """An object that is put together: its keys with their types, and no others.

    Args:
        of: a dataclass, whose keys it has besides.
        optional: keys that may be missing.
    """

    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    of: type | None = None
    optional: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def list_of(keys: Keys) -> Any:  # noqa: ANN401 - an annotation
    """Return the type of a list of objects that are put together."""
    return types.GenericAlias(tuple, (keys, ...))


def schema_of(*forms: Keys, tag: str | None = None) -> dict[str, object]:
    """Return the JSON schema of a document in one of several forms.

    Keys of a dataclass whose field has no default are required, no others are allowed.

    Args:
        tag: value of the key `schema` that is put before the others; None where there is none.
    """
    first = {} if tag is None else {"schema": {"const": tag}}
    title = forms[0].of.__name__ if tag is None and forms[0].of else tag
    definitions: dict[str, object] = {}
    objects = [_put_together(form, definitions) for form in forms]
    for written in objects:
        written["properties"] = {**first, **written["properties"]}
        written["required"] = [*first, *written["required"]]
    whole: dict[str, object] = objects[0] if len(objects) == 1 else {"anyOf": objects}
    return {"$schema": DIALECT, "title": title, **whole, "$defs": definitions}


def _put_together(keys: Keys, definitions: dict[str, object]) -> dict[str, Any]:
    whole = _no_keys() if keys.of is None else _object(keys.of, definitions)
    for name, kind in {**keys.keys, **keys.optional}.items():
        whole["properties"][name] = _schema(kind, definitions)
    whole["required"] += [*keys.keys]
    return whole


def _no_keys() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "required": [], "additionalProperties": False}


def _object(kind: type, definitions: dict[str, object]) -> dict[str, Any]:
    derived = {
        name: get_type_hints(getattr(kind, name).fget)["return"]
        for name in getattr(kind, DERIVED, ())
    }
    kinds = {**written_kinds(kind), **derived}
    return {
        "type": "object",
        "properties": {name: _schema(written, definitions) for name, written in kinds.items()},
        "required": [item.name for item in dataclasses.fields(kind) if is_required(item)],
        "additionalProperties": False,
    }


def _schema(kind: Any, definitions: dict[str, object]) -> dict[str, object]:  # noqa: ANN401 - any annotation
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(choice, definitions) for choice in inner]}
    if origin is Literal:
        return {"enum": [*inner]}
    if origin is tuple:
        return _array(inner, definitions)
    if origin is not None:
        return {"type": "object", "additionalProperties": _schema(inner[1], definitions)}
    if dataclasses.is_dataclass(kind):
        written: Callable[..., dict[str, object]] = (
            _put_together if isinstance(kind, Keys) else _reference
        )
        return written(kind, definitions)
    return dict(_SCALARS[kind])


def _array(kinds: tuple[Any, ...], definitions: dict[str, object]) -> dict[str, object]:
    if kinds[-1] is Ellipsis:
        return {"type": "array", "items": _schema(kinds[0], definitions)}
    items = [_schema(item, definitions) for item in kinds]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def _reference(kind: Any, definitions: dict[str, object]) -> dict[str, object]:  # noqa: ANN401 - a class
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        definitions[kind.__name__] = _object(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}
