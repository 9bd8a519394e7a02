"""Another layout of a training plan beside the plan's own."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moetune.domain.document import encode
from moetune.domain.errors import (
    InfeasiblePlanError,
    InputError,
    LayoutTooLargeError,
)
from moetune.domain.pipeline import SCHEDULES
from moetune.domain.profile import Profile
from moetune.domain.spelling import Spelling
from moetune.domain.training import (
    CUDA_GRAPHS,
    OVERLAPS,
    RECOMPUTES,
    TOKEN_DISPATCHERS,
    Degrees,
    FoldedLayout,
)
from moetune.domain.training_document import (
    TrainingAnswer,
    TrainingDocument,
    training_from_document,
)
from moetune.domain.units import format_seconds, format_share
from moetune.solve.joint.pins import pin_flag, pinned, without
from moetune.solve.joint.search import NOISE
from moetune.solve.joint.uncertainty import confidence_of
from moetune.solve.training.chunks import MOST_CHUNKS
from moetune.workflows.compared import (
    ComparedChoice,
    Refusal,
    WhyNotAnswer,
    drift_notes,
    only_kept_note,
)
from moetune.workflows.flags import modules_of
from moetune.workflows.layout_text import LayoutText, read_layout
from moetune.workflows.planned_training import PlannedTraining, read_planned_training
from moetune.workflows.training import plan_training
from moetune.workflows.training_plan import TrainingRequest, folded_layout, layout_words
from moetune.workflows.training_prices import step_prices
from moetune.workflows.why_not import WhyNot

_PINNED = ("cp", "tp", "pp", "vpp", "ep", "etp", "micro-batch")
_SIZES = ("dp", *_PINNED)
_WORDS: Mapping[str, tuple[str, ...]] = {
    "zero": ("0", "1", "2", "3"), "dispatcher": TOKEN_DISPATCHERS, "overlap": OVERLAPS,
    "recompute": ("none", *RECOMPUTES), "cuda-graphs": CUDA_GRAPHS, "schedule": SCHEDULES,
}  # fmt: skip
_LISTS = ("recompute",)
_SHARES = ("offload-activations", "offload-optimizer")
_RULE = (
    f"Of layouts within {format_share(NOISE, digits=0)} of each other one that leaves memory "
    "free is taken, then the simpler one; what is faster than that the search does not try unless "
    "it is pinned: plan again with these pins to take it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Another choice that is asked of a training plan, in texts, and as pins.

    Args:
        spelling: the caller's names, for errors.
        dp: that the layout has to have.
        degrees: chunks of the chosen layout's exchanges.
    """

    texts: Mapping[str, str]
    pins: Mapping[str, Any]
    spelling: Spelling
    dp: int | None = None
    degrees: Degrees | None = None

    def is_of(self, layout: FoldedLayout) -> bool:
        """Return whether a layout is as asked."""
        same = all(getattr(layout, name) == value for name, value in self.pins.items())
        return same and self.dp in (None, layout.dp)


def compare_layouts(
    plan: TrainingDocument, *, profile: Profile, question: WhyNot, model: str | None = None
) -> WhyNotAnswer:
    """Return the best layout with what is asked pinned, beside the plan's own.

    Args:
        profile, model: as of `read_planned_training`.

    Raises:
        InputError: a value is none that it could have.
    """
    asked = _asked(question, plan)
    return _compare(read_planned_training(plan, profile=profile, model=model), asked)


def kept_layout(plan: TrainingDocument, question: WhyNot) -> WhyNotAnswer | None:
    """Return the fastest layout as asked that the plan has kept; None for none.

    Raises:
        InputError: a value is none that it could have.
    """
    return _kept(plan, _asked(question, plan))


def _asked(question: WhyNot, plan: TrainingDocument) -> _Asked:
    if question.strategy is not None:
        raise InputError(
            f"{question.spelling('strategy')} is for layers, and this is the plan of a training",
            f"ask with {question.spelling('layout')} recompute=moe_act or recompute=full",
        )
    texts, pins, dp = {}, {}, None
    degrees = _degrees(question, plan.layout.degree)
    if degrees is not None:
        texts = _degree_texts(degrees)
    if question.layout is not None:
        flag = question.spelling("layout")
        text = read_layout(
            question.layout, flag=flag, numbers=_SIZES, words=_WORDS, lists=_LISTS, shares=_SHARES
        )
        texts |= text.values
        pins = _pins(text)
        dp = _dp(text, pins, flag, plan.inputs.world_size)
    return _Asked(texts=texts, pins=pins, spelling=question.spelling, dp=dp, degrees=degrees)


def _degrees(question: WhyNot, own: Degrees | None) -> Degrees | None:
    """Return what is asked of both phases; a phase that is not asked for keeps the plan's own."""
    forward, backward = question.degrees
    for name, degree in (("forward-degree", forward), ("backward-degree", backward)):
        if degree is not None and not 1 <= degree <= MOST_CHUNKS:
            raise InputError(
                f"{question.pin_spelling(name)} must be from 1 to {MOST_CHUNKS} for the plan of a "
                f"training, got {degree}"
            )
    if forward is None and backward is None:
        return None
    own = own or Degrees(forward=1, backward=1)
    return Degrees(forward=forward or own.forward, backward=backward or own.backward)


def _degree_texts(degrees: Degrees) -> dict[str, str]:
    return {"forward-degree": str(degrees.forward), "backward-degree": str(degrees.backward)}


def _pins(text: LayoutText) -> dict[str, Any]:
    """Return fields of a `LayoutRequest`; sizes that a printed layout omits are 1."""
    found: dict[str, Any] = {}
    if text.is_whole:
        found = {name.replace("-", "_"): 1 for name in _PINNED}
    for name, value in text.values.items():
        if name == "recompute":
            found[name] = modules_of(value)
        elif name in _SHARES:
            found[name.replace("-", "_")] = float(value)
        elif name != "dp":
            found[name.replace("-", "_")] = int(value) if value.isdigit() else value
    return found


def _dp(text: LayoutText, pins: Mapping[str, object], flag: str, ranks: int) -> int | None:
    """Return the replicas asked for, which follow from the other sizes.

    Raises:
        InputError: the other sizes are not all named, or make another number.
    """
    given = text.values.get("dp", "1" if text.is_whole else None)
    if given is None:
        return None
    others = [pins.get(name) for name in ("cp", "tp", "pp")]
    product = math.prod(one for one in others if isinstance(one, int))
    if None not in others and int(given) * product != ranks:
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


def _compare(planned: PlannedTraining, asked: _Asked) -> WhyNotAnswer:
    own = _own_choice(planned.plan)
    request, profile, priced = planned.request, planned.profile, planned.priced
    prices = step_prices(priced.job, priced.target, profile)
    answer = WhyNotAnswer(
        plan=planned.plan.id, asked=asked.texts, source="solved", chosen=own,
        limit_bytes=request.memory_limit_bytes,
        notes=drift_notes(
            prices.step(planned.layouts[0]).seconds, own.step_seconds, what="layout"
        ),
    )  # fmt: skip
    if asked.degrees is not None:
        return _in_chunks(planned, asked, answer)
    try:
        found = plan_training(_with(request, asked), profile)
    except (InputError, InfeasiblePlanError) as error:
        refused = Refusal(what=error.what, hint=error.hint)
        if isinstance(error, LayoutTooLargeError):
            refused = _blocking(planned, asked) or refused
        if not isinstance(error, LayoutTooLargeError) or error.plan is None:
            return replace(answer, refused=refused)
        smallest = training_from_document(encode(error.plan), "the priced plan")
        return replace(answer, other=_own_choice(smallest), refused=refused)
    other = _own_choice(found)
    notes = [one for one in found.warnings if one not in planned.plan.warnings]
    means = _mean_notes(folded_layout(found.layout), planned.layouts[0])
    return replace(
        answer, other=other, probability_faster=_chance(own, other), rule=_RULE,
        notes=(*answer.notes, *means, *notes),
    )  # fmt: skip


def _with(request: TrainingRequest, asked: _Asked, *, drop: Sequence[str] = ()) -> TrainingRequest:
    """Return the plan's request with what is asked pinned, and without some of its own pins."""
    return replace(request, pins=replace(without(request.pins, drop), **asked.pins))


def _blocking(planned: PlannedTraining, asked: _Asked) -> Refusal | None:
    """Return which of the plan's own pins leave no room for what is asked; None where none does."""
    pins = planned.request.pins
    own = [name for name in pinned(pins) if name not in asked.pins]
    for names in (*([name] for name in own), own):
        try:
            found = plan_training(_with(planned.request, asked, drop=names), planned.profile)
        except (InputError, InfeasiblePlanError):
            continue
        flags = " ".join(pin_flag(pins, name) for name in names)
        best = found.best
        return Refusal(
            what=f"the plan's own {flags} leaves no room for it",
            hint=(
                f"without that pin it fits: {best.words}, "
                f"{format_seconds(best.predicted.step_seconds)} a step"
            ),
        )
    return None


def _mean_notes(*layouts: FoldedLayout) -> Iterator[str]:
    if any(layout.pp > 1 for layout in layouts):
        yield "Parts are on the mean of the pipeline ranks"


def _in_chunks(planned: PlannedTraining, asked: _Asked, answer: WhyNotAnswer) -> WhyNotAnswer:
    """Return the chosen layout with its exchanges in so many chunks."""
    layout, request = planned.layouts[0], planned.priced
    if asked.pins:
        raise InputError(
            f"{asked.spelling('degree')} and {asked.spelling('layout')} exclude each other for the "
            "plan of a training",
            "ask one of them: the degree is that of the plan's own layout",
        )
    if layout.overlap != "chunks":
        raise InputError(
            f"the plan's layout hides exchanges by overlap {layout.overlap}, not in chunks",
            f"ask with {asked.spelling('layout')}, or plan with --target moetune --overlap chunks",
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
        parts=prices.mean_parts(replace(layout, degree=asked.degrees)),
    )
    return replace(answer, other=other, probability_faster=_chance(own, other))


def _kept(plan: TrainingDocument, asked: _Asked) -> WhyNotAnswer | None:
    """Return the fastest layout as asked that the plan has kept; None for none."""
    if asked.degrees is not None:
        return None
    found = [
        _choice(one)
        for one in (plan.best, *plan.alternatives)
        if asked.is_of(folded_layout(one.layout))
    ]
    if not found:
        return None
    own, other = _own_choice(plan), min(found, key=lambda one: one.step_seconds)
    return WhyNotAnswer(
        plan=plan.id, asked=asked.texts, source="plan", chosen=own, other=other,
        limit_bytes=plan.inputs.memory_limit_bytes, probability_faster=_chance(own, other),
        notes=(only_kept_note(plan.inputs.profile, what="layout"),),
    )  # fmt: skip


def _own_choice(plan: TrainingDocument) -> ComparedChoice:
    """Return a plan's own layout, with the range of its step."""
    sure = plan.confidence
    return replace(
        _choice(plan.best),
        p05_step_seconds=sure.p05_step_seconds,
        p95_step_seconds=sure.p95_step_seconds,
    )


def _choice(answer: TrainingAnswer) -> ComparedChoice:
    degree = answer.layout.degree
    chunks = {} if degree is None else _degree_texts(degree)
    return ComparedChoice(
        name=answer.words,
        decision={
            name.replace("_", "-"): _text(value)
            for name, value in encode(answer.layout).items()
            if value is not None and not isinstance(value, dict)
        } | chunks,
        step_seconds=answer.predicted.step_seconds,
        parts=answer.mean_parts,
        needed_bytes=answer.memory.peak_bytes,
    )  # fmt: skip


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _chance(own: ComparedChoice, other: ComparedChoice) -> float:
    """Return the chance that the other one is faster, by the record of public runs."""
    return 1.0 - confidence_of([own.step_seconds, other.step_seconds]).probability_best
