"""Draw the README's picture of a plan from the plan itself.

    python docs/hooks/picture.py

It plans Qwen3-235B-A22B on 256 H100 for Megatron, and draws the answer, its reasons, and two
figures of it into `docs/assets/plan.svg`. The program's stylesheet has the colours.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import cast

import moetune
from moetune.app.subjects.model import kinds_of
from moetune.domain.training_document import TrainingDocument
from moetune.domain.units import format_bytes
from moetune.report.figure import Axis, Bar, Figure, Series, seconds_unit
from moetune.report.model_words import (
    binding_words,
    decision_words,
    how_sure,
    origin_words,
    saving_words,
)
from moetune.report.section import seconds_span
from moetune.report.svg import STATIC, drawing_of

PICTURE = Path(__file__).resolve().parents[1] / "assets" / "plan.svg"
_WIDTH, _LETTERS, _LINE = 860, 100, 20
_COLORS = re.compile(r"(--\w+): light-dark\((#\w+), (#\w+)\);")


def picture() -> str:
    """Return the picture as SVG."""
    answer = moetune.plan(
        "qwen3-235b-a22b", profile="h100-x8", world_size=256, global_batch=2048, seq=4096,
        target="megatron", save=False,
    )  # fmt: skip
    plan = cast("TrainingDocument", answer.plan)
    parts, top = [], 30.0
    for words, look in _texts(plan):
        parts.append(f'<text x="20" y="{top:g}" class="{look}">{escape(words)}</text>')
        top += _LINE
    for figure in _figures(plan):
        parts.append(f'<text x="20" y="{top + 22:g}" class="head">{escape(figure.title)}</text>')
        drawn, height = _drawn(figure, top + 30)
        parts.append(drawn)
        top += height + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top:g}" '
        f'width="{_WIDTH}" height="{top:g}">\n<style>{_style()}</style>\n'
        f'<rect width="100%" height="100%" class="page"/>\n{"".join(parts)}\n</svg>\n'
    )


def _texts(plan: TrainingDocument) -> Iterator[tuple[str, str]]:
    """Yield the lines of the answer, each with its style class."""
    low, high = plan.range_seconds
    yield f"{plan.name}, {plan.inputs.world_size} H100, {plan.inputs.runtime}", "muted"
    yield "", ""
    yield f"One step: {seconds_span(plan.step_seconds, low, high)}", "lead"
    yield "", ""
    sentences = (
        decision_words(plan.words, plan.layout), binding_words(plan.best), *saving_words(plan),
        how_sure(plan), *origin_words(plan),
    )  # fmt: skip
    for sentence in sentences:
        yield from ((line, "words") for line in textwrap.wrap(sentence, _LETTERS))


def _figures(plan: TrainingDocument) -> Iterator[Figure]:
    """Yield the steps of the plan and the next layouts, and the memory of the plan."""
    answers = {f"plan: {plan.words}": plan.best}
    answers |= {answer.words: answer for answer in plan.alternatives[:3]}
    parts = {words: kinds_of(answer.mean_parts) for words, answer in answers.items()}
    yield _steps(parts, plan.range_seconds)
    yield _memory(plan.memory.parts, plan.inputs.memory_limit_bytes)


def _steps(parts: Mapping[str, Mapping[str, float]], span: tuple[float, float]) -> Figure:
    """Return steps as bars of the kinds of their parts, then the range of the plan's."""
    longest = max(sum(kinds.values()) for kinds in parts.values())
    second, unit = seconds_unit(longest)
    ends, series = dict.fromkeys(parts, 0.0), []
    names = dict.fromkeys(kind for kinds in parts.values() for kind in kinds)
    for name, color in zip(names, ("accent", "second", "third"), strict=False):
        lengths = {row: kinds.get(name, 0.0) / second for row, kinds in parts.items()}
        if any(lengths.values()):
            bars = tuple(Bar(row, ends[row], lengths[row]) for row in parts)
            series.append(Series(name=name, color=color, bars=bars))
        ends = {row: end + lengths[row] for row, end in ends.items()}
    low, high = (seconds / second for seconds in span)
    ranges = (Bar("range of the plan", low, high - low),)
    series.append(Series(name="nine in ten steps", color="accent/0.35", bars=ranges))
    return Figure(
        name="steps", title="Why: the plan's step, and the next layouts'",
        x=Axis(title=unit, end=1.03 * max(longest / second, high)), series=tuple(series),
    )  # fmt: skip


def _memory(parts: Mapping[str, float], limit_bytes: int) -> Figure:
    """Return the parts that take memory as bars, the largest first, then what the limit leaves."""
    peak = sum(parts.values())
    sizes = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    series = tuple(
        Series(color=color, bars=tuple(
            Bar(f"{name} {format_bytes(size)}", 0.0, size / 2**30) for size, name in rows
        ))
        for rows, color in ((sizes, "accent"), ([(limit_bytes - peak, "free")], "third"))
    )  # fmt: skip
    return Figure(
        name="memory",
        title=f"Memory: {format_bytes(peak)} of {format_bytes(limit_bytes)} of a device",
        x=Axis(title="GiB", end=1.03 * max(sizes)[0] / 2**30), series=series,
    )  # fmt: skip


def _drawn(figure: Figure, top: float) -> tuple[str, float]:
    """Return a figure's drawing at a place of the picture, and its height."""
    drawing = drawing_of(figure)
    left, height = drawing.left, drawing.height
    places = ((drawing.labels, 20.0, left), (drawing.area, 20.0 + left, _WIDTH - left - 60))
    drawn = "".join(
        f'<svg x="{x:g}" y="{top:g}" width="{width:g}" height="{height:g}" '
        f'class="drawing">{part}</svg>\n'
        for part, x, width in places
    )
    return drawn + _legend(drawing.legend, top - 18), height


def _legend(swatches: Mapping[str, str], top: float) -> str:
    """Return a swatch and a name for each series, at the right of the title."""
    x, drawn = _WIDTH - 40.0, ""
    for name, swatch in reversed(swatches.items()):
        x -= 7 * len(name) + 26
        drawn += (
            f'<svg x="{x:g}" y="{top - 1:g}" width="18" height="12">{swatch}</svg>'
            f'<text x="{x + 20:g}" y="{top + 9:g}" class="tick">{escape(name)}</text>'
        )
    return drawn


def _style() -> str:
    """Return the program's colours, light and dark, and the looks of its drawings."""
    colors = _COLORS.findall((STATIC / "moetune.css").read_text(encoding="utf-8"))
    light, dark = ("".join(f"{row[0]}:{row[place]};" for row in colors) for place in (1, 2))
    return (
        f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "text{font:14px ui-sans-serif,system-ui,sans-serif;fill:var(--ink)}"
        ".page{fill:var(--page)}.muted{fill:var(--muted)}.lead{font-size:26px;font-weight:600}"
        ".head{font-weight:600}.tick{font-size:12px;fill:var(--muted)}.grid{stroke:var(--grid)}"
        ".drawing{overflow:visible}"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
