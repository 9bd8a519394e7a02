"""Pins of a question on another choice of a training plan: layout sizes or exchange chunks.

A layout's text is "tp=2,pp=4", or as plans print it: "dp 8 · tp 2 · micro-batch 1".
"""

import math
import re
from collections.abc import Mapping

from moetune.app.requests import PIN_NAMES, layout_pins
from moetune.app.subjects.values import Asked, WhyNot
from moetune.domain.document import encode, shown
from moetune.domain.errors import InputError
from moetune.domain.question import read_question, read_texts
from moetune.domain.spelling import nearest_or
from moetune.domain.training import Degrees, LayoutRequest
from moetune.domain.training_document import TrainingDocument
from moetune.solve.model.chunks import MOST_CHUNKS

_PRINTED = "·"
_MOST_LETTERS = 300
_SIZES = ("cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch")
_EXAMPLE = "write sizes as tp=2,pp=4"


def asked_of_training(question: WhyNot, plan: TrainingDocument) -> Asked:
    """Return pins by field of `LayoutRequest`, or chunks as `degree`; or raise InputError."""
    if question.strategy is not None:
        raise InputError(
            "--strategy is for layers, and this is the plan of a training",
            "ask with --layout recompute=moe_act or recompute=full",
        )
    texts = question.degree_texts
    if question.layout is None:
        degrees = _degrees(question.degree or 0)
        return Asked(texts=degree_texts(degrees), pins={"degree": degrees})
    if texts:
        raise InputError(
            "--degree and --layout exclude each other for the plan of a training",
            "give one of them: --degree asks for a degree of the plan's layout",
        )
    texts = _texts(question.layout)
    dp = texts.pop("dp", None)
    for name in texts:
        if name not in PIN_NAMES:
            raise InputError(f"--layout has no {name!r}", nearest_or(_EXAMPLE, name, PIN_NAMES))
    request = layout_pins(read_question(read_texts(texts)))
    pins = request.pinned
    replicas = {} if dp is None else {"dp": _dp(dp, request, plan.inputs.world_size)}
    return Asked(texts=layout_texts(pins | replicas), pins=pins)


def layout_texts(values: Mapping[str, object]) -> dict[str, str]:
    """Return a layout's values as texts, by the names of their flags."""
    return {name.replace("_", "-"): _text(encode(value)) for name, value in values.items()}


def degree_texts(degrees: Degrees) -> dict[str, str]:
    """Return the number of chunks of both phases as texts, by the names of their flags."""
    return {"forward-degree": str(degrees.forward), "backward-degree": str(degrees.backward)}


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return ",".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _degrees(degree: int) -> Degrees:
    if not 1 <= degree <= MOST_CHUNKS:
        raise InputError(
            f"--degree must be from 1 to {MOST_CHUNKS} for the plan of a training, got {degree}",
            field="degree",
        )
    return Degrees.of_both(degree)


def _texts(text: str) -> dict[str, str]:
    """Return the values' texts by name; a part without a name continues the recompute list."""
    if not text.strip() or len(text) > _MOST_LETTERS:
        raise InputError("--layout is empty or too long", _EXAMPLE)
    texts: dict[str, str] = {}
    name = ""
    for part in map(str.strip, re.split(f"[,{_PRINTED}]", text)):
        key, _, value = part.replace("=", " ", 1).partition(" ")
        if name == "recompute" and not value:
            texts[name] += f",{key}"
            continue
        name = key.replace("-", "_")
        if not value.strip() or name in texts:
            what = f"names {key} twice" if name in texts else f"has {shown(part)}, not NAME=VALUE"
            raise InputError(f"--layout {what}", _EXAMPLE)
        texts[name] = value.strip()
    # Sizes that a printed layout omits are 1.
    return dict.fromkeys(("dp", *_SIZES), "1") | texts if _PRINTED in text else texts


def _dp(text: str, pins: LayoutRequest, ranks: int) -> int:
    """Return the asked dp; raise InputError unless it follows from the other sizes."""
    if not text.isdecimal() or None in (pins.cp, pins.tp, pins.pp):
        raise InputError(
            "--layout: dp follows from cp, tp and pp", "name those instead, or all of them"
        )
    dp, product = int(text), math.prod(size or 1 for size in (pins.cp, pins.tp, pins.pp))
    if dp * product != ranks:
        raise InputError(
            f"--layout: dp {dp} x cp, tp and pp of {product} is not the {ranks} ranks",
            f"nearest: dp {ranks // product}" if ranks % product == 0 else "name other sizes",
        )
    return dp
