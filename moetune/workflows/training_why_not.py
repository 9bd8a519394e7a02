"""Why not this layout: another one of a training plan beside the plan's own."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from moetune.domain.document import decode, encode
from moetune.domain.errors import (
    InfeasiblePlanError,
    InputError,
    LayoutTooLargeError,
    ProfileError,
)
from moetune.domain.training import (
    OVERLAPS,
    RECOMPUTES,
    TOKEN_DISPATCHERS,
    Degrees,
    FoldedLayout,
    LayoutRequest,
)
from moetune.domain.units import format_seconds
from moetune.solve.training.search import NOISE
from moetune.solve.training.uncertainty import confidence_of
from moetune.workflows.compared import ComparedChoice, Refusal, WhyNotAnswer
from moetune.workflows.layout_text import LayoutText, read_layout
from moetune.workflows.planned_training import PlannedTraining, read_planned_training
from moetune.workflows.training import layout_words, plan_training
from moetune.workflows.training_files import mapping_of, read_planned_layout, training_document
from moetune.workflows.training_prices import step_prices
from moetune.workflows.why_not import WhyNot
from moetune.workflows.wiring import StoreFinder

_PINNED = ("cp", "tp", "pp", "vpp", "ep", "etp", "micro-batch")
_SIZES = ("dp", *_PINNED, "dispatcher-sms")
_WORDS: Mapping[str, tuple[str, ...]] = {
    "zero": ("0", "1", "2", "3"), "dispatcher": TOKEN_DISPATCHERS, "overlap": OVERLAPS,
    "recompute": ("none", *RECOMPUTES),
}  # fmt: skip
_RULE = (
    f"Of layouts within {NOISE:.0%} of each other one that leaves memory free is taken, then the "
    "simpler one; what is faster than that the search does not try unless it is pinned, such as "
    "ZeRO stages above the target's lowest: plan again with these pins to take it"
)
_ONLY_KEPT = (
    "Profile {!r} is not here, or has changed: this is the fastest such layout that the plan has "
    "kept, and others were not compared"
)
_SAME = 1e-9
"""Of a step, between two versions of moetune."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is asked of a training plan, in texts, and as pins.

    Args:
        dp: that the layout has to have.
        degrees: chunks of the chosen layout's exchanges.
    """

    texts: Mapping[str, str]
    pins: Mapping[str, object]
    dp: int | None = None
    degrees: Degrees | None = None

    def is_of(self, layout: FoldedLayout) -> bool:
        """Return whether a layout is as asked."""
        same = all(getattr(layout, name) == value for name, value in self.pins.items())
        return same and self.dp in (None, layout.dp)


def why_not_training(
    question: WhyNot, *, profile: str | None, model: str | None, stores: StoreFinder
) -> WhyNotAnswer:
    """Return the best layout with what is asked pinned, beside the plan's own.

    Without the plan's profile it is the fastest such layout that the plan has kept.

    Args:
        question: `plan_id` is the plan's file.
        profile, model: as of `read_planned_training`.

    Raises:
        InputError: the file holds no training plan, or a value is none that it could have.
        ProfileError: the plan has not kept such a layout, and its profile is missing or changed.
    """
    path = Path(question.plan_id)
    document = training_document(path)
    asked = _asked(question, mapping_of(document, "inputs", path))
    try:
        planned = read_planned_training(path, profile=profile, model=model, stores=stores)
    except ProfileError:
        kept = None if profile else _kept(document, asked, path)
        if kept is None:
            raise
        return kept
    return _compare(planned, asked, path)


def _asked(question: WhyNot, inputs: Mapping[str, object]) -> _Asked:
    if question.strategy is not None:
        raise InputError(
            f"{question.spelling('strategy')} is for layers, and this is the plan of a training",
            f"ask with {question.spelling('layout')} recompute=moe_act or recompute=full",
        )
    forward, backward = question.degrees
    texts, pins, dp = {}, {}, None
    degrees = None
    if forward is not None or backward is not None:
        degrees = Degrees(forward=forward or backward or 1, backward=backward or forward or 1)
        texts = {"forward-degree": str(degrees.forward), "backward-degree": str(degrees.backward)}
    if question.layout is not None:
        flag = question.spelling("layout")
        text = read_layout(question.layout, flag=flag, numbers=_SIZES, words=_WORDS)
        texts |= text.values
        pins = _pins(text)
        dp = _dp(text, pins, flag, inputs.get("world_size"))
    return _Asked(texts=texts, pins=pins, dp=dp, degrees=degrees)


def _pins(text: LayoutText) -> dict[str, object]:
    """Return fields of a `LayoutRequest`; sizes that a printed layout omits are 1."""
    found: dict[str, object] = {}
    if text.is_whole:
        found = {name.replace("-", "_"): 1 for name in _PINNED}
    for name, value in text.values.items():
        if name == "recompute":
            found[name] = () if value == "none" else (value,)
        elif name != "dp":
            found[name.replace("-", "_")] = int(value) if value.isdigit() else value
    return found


def _dp(text: LayoutText, pins: Mapping[str, object], flag: str, ranks: object) -> int | None:
    """Return the replicas asked for, which follow from the other sizes.

    Raises:
        InputError: the other sizes are not all named, or make another number.
    """
    given = text.values.get("dp", "1" if text.is_whole else None)
    if given is None:
        return None
    others = [pins.get(name) for name in ("cp", "tp", "pp")]
    product = math.prod(one for one in others if isinstance(one, int))
    if None not in others and isinstance(ranks, int) and int(given) * product != ranks:
        raise InputError(
            f"{flag}: dp {given} x cp, tp and pp of {product} is not the {ranks} ranks",
            f"nearest: dp {ranks // product}" if ranks % product == 0 else "name other sizes",
        )
    if None in others:
        raise InputError(
            f"{flag}: dp follows from cp, tp and pp",
            "name those instead, or all of them",
        )
    return int(given)


def _compare(planned: PlannedTraining, asked: _Asked, path: Path) -> WhyNotAnswer:
    own = _choice(planned.document, path)
    request, profile = planned.request, planned.profile
    prices = step_prices(request.job, request.target, profile)
    answer = WhyNotAnswer(
        plan=planned.id, asked=asked.texts, source="solved", chosen=own,
        limit_bytes=request.memory_limit_bytes,
        notes=tuple(_drifted(own.step_seconds, prices.step(planned.layouts[0]).seconds)),
    )  # fmt: skip
    if asked.degrees is not None:
        return _in_chunks(planned, asked, answer)
    pinned = replace(request, pins=replace(request.pins, **_typed(asked.pins)))
    try:
        found = plan_training(pinned, profile)
    except LayoutTooLargeError as error:
        refused = Refusal(what=error.what, hint=error.hint)
        return replace(answer, other=_choice(error.plan or {}, path), refused=refused)
    except (InputError, InfeasiblePlanError) as error:
        return replace(answer, refused=Refusal(what=error.what, hint=error.hint))
    other = _choice(found.document, path)
    notes = [one for one in found.stand_ins.words if one not in _warnings(planned.document)]
    return replace(
        answer, other=other, probability_faster=_chance(own, other), rule=_RULE,
        notes=(*answer.notes, *notes),
    )  # fmt: skip


def _in_chunks(planned: PlannedTraining, asked: _Asked, answer: WhyNotAnswer) -> WhyNotAnswer:
    """Return the chosen layout with its exchanges in so many chunks."""
    layout, request = planned.layouts[0], planned.request
    if asked.pins:
        raise InputError(
            "--degree and --layout exclude each other for the plan of a training",
            "ask one of them: the degree is that of the plan's own layout",
        )
    if layout.overlap != "chunks":
        raise InputError(
            f"the plan's layout hides exchanges by overlap {layout.overlap}, not in chunks",
            "ask with --layout, or plan with --target moetune --overlap chunks",
        )
    prices = step_prices(request.job, request.target, planned.profile)
    step = prices.step(replace(layout, degree=asked.degrees))
    own, degrees = answer.chosen, asked.degrees
    assert degrees is not None  # noqa: S101 - the caller has checked it
    other = replace(
        own,
        name=f"{degrees.forward} and {degrees.backward} chunks, layout {layout_words(layout)}",
        decision={**own.decision, **asked.texts},
        step_seconds=step.seconds,
        p05_step_seconds=None,
        p95_step_seconds=None,
        parts=dict(step.parts),
    )
    return replace(answer, other=other, probability_faster=_chance(own, other))


def _kept(document: Mapping[str, object], asked: _Asked, path: Path) -> WhyNotAnswer | None:
    """Return the fastest layout as asked that the plan has kept; None for none."""
    if asked.degrees is not None:
        return None
    others = document.get("alternatives")
    answers = [document, *(others if isinstance(others, list) else ())]
    found = [
        _choice(one, path)
        for one in answers
        if asked.is_of(read_planned_layout(mapping_of(one, "layout", path), path))
    ]
    if not found:
        return None
    own, other = _choice(document, path), min(found, key=lambda one: one.step_seconds)
    inputs = mapping_of(document, "inputs", path)
    limit = inputs.get("memory_limit_bytes")
    return WhyNotAnswer(
        plan=str(document.get("id", "")), asked=asked.texts, source="plan", chosen=own,
        other=other, limit_bytes=limit if isinstance(limit, int) else None,
        probability_faster=_chance(own, other),
        notes=(_ONLY_KEPT.format(inputs.get("profile")),),
    )  # fmt: skip


def _choice(answer: Mapping[str, object], path: Path) -> ComparedChoice:
    layout = mapping_of(answer, "layout", path)
    predicted, memory = (mapping_of(answer, one, path) for one in ("predicted", "memory"))
    plain = encode(layout)
    sure = answer.get("confidence")
    ends = sure if isinstance(sure, dict) else {}
    return ComparedChoice(
        name=layout_words(read_planned_layout(layout, path)),
        decision={
            name.replace("_", "-"): ",".join(map(str, value)) if isinstance(value, list)
            else str(value)
            for name, value in plain.items() if value is not None and not isinstance(value, dict)
        },
        step_seconds=decode(float, predicted.get("step_seconds"), f"{path}: step_seconds"),
        p05_step_seconds=ends.get("p05_step_seconds"),
        p95_step_seconds=ends.get("p95_step_seconds"),
        parts=decode(_Parts, {"parts": predicted.get("parts")}, f"{path}: predicted").parts,
        needed_bytes=decode(int, memory.get("peak_bytes"), f"{path}: peak_bytes"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    parts: Mapping[str, float]


def _chance(own: ComparedChoice, other: ComparedChoice) -> float:
    """Return the chance that the other one is faster, by the record of public runs."""
    return 1.0 - confidence_of([own.step_seconds, other.step_seconds]).probability_best


def _drifted(recorded: float, now: float) -> Iterator[str]:
    if not math.isclose(now, recorded, rel_tol=_SAME):
        yield (
            f"This version of moetune predicts {format_seconds(now)} for the plan's own layout: "
            "make the plan again to compare like with like"
        )


def _warnings(document: Mapping[str, object]) -> list[object]:
    found = document.get("warnings")
    return found if isinstance(found, list) else []


def _typed(pins: Mapping[str, object]) -> dict[str, Any]:
    """Return the pins as fields of a layout's request."""
    known = {item.name for item in fields(LayoutRequest)}
    return {name: value for name, value in pins.items() if name in known}
