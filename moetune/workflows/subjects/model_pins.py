"""Another choice that is asked of a training plan: sizes of a layout, or chunks of exchanges.

A layout is written "tp=2,pp=4", or as plans print it: "dp 8 · tp 2 · micro-batch 1".
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from moetune.domain.document import decode, encode, shown
from moetune.domain.errors import InputError
from moetune.domain.spelling import nearest_or
from moetune.domain.training import Degrees, LayoutRequest
from moetune.domain.training_document import TrainingDocument
from moetune.solve.joint.pins import pinned
from moetune.solve.training.chunks import MOST_CHUNKS
from moetune.workflows.compared import Asked, WhyNot
from moetune.workflows.flags import modules_of

_PRINTED = "·"
_MOST_LETTERS, _MOST_DIGITS = 300, 9
_COUNTS = ("cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch")
_SHARES = ("offload_activations", "offload_optimizer")
_WORDS = ("dispatcher", "overlap", "recompute", "cuda_graphs", "schedule")
_NAMES = ("dp", *_COUNTS, "zero", *_SHARES, *_WORDS)


def asked_of_training(question: WhyNot, plan: TrainingDocument) -> Asked:
    """Return what is asked: pins by the names of `LayoutRequest`, or the chunks as `degree`.

    Raises:
        InputError: a value is none that a layout could have.
    """
    spelling = question.spelling
    if question.strategy is not None:
        raise InputError(
            f"{spelling('strategy')} is for layers, and this is the plan of a training",
            f"ask with {spelling('layout')} recompute=moe_act or recompute=full",
        )
    degree = _degree(question, plan)
    if question.layout is None:
        return _in_chunks(degree, question)
    if degree is not None:
        raise InputError(
            f"{spelling('degree')} and {spelling('layout')} exclude each other for the plan of a "
            "training",
            "ask one of them: the degree is that of the plan's own layout",
        )
    flag = spelling("layout")
    values = dict(_values(question.layout, flag))
    if _PRINTED in question.layout:
        values = dict.fromkeys(("dp", *_COUNTS), 1) | values
    dp = _dp(values, flag, plan.inputs.world_size)
    pins = decode(LayoutRequest, values, flag)
    named = {name: getattr(pins, name) for name in pinned(pins)}
    return Asked(texts=layout_texts(named | dp), pins=named, spelling=spelling)


def layout_texts(values: Mapping[str, object]) -> dict[str, str]:
    """Return a layout's sizes and words by the names of the flags."""
    return {name.replace("_", "-"): _text(encode(value)) for name, value in values.items()}


def degree_texts(degree: Degrees) -> dict[str, str]:
    """Return the chunks of both phases by the names of the flags."""
    return {"forward-degree": str(degree.forward), "backward-degree": str(degree.backward)}


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return ",".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _degree(question: WhyNot, plan: TrainingDocument) -> Degrees | None:
    """Return the chunks asked for; a phase that is not asked for keeps the plan's own."""
    texts = question.degree_texts
    for name, text in texts.items():
        if not 1 <= int(text) <= MOST_CHUNKS:
            raise InputError(
                f"{question.degree_spelling(name)} must be from 1 to {MOST_CHUNKS} for the plan of "
                f"a training, got {text}"
            )
    degree = plan.layout.degree or Degrees(forward=1, backward=1)
    forward, backward = map(int, (degree_texts(degree) | texts).values())
    return Degrees(forward=forward, backward=backward) if texts else None


def _in_chunks(degree: Degrees | None, question: WhyNot) -> Asked:
    if degree is None:
        return Asked(texts={}, pins={}, spelling=question.spelling)
    return Asked(texts=degree_texts(degree), pins={"degree": degree}, spelling=question.spelling)


def _values(text: str, flag: str) -> Iterator[tuple[str, Any]]:
    """Yield each name with its value; a part without a name goes on with the list before it."""
    if not text.strip() or len(text) > _MOST_LETTERS:
        raise InputError(f"{flag} is empty or too long", _hint())
    texts: dict[str, str] = {}
    name = ""
    for part in map(str.strip, text.replace(_PRINTED, ",").split(",")):
        key, _, value = part.replace("=", " ", 1).partition(" ")
        if name == "recompute" and not value:
            texts[name] += f",{part}"
            continue
        name = key.replace("-", "_")
        if not value.strip():
            raise InputError(f"{flag}: {shown(part)} is not NAME=VALUE", "such as tp=2,pp=4")
        if name not in _NAMES:
            hint = nearest_or(_hint(), key, _NAMES)
            raise InputError(f"{flag} has the unknown size {shown(key)}", hint)
        if name in texts:
            raise InputError(f"{flag} names {key} twice", "name it once")
        texts[name] = value.strip()
    for name, value in texts.items():
        yield name, _value(name, value, flag)


def _value(name: str, text: str, flag: str) -> object:
    if name == "recompute":
        return modules_of(text)
    if name in _WORDS:
        return text
    if name in _SHARES:
        share = text.replace(".", "", 1)
        if share.isascii() and share.isdigit() and len(text) <= _MOST_DIGITS and float(text) <= 1:
            return float(text)
        raise InputError(f"{flag}: {name} must be from 0 to 1, got {shown(text)}")
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
        return int(text)
    raise InputError(f"{flag}: {name} must be a whole number, got {shown(text)}")


def _dp(values: dict[str, Any], flag: str, ranks: int) -> dict[str, int]:
    """Take the replicas out of what is asked: they follow from the other sizes.

    Raises:
        InputError: the other sizes are not all named, or make another number.
    """
    dp = values.pop("dp", None)
    if dp is None:
        return {}
    sizes = [values[name] for name in ("cp", "tp", "pp") if name in values]
    if len(sizes) < 3:  # noqa: PLR2004 - of these
        raise InputError(
            f"{flag}: dp follows from cp, tp and pp", "name those instead, or all of them"
        )
    product = math.prod(sizes)
    if dp * product != ranks:
        raise InputError(
            f"{flag}: dp {dp} x cp, tp and pp of {product} is not the {ranks} ranks",
            f"nearest: dp {ranks // product}"
            if product and ranks % product == 0
            else "name other sizes",
        )
    return {"dp": dp}


def _hint() -> str:
    return f"write sizes as tp=2,pp=4; known: {', '.join(_NAMES).replace('_', '-')}"
