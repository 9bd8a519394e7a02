"""Charts that a page draws as SVG without a script: bars on lanes, and points with a front.

Positions are percentages, so that a chart is as wide as its page and its texts keep their size;
`charts.html` draws them, in colours of the stylesheet. They are apart from `svg.py`, which draws
every `Figure` from plotly's JSON, with its axes and panels: a lane is a row of HTML with its name
and its total, which the stylesheet lays out, and the page New plan draws them at every change.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moetune.domain.units import format_bytes, format_seconds
from moetune.report.chart_axis import (
    ROOM,
    Axis,
    AxisMark,
    binary_unit,
    percentage,
    size_words,
    time_words,
)
from moetune.report.plan_figures import Option, pareto_front

_PHONE, _DESK = 2.4, 8.0
"""Pixels of one percent of a lane on a phone and on a desk."""
_LETTER = 7.0
_NEAR = 2.0
"""Multiple of the largest memory up to which a limit is drawn; a farther one would squeeze it."""
_MANY_BARS = 80
"""From which on bars have no edges: these would hide them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a lane, before it is drawn.

    Args:
        start, length: in the chart's unit.
        tone: colour class of the stylesheet, "1" to "9".
        label: inside the bar, where there is room.
        words: what a pointer is told.
    """

    start: float
    length: float
    tone: str
    label: str = ""
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A drawn stretch, in percent.

    Args:
        room: "" where the label fits everywhere, "roomy" where a phone is too narrow, "none".
    """

    x: str
    width: str
    middle: str
    tone: str
    label: str
    room: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of bars with its name and its total."""

    name: str
    total: str
    bars: tuple[Bar, ...]

    @property
    def is_dense(self) -> bool:
        """Whether the bars' edges would hide them."""
        return len(self.bars) > _MANY_BARS


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneChart:
    """Bars on lanes.

    Args:
        name: of letters, digits and hyphens; unique on its page.
        words: caption and text alternative.
        legend: (tone, name) of the colours.
        limit: where a limit is, in percent; "" for none.
        limit_words: what it is.
    """

    name: str
    title: str
    words: str
    lanes: tuple[Lane, ...]
    ticks: tuple[AxisMark, ...]
    legend: tuple[tuple[str, str], ...] = ()
    limit: str = ""
    limit_words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point, in percent."""

    x: str
    y: str
    tone: str
    words: str
    is_chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stroke:
    """A straight line, in percent."""

    x1: str
    y1: str
    x2: str
    y2: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontChart:
    """Points by memory and time, with their Pareto front."""

    name: str
    title: str
    words: str
    dots: tuple[Dot, ...]
    front: tuple[Stroke, ...]
    x_ticks: tuple[AxisMark, ...]
    y_ticks: tuple[AxisMark, ...]
    legend: tuple[tuple[str, str], ...]


def seconds_chart(
    name: str, title: str, words: str, lanes: Mapping[str, Sequence[Piece]],
    *, legend: Iterable[tuple[str, str]] = (), totals: Mapping[str, float] | None = None,
) -> LaneChart:  # fmt: skip
    """Return lanes of seconds from 0.

    Args:
        totals: seconds beside a lane; None for the end of its last bar.
    """
    ends = {key: max((one.start + one.length for one in some), default=0.0)
            for key, some in lanes.items()}  # fmt: skip
    known = ends if totals is None else totals
    longest = max(ends.values(), default=0.0) or 1.0
    return LaneChart(
        name=name, title=title, words=words, legend=tuple(legend),
        lanes=tuple(
            _lane(key, some, longest, format_seconds(known[key]) if key in known else "")
            for key, some in lanes.items()
        ),
        ticks=Axis(0.0, longest).ticks(time_words),
    )  # fmt: skip


def bytes_chart(
    name: str, title: str, words: str, lanes: Mapping[str, Mapping[str, float]],
    *, tones: Mapping[str, str], limit_bytes: int | None,
) -> LaneChart:  # fmt: skip
    """Return each lane's parts on each other, with the limit.

    Args:
        tones: by the name of a part, in the order that they are drawn.
    """
    largest = max((sum(parts.values()) for parts in lanes.values()), default=0.0) or 1.0
    is_near = limit_bytes is not None and limit_bytes <= _NEAR * largest
    longest = ROOM * (max(largest, limit_bytes or 0.0) if is_near else largest)
    far = f" The limit is {format_bytes(limit_bytes)}." if limit_bytes and not is_near else ""
    used = [key for key in tones if any(parts.get(key) for parts in lanes.values())]
    return LaneChart(
        name=name, title=title, words=f"{words}{far}",
        legend=tuple((tones[key], key) for key in used),
        lanes=tuple(
            _lane(key, [*_stacked(parts, tones)], longest, format_bytes(sum(parts.values())))
            for key, parts in lanes.items()
        ),
        ticks=Axis(0.0, longest).ticks(size_words, unit=binary_unit(longest)),
        limit=percentage((limit_bytes or 0.0) / longest) if is_near else "",
        limit_words=f"limit {format_bytes(limit_bytes or 0)}",
    )  # fmt: skip


def front_chart(words: str, options: Sequence[Option]) -> FrontChart:
    """Return options by memory and time, groups in colours, and the chosen one larger."""
    groups = list(dict.fromkeys(one.group for one in options))
    tones = {group: str(1 + at % 9) for at, group in enumerate(groups)}
    memory = Axis.of([one.memory_bytes for one in options])
    time = Axis.of([one.step_seconds for one in options])

    def dot(one: Option) -> Dot:
        step, size = format_seconds(one.step_seconds), format_bytes(one.memory_bytes)
        return Dot(
            x=percentage(memory.share(one.memory_bytes)),
            y=percentage(1 - time.share(one.step_seconds)),
            tone=tones[one.group],
            words=f"{one.name}: {step}, {size}",
            is_chosen=one.is_chosen,
        )

    return FrontChart(
        name="front",
        title="Step time against memory",
        words=words,
        dots=tuple(map(dot, sorted(options, key=lambda one: one.is_chosen))),
        front=tuple(_stairs([dot(one) for one in pareto_front(options)])),
        x_ticks=memory.ticks(size_words, unit=binary_unit(memory.high)),
        y_ticks=time.ticks(time_words, is_upward=True),
        legend=tuple((tones[group], group) for group in groups),
    )


def _stairs(dots: Sequence[Dot]) -> Iterable[Stroke]:
    for here, there in pairwise(dots):
        yield Stroke(x1=here.x, y1=here.y, x2=there.x, y2=here.y)
        yield Stroke(x1=there.x, y1=here.y, x2=there.x, y2=there.y)


def _lane(name: str, pieces: Iterable[Piece], longest: float, total: str) -> Lane:
    return Lane(name=name, total=total, bars=tuple(_bar(one, longest) for one in pieces))


def _bar(one: Piece, longest: float) -> Bar:
    share = 100 * one.length / longest
    needed = _LETTER * len(one.label) + 4
    room = "" if share * _PHONE >= needed else "roomy" if share * _DESK >= needed else "none"
    return Bar(
        x=percentage(one.start / longest), width=percentage(one.length / longest),
        middle=percentage((one.start + one.length / 2) / longest),
        tone=one.tone, label=one.label if room != "none" else "", room=room, words=one.words,
    )  # fmt: skip


def _stacked(parts: Mapping[str, float], tones: Mapping[str, str]) -> Iterable[Piece]:
    at = 0.0
    for key, tone in tones.items():
        if size := parts.get(key, 0.0):
            yield Piece(
                start=at, length=size, tone=tone, label=key, words=f"{key}: {format_bytes(size)}"
            )
            at += size
