"""Schemas say what `decode` accepts, judged by an independent validator."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from jsonschema_rs import validator_for

from moetune.domain.document import UNLESS_DEFAULT, decode, encode
from moetune.domain.errors import InputError
from moetune.domain.json_schema import Keys, ListOf, schema_of


@dataclass(frozen=True, kw_only=True)
class Circle:
    kind: Literal["circle"] = "circle"
    radius: float


@dataclass(frozen=True, kw_only=True)
class Square:
    kind: Literal["square"] = "square"
    side: int


@dataclass(frozen=True, kw_only=True)
class Drawing:
    title: str
    first: Circle
    shapes: tuple[Circle | Square, ...]
    corner: tuple[int, str]
    names: Mapping[str, int]
    is_done: bool
    frame: Square | None = field(default=None, metadata=UNLESS_DEFAULT)


DRAWING = Drawing(
    title="a", first=Circle(radius=2), shapes=(Circle(radius=0.5), Square(side=1)),
    corner=(1, "b"), names={"any": 1}, is_done=True,
)  # fmt: skip
GOOD: dict[str, Any] = encode(DRAWING)


def _without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


def test_a_schema_accepts_what_encode_writes() -> None:
    validator = validator_for(schema_of(Keys(of=Drawing)))
    validator.validate(GOOD)
    validator.validate({**GOOD, "frame": {"kind": "square", "side": 2}})
    validator.validate({**GOOD, "frame": None})


@pytest.mark.parametrize(
    "wrong",
    [
        _without("title"),
        {**GOOD, "unknown": 1},
        {**GOOD, "title": 1},
        {**GOOD, "is_done": 1},
        {**GOOD, "corner": [1]},
        {**GOOD, "corner": [1, "b", 2]},
        {**GOOD, "corner": ["b", 1]},
        {**GOOD, "names": {"any": "1"}},
        {**GOOD, "shapes": [{"kind": "square", "radius": 1}]},
        {**GOOD, "first": {"kind": "square", "radius": 1}},
        {**GOOD, "shapes": {}},
    ],
)
def test_a_schema_refuses_what_decode_refuses(wrong: dict[str, Any]) -> None:
    assert not validator_for(schema_of(Keys(of=Drawing))).is_valid(wrong)
    with pytest.raises(InputError):
        decode(Drawing, wrong, "drawing")


def test_a_tag_comes_first() -> None:
    schema = schema_of(Keys(of=Drawing), tag="drawing/1")
    validator = validator_for(schema)
    validator.validate({"schema": "drawing/1", **GOOD})
    assert schema["title"] == "drawing/1"
    assert not validator.is_valid(GOOD)
    assert not validator.is_valid({"schema": "drawing/2", **GOOD})


def test_keys_besides_are_required_with_their_types() -> None:
    validator = validator_for(
        schema_of(Keys({"words": tuple[str, ...]}, of=Square), tag="square/1")
    )
    document = {"schema": "square/1", "kind": "square", "side": 2, "words": ["a"]}
    validator.validate(document)
    for wrong in ({"words": [1]}, {"words": None}):
        assert not validator.is_valid({**document, **wrong})
    del document["words"]
    assert not validator.is_valid(document)


PUT_TOGETHER: dict[str, Any] = {
    "schema": "list/1", "names": ["a"], "rows": [{"id": 1, **encode(Circle(radius=1.0))}],
    "last": {"seconds": 0.5},
}  # fmt: skip
FORMS = (
    Keys(
        {
            "names": tuple[str, ...],
            "rows": ListOf(Keys({"id": int}, of=Circle)),
            "last": Keys({"seconds": float}),
        },
        optional={"note": str},
    ),
    Keys({"file": str}),
)


@pytest.mark.parametrize(
    "good",
    [
        PUT_TOGETHER, {**PUT_TOGETHER, "note": "b"},
        {"schema": "list/1", "file": "c"},
    ],
)  # fmt: skip
def test_documents_that_are_put_together_have_one_of_their_forms(good: dict[str, Any]) -> None:
    validator_for(schema_of(*FORMS, tag="list/1")).validate(good)
    assert not validator_for(schema_of(FORMS[1], tag="list/1")).is_valid(PUT_TOGETHER)


@pytest.mark.parametrize(
    "wrong",
    [
        {**PUT_TOGETHER, "schema": "list/2"}, {**PUT_TOGETHER, "file": "c"},
        {**PUT_TOGETHER, "note": None}, {**PUT_TOGETHER, "last": {}},
        {**PUT_TOGETHER, "rows": [{"id": 1}]},
        {**PUT_TOGETHER, "rows": [{**PUT_TOGETHER["rows"][0], "more": 1}]}, {"schema": "list/1"},
    ],
)  # fmt: skip
def test_other_keys_and_types_are_refused(wrong: dict[str, Any]) -> None:
    assert not validator_for(schema_of(*FORMS, tag="list/1")).is_valid(wrong)
