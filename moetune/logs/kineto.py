"""Profiler traces (Kineto, `torch.profiler`): a step's device time by kind, exposed and hidden.

Source: the JSON that `torch.profiler.profile(…).export_chrome_trace` writes, plain or gzipped.
"""

import gzip
import json
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.errors import InputError

KernelKind = Literal[
    "matrix products", "attention", "other kernels", "copies", "exchanges of tokens, exposed",
    "other collectives, exposed",
]  # fmt: skip
COLLECTIVES: tuple[KernelKind, ...] = ("exchanges of tokens, exposed", "other collectives, exposed")
_NAMES: Mapping[KernelKind, re.Pattern[str]] = MappingProxyType({
    "exchanges of tokens, exposed": re.compile(
        "sendrecv|all_?to_?all|deep_?ep|hybrid_?ep|internode|intranode"),
    "other collectives, exposed": re.compile("nccl|multimem|userbuffers|all_?reduce|all_?gather|"
                                             "reduce_?scatter"),
    "attention": re.compile("flash|fmha|attention|attn|sdpa"),
    "matrix products": re.compile("gemm|cutlass|nvjet|xmma|cublas|grouped_mm|gmm|matmul|_mm_|cijk"),
})  # fmt: skip
"""Patterns of kernel names by kind; the first match counts. The rest are "other kernels"."""
_ORDER: tuple[KernelKind, ...] = (
    "matrix products", "attention", "other kernels", "copies", *COLLECTIVES,
)  # fmt: skip
"""A kind counts as hidden while an earlier kind of this order runs."""
_BETWEEN = re.compile(r"[\s,]*")
_BLOCK, _LONGEST = 2**20, 16 * 2**20
"""Characters that are read at a time, and the most that a single event may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """The mean step of a trace.

    Args:
        exposed: seconds of each kind while no earlier kind runs; `exposed` and `idle` add up
            to the step.
        busy: seconds of each kind, hidden or not.
        is_marked: whether the trace marks its steps; if not, all of it counts as a single step.
    """

    seconds: float
    num_steps: int
    exposed: Mapping[KernelKind, float]
    busy: Mapping[KernelKind, float]
    idle: float
    is_marked: bool


def read_trace(path: Path) -> TracedStep:
    """Return the mean step of a trace.

    Raises:
        InputError: the file cannot be read, is no trace, or has no kernel in its steps.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace") as file:
            kernels, marks = _spans(str(path), file)
    except (OSError, EOFError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{path} cannot be read: {what}", "give a trace of torch.profiler"
        ) from None
    if not kernels:
        raise InputError(
            f"{path} has no kernel of a GPU", "trace with ProfilerActivity.CUDA, on a GPU's rank"
        )
    steps = marks.get("gpu_user_annotation") or marks.get("user_annotation") or {}
    sides = [*steps.values()] or [(min(times), max(times)) for times in kernels.values()]
    begin, end = min(side[0] for side in sides), max(side[1] for side in sides)
    spans = [_clip(kernels.get(kind, array("d")), begin, end) for kind in _ORDER]
    covered = [_union_length(np.concatenate(spans[:count])) for count in range(1, len(spans) + 1)]
    scale = 1e-6 / max(1, len(steps))
    exposed = [after - before for before, after in pairwise((0.0, *covered))]
    return TracedStep(
        seconds=scale * (end - begin), num_steps=max(1, len(steps)), is_marked=bool(steps),
        exposed={kind: scale * size for kind, size in zip(_ORDER, exposed, strict=True)},
        busy={kind: scale * _union_length(some) for kind, some in zip(_ORDER, spans, strict=True)},
        idle=scale * (end - begin - covered[-1]),
    )  # fmt: skip


def _spans(
    name: str, file: IO[str]
) -> tuple[dict[KernelKind, "array[float]"], dict[str, dict[str, tuple[float, float]]]]:
    """Return start and end of kernels by kind, and of marked steps by annotation category, µs."""
    kernels: dict[KernelKind, array[float]] = {}
    marks: dict[str, dict[str, tuple[float, float]]] = {}
    for event in _events(name, file):
        kind, label = event.get("cat"), str(event.get("name"))
        if event.get("ph") != "X" or not isinstance(kind, str):
            continue
        begin = float(event.get("ts", 0.0))
        end = begin + float(event.get("dur", 0.0))
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            of_kind = _kind_of(label) if kind == "kernel" else "copies"
            kernels.setdefault(of_kind, array("d")).extend((begin, end))
        elif kind.endswith("user_annotation") and label.startswith("ProfilerStep"):
            low, high = marks.setdefault(kind, {}).get(label, (begin, end))
            marks[kind][label] = min(low, begin), max(high, end)
    return kernels, marks


def _kind_of(name: str) -> KernelKind:
    words = name.lower()
    kinds = (kind for kind, pattern in _NAMES.items() if pattern.search(words))
    return next(kinds, "other kernels")


def _events(name: str, file: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield a trace's events as a stream; raise InputError if it is no trace or is cut off."""
    key, text, decoder = '"traceEvents"', file.read(_BLOCK), json.JSONDecoder()
    if not text.lstrip().startswith("["):
        while key not in text and (more := file.read(_BLOCK)):
            text = text[-len(key) :] + more
        text = text.partition(key)[2]
    if "[" not in text:
        raise InputError(
            f"{name} is no trace: it has no traceEvents", "give that of torch.profiler"
        )
    place = text.index("[") + 1
    while True:
        match = _BETWEEN.match(text, place)
        place = match.end() if match else place
        if text[place : place + 1] == "]":
            return
        try:
            event, place = decoder.raw_decode(text, place)
        except ValueError:
            more = file.read(_BLOCK)
            if not more or len(text) - place > _LONGEST:
                what = f"{name} is no whole trace: an event of it cannot be read"
                raise InputError(what, "copy it again, or trace fewer steps") from None
            text, place = text[place:] + more, 0
            continue
        if isinstance(event, dict):
            yield event


def _clip(times: "array[float]", begin: float, end: float) -> Floats:
    """Return the spans clipped to a window, shape (spans, 2), without empty spans."""
    spans: Floats = np.clip(np.array(times).reshape(-1, 2), begin, end)
    return spans[spans[:, 1] > spans[:, 0]]


def _union_length(spans: Floats) -> float:
    """Return the length of the union of spans."""
    if not len(spans):
        return 0.0
    ordered = spans[np.argsort(spans[:, 0])]
    latest = np.maximum.accumulate(ordered[:, 1])
    begins = np.maximum(ordered[1:, 0], latest[:-1])
    first = ordered[0, 1] - ordered[0, 0]
    return float(first + np.sum(np.maximum(0.0, ordered[1:, 1] - begins)))
