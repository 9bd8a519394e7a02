"""Draw the README's picture of a plan from the plan itself.

    python docs/hooks/picture.py

It plans Qwen3-235B-A22B on 256 H100 for Megatron, and draws the answer, its reasons, and two of
moetune's figures into `docs/assets/plan.svg`. The program's stylesheet has the colours.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import cast

import moetune
from moetune.app.subjects.model import kinds_of
from moetune.app.views.model_words import (
    binding_words,
    decision_words,
    how_sure,
    origin_words,
    saving_words,
)
from moetune.domain.training_document import TrainingDocument
from moetune.domain.units import format_bytes
from moetune.report.axes import ROWS, Axis
from moetune.report.html import STATIC
from moetune.report.marks import Bars, Panel
from moetune.report.plan_figures import stacked_figure
from moetune.report.section import Figure, seconds_span
from moetune.report.svg import figure_svg

PICTURE = Path(__file__).resolve().parents[1] / "assets" / "plan.svg"
_WIDTH, _LETTERS, _LINE = 860, 100, 20
_COLORS = re.compile(r"(--\w+): light-dark\((#\w+), (#\w+)\);")
_PART = re.compile(
    r'<svg class="(?:ends|area)"(.*?)>(.*?)</svg>(?=<svg class="area"|</div>)', re.DOTALL
)


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
    steps = stacked_figure(parts, title="Why: the plan's step, and the next layouts'", words="")
    low, high = plan.range_seconds
    panel = steps.panels[0]
    ranges = Bars(
        name="nine in ten steps", color="accent/0.35", rows=("range of the plan",),
        starts=(low,), lengths=(high - low,),
    )  # fmt: skip
    yield replace(steps, panels=(replace(panel, marks=(*panel.marks, ranges)),), is_wide=True)
    memory, limit = plan.memory, plan.inputs.memory_limit_bytes
    title = f"Memory: {format_bytes(memory.peak_bytes)} of {format_bytes(limit)} of a device"
    yield replace(steps, title=title, panels=(_memory(memory.parts, limit),), is_wide=True)


def _memory(parts: Mapping[str, float], limit_bytes: int) -> Panel:
    """Return the parts that take memory as bars, the largest first, then what the limit leaves."""
    sizes = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    left = [(limit_bytes - sum(parts.values()), "free")]
    bars = tuple(
        Bars(
            rows=tuple(f"{name} {format_bytes(size)}" for size, name in rows), color=color,
            starts=(0.0,) * len(rows), lengths=tuple(size / 2**30 for size, _ in rows),
        )
        for rows, color in ((sizes, "accent"), (left, "third"))
    )  # fmt: skip
    return Panel(x=Axis(title="GiB", from_zero=True), y=ROWS, marks=bars)


def _drawn(figure: Figure, top: float) -> tuple[str, float]:
    """Return a figure's drawing at a place of the picture, and its height."""
    ends, area = _PART.findall(figure_svg(figure))
    left, height = (float(_size(name, ends[0])) for name in ("width", "height"))
    places = ((ends, 20.0, left), (area, 20.0 + left, _WIDTH - left - 60))
    drawn = "".join(
        f'<svg x="{x:g}" y="{top:g}" width="{width:g}" height="{height:g}" '
        f'class="drawing">{part[1]}</svg>\n'
        for part, x, width in places
    )
    bars = [mark for mark in figure.panels[0].marks if isinstance(mark, Bars) and mark.name]
    return drawn + _legend(bars, top - 18), height


def _size(name: str, attributes: str) -> str:
    return str(re.findall(f'{name}="([^"]+)"', attributes)[0])


def _legend(series: list[Bars], top: float) -> str:
    """Return a swatch and a name for each series, at the right of the title."""
    x, drawn = _WIDTH - 40.0, ""
    for bars in reversed(series):
        x -= 7 * len(bars.name) + 26
        role, _, opacity = bars.color.partition("/")
        drawn += (
            f'<rect x="{x:g}" y="{top:g}" width="14" height="10" fill="var(--{role})" '
            f'fill-opacity="{opacity or 1}"/><text x="{x + 20:g}" y="{top + 9:g}" '
            f'class="tick">{escape(bars.name)}</text>'
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
