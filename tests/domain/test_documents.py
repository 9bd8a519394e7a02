"""Documents from strangers: what is wrong is named with its path, and schemas say as much."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from jsonschema_rs import validator_for

from moetune.domain.any_plan import plan_from_document, plan_from_json
from moetune.domain.document import LARGEST, UNLESS_DEFAULT, decode, decode_schema, encode
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Plan, Range
from tests.runtime.plans import small_plan
from tests.schemas import Keys, list_of, schema_of


@dataclass(frozen=True, kw_only=True)
class Circle:
    kind: Literal["circle"] = "circle"
    radius: float


@dataclass(frozen=True, kw_only=True)
class Box:
    kind: Literal["box"] = "box"
    sides: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    schema: int = 2
    title: str | None = None
    shapes: tuple[Circle | Box, ...]


@dataclass(frozen=True, kw_only=True)
class Framed:
    title: str
    first: Circle
    shapes: tuple[Circle | Box, ...]
    corner: tuple[int, str]
    names: Mapping[str, int]
    is_done: bool
    frame: Box | None = field(default=None, metadata=UNLESS_DEFAULT)


GOOD = {"schema": 2, "shapes": [{"kind": "circle", "radius": 1}, {"kind": "box", "sides": [2, 3]}]}


def read(document: object) -> Drawing:
    return decode_schema(Drawing, document, "drawing", schemas=(1, 2), hint="draw it again")


def with_shape(**shape: object) -> dict[str, object]:
    return {"schema": 2, "shapes": [shape]}


def test_a_good_document_is_read_and_written_back() -> None:
    drawing = read(GOOD)
    assert drawing == Drawing(shapes=(Circle(radius=1.0), Box(sides=(2, 3))))
    assert read(json.loads(json.dumps(encode(drawing)))) == drawing
    assert read({**GOOD, "schema": 1}).schema == 1


@pytest.mark.parametrize(("document", "what"), [
    ([], "drawing lacks the key 'schema'"),
    ({"shapes": []}, "drawing lacks the key 'schema'"),
    ({**GOOD, "schema": 3}, "drawing has schema 3, this moetune reads 1, 2"),
    ({"schema": 2}, "drawing lacks the key 'shapes'"),
    ({"schema": 2, "shapes": "box"}, "drawing.shapes must be a list, got 'box'"),
    (with_shape(kind="box", sides=[1]), "drawing.shapes[0].sides must have 2 entries, got 1"),
    (with_shape(kind="box", sides=[1, 2.5]), "drawing.shapes[0].sides[1] must be a whole"),
    (with_shape(kind="line"), "drawing.shapes[0].kind must be one of circle, box, got 'line'"),
    ({"schema": 2, "shapes": [7]}, "drawing.shapes[0].kind must be one of circle, box"),
    (with_shape(kind="circle", radius=10**400), "drawing.shapes[0].radius must be a finite"),
    (with_shape(kind="circle", radius=1e999), "drawing.shapes[0].radius must be a finite"),
    (with_shape(kind="box", sides=[1, LARGEST + 1]), "drawing.shapes[0].sides[1] is too large"),
    ({**GOOD, "title": 3}, "drawing.title must be a text, got 3"),
])  # fmt: skip
def test_what_is_wrong_is_named_with_its_path(document: object, what: str) -> None:
    with pytest.raises(InputError) as caught:
        read(document)
    assert caught.value.what.startswith(what)


def test_a_foreign_schema_says_what_to_do_and_a_misspelt_key_what_was_meant() -> None:
    with pytest.raises(InputError) as foreign:
        read({**GOOD, "schema": "2"})
    assert foreign.value.hint == "draw it again"
    with pytest.raises(InputError, match="unknown key 'tilte'") as misspelt:
        read({**GOOD, "tilte": ""})
    assert misspelt.value.hint == "did you mean 'title'?"
    with pytest.raises(InputError) as strange:
        decode(Circle, {"radius": 1.0, "ink": "red"}, "circle")
    assert strange.value.hint == "known keys: kind, radius"


def plan(*ranges: Range) -> Plan:
    return small_plan(layer=LayerShape(d_model=8, d_hidden=16, num_experts=4), ranges=ranges)


def test_a_plan_that_was_edited_is_refused() -> None:
    document = encode(plan())
    document["inputs"]["tokens_per_rank"] += 1
    with pytest.raises(InputError, match="id is not the hash of inputs") as caught:
        plan_from_document(document)
    assert "make the plan again" in caught.value.hint
    with pytest.raises(InputError) as in_file:
        plan_from_json(json.dumps(document), "best.json")
    assert in_file.value.what == f"best.json: {caught.value.what}"
    assert in_file.value.hint == caught.value.hint


def test_a_file_that_is_no_json_is_named() -> None:
    with pytest.raises(InputError, match=r"^best\.json is not valid JSON: "):
        plan_from_json("{", "best.json")


@pytest.mark.parametrize(("ranges", "what"), [
    (((0, 10, 1, 1),), "pipeline.ranges: [0, 10, 1, 1] is no range"),
    (((5, 4, 1, 1),), "pipeline.ranges: [5, 4, 1, 1] is no range"),
    (((1, 4, 0, 1),), "pipeline.ranges: [1, 4, 0, 1] is no range"),
    (((1, 4, 1, 0),), "pipeline.ranges: [1, 4, 1, 0] is no range"),
    (((1, 4, 1, 1), (6, 9, 1, 1)), "pipeline.ranges: 6 does not follow 4"),
    (((1, 4, 1, 1), (4, 9, 1, 1)), "pipeline.ranges: 4 does not follow 4"),
])  # fmt: skip
def test_ranges_of_a_plan_follow_each_other(ranges: tuple[Range, ...], what: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(*ranges)
    assert caught.value.what == what
    assert plan((1, 4, 1, 1), (5, 5, 2, 1)).decide(5).forward_degree == 2


def test_no_predicted_time_is_negative() -> None:
    for name in ("step_seconds", "forward_seconds", "p95_step_seconds"):
        document = encode(plan())
        document["predicted"][name] = -1.0
        with pytest.raises(InputError, match=f"{name} must be at least 0, got -1.0"):
            plan_from_document(document)


def test_a_plan_has_at_least_one_chunk_each_way() -> None:
    pipeline = plan().pipeline
    for none in (replace(pipeline, forward_degree=0), replace(pipeline, backward_degree=0)):
        with pytest.raises(InputError, match="pipeline: degrees must be at least 1"):
            replace(plan(), pipeline=none)


FRAMED: dict[str, Any] = encode(
    Framed(title="a", first=Circle(radius=2), shapes=(Circle(radius=0.5), Box(sides=(1, 2))),
           corner=(1, "b"), names={"any": 1}, is_done=True)
)  # fmt: skip


def _without(key: str) -> dict[str, Any]:
    return {name: value for name, value in FRAMED.items() if name != key}


def test_a_schema_accepts_what_encode_writes() -> None:
    validator = validator_for(schema_of(Keys(of=Framed)))
    validator.validate(FRAMED)
    validator.validate({**FRAMED, "frame": {"kind": "box", "sides": [2, 3]}})
    validator.validate({**FRAMED, "frame": None})


@pytest.mark.parametrize("wrong", [
    _without("title"), {**FRAMED, "unknown": 1}, {**FRAMED, "title": 1},
    {**FRAMED, "is_done": 1}, {**FRAMED, "corner": [1]}, {**FRAMED, "corner": [1, "b", 2]},
    {**FRAMED, "corner": ["b", 1]}, {**FRAMED, "names": {"any": "1"}},
    {**FRAMED, "shapes": [{"kind": "box", "radius": 1}]},
    {**FRAMED, "first": {"kind": "box", "radius": 1}}, {**FRAMED, "shapes": {}},
])  # fmt: skip
def test_a_schema_refuses_what_decode_refuses(wrong: dict[str, Any]) -> None:
    assert not validator_for(schema_of(Keys(of=Framed))).is_valid(wrong)
    with pytest.raises(InputError):
        decode(Framed, wrong, "drawing")


def test_a_tag_comes_first() -> None:
    schema = schema_of(Keys(of=Framed), tag="drawing/1")
    validator = validator_for(schema)
    validator.validate({"schema": "drawing/1", **FRAMED})
    assert schema["title"] == "drawing/1"
    assert not validator.is_valid(FRAMED)
    assert not validator.is_valid({"schema": "drawing/2", **FRAMED})


def test_keys_besides_are_required_with_their_types() -> None:
    validator = validator_for(schema_of(Keys({"words": tuple[str, ...]}, of=Box), tag="box/1"))
    document = {"schema": "box/1", "kind": "box", "sides": [2, 3], "words": ["a"]}
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
            "rows": list_of(Keys({"id": int}, of=Circle)),
            "last": Keys({"seconds": float}),
        },
        optional={"note": str},
    ),
    Keys({"file": str}),
)


@pytest.mark.parametrize(
    "good", [PUT_TOGETHER, {**PUT_TOGETHER, "note": "b"}, {"schema": "list/1", "file": "c"}]
)
def test_documents_that_are_put_together_have_one_of_their_forms(good: dict[str, Any]) -> None:
    validator_for(schema_of(*FORMS, tag="list/1")).validate(good)
    assert not validator_for(schema_of(FORMS[1], tag="list/1")).is_valid(PUT_TOGETHER)


@pytest.mark.parametrize("wrong", [
    {**PUT_TOGETHER, "schema": "list/2"}, {**PUT_TOGETHER, "file": "c"},
    {**PUT_TOGETHER, "note": None}, {**PUT_TOGETHER, "last": {}},
    {**PUT_TOGETHER, "rows": [{"id": 1}]},
    {**PUT_TOGETHER, "rows": [{**PUT_TOGETHER["rows"][0], "more": 1}]}, {"schema": "list/1"},
])  # fmt: skip
def test_other_keys_and_types_are_refused(wrong: dict[str, Any]) -> None:
    assert not validator_for(schema_of(*FORMS, tag="list/1")).is_valid(wrong)
