"""Figures of plans: chunks by batch, time against memory, parts of a step, memory, timelines."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moetune.domain.plan import Plan
from moetune.domain.samples import ResourceClass
from moetune.domain.units import format_bytes, format_seconds
from moetune.report.axes import ROWS, Axis, bytes_unit, log_sizes, seconds_unit
from moetune.report.marks import SERIES, Bars, Line, Mark, Panel, Upright
from moetune.report.section import Figure, percent
from moetune.report.tradeoff import Spot, front_of, tradeoff_marks
from moetune.solve.layer.timeline import Span, Timeline, operation_and_chunk, shown_name


def degree_figure(plans: Mapping[str, Plan]) -> Figure:
    """Return the chunks of one plan or several over the batch size.

    Args:
        plans: by the name in the legend. A single plan's own batch size is marked.
    """
    is_alone = len(plans) == 1
    marks: list[Mark] = [
        line
        for (name, plan), color in zip(plans.items(), SERIES, strict=False)
        for line in _steps(plan, "" if is_alone else f"{name} ", color)
    ]
    if is_alone:
        marks += [Upright(at=plan.tokens_per_rank, words="this plan") for plan in plans.values()]
    sizes = log_sizes("tokens per rank", unit="tokens")
    chunks = Axis(title="chunks", from_zero=True, is_count=True)
    return Figure(
        name="degrees",
        title="Chunks by batch",
        words=(
            "Number of chunks that a step's tokens are cut into, by the tokens on each rank. A "
            "layer that runs with this plan looks its batch up here."
        ),
        panels=(Panel(x=sizes, y=chunks, marks=tuple(marks)),),
        header=("plan", "low_tokens", "high_tokens", "forward_degree", "backward_degree"),
        rows=tuple((name, *row) for name, plan in plans.items() for row in plan.pipeline.ranges),
    )


def _steps(plan: Plan, name: str, color: str) -> Iterator[Line]:
    """Yield the degree as a line of steps; of plans of before, whose phases may differ, two."""
    ranges = plan.pipeline.ranges
    last = ranges[-1:]
    sizes = tuple(row[0] for row in ranges) + tuple(row[1] for row in last)
    phases = ["chunks forward", "chunks backward"]
    if all(forward == backward for *_, forward, backward in ranges):
        phases = ["chunks"]
    for column, phase in enumerate(phases, start=2):
        yield Line(
            name=f"{name}{phase}", x=sizes, y=tuple(row[column] for row in (*ranges, *last)),
            color=color, has_steps=True, is_dotted=phase == "chunks backward",
        )  # fmt: skip


_NEAR = 1.25
"""Multiple of the largest memory up to which the limit is drawn; a farther one would squeeze the
points together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run the step.

    Args:
        group: options that belong together, such as a strategy.
        memory_bytes: of the device that needs most.
    """

    name: str
    group: str
    step_seconds: float
    memory_bytes: int
    is_chosen: bool = False


def pareto_front(options: Sequence[Option]) -> tuple[Option, ...]:
    """Return the options for which no other is both faster and smaller, the least memory first.

    Of equal ones the first is taken.
    """
    return tuple(front_of(options, lambda option: (option.memory_bytes, option.step_seconds)))


def pareto_figure(options: Sequence[Option], *, limit_bytes: int | None) -> Figure:
    """Return all options by memory and step time, with Pareto front, chosen one and limit."""
    front = pareto_front(options)
    most = max(option.memory_bytes for option in options)
    second, time_unit = seconds_unit(min(option.step_seconds for option in options))
    byte, size_unit = bytes_unit(most)
    limit, far = limit_bytes or math.inf, ""
    spots = [*_spots(options, units=(byte, second), limit=limit)]
    marks = [*tradeoff_marks(spots)]
    if limit <= _NEAR * most:
        marks.append(Upright(at=limit / byte, words="limit"))
    elif limit_bytes:
        far = f" The limit is {format_bytes(limit_bytes)}."
    sizes = Axis(title=f"memory of one device, {size_unit}")
    times = Axis(title=f"one step, {time_unit}")
    return Figure(
        name="memory",
        title="Step time against memory",
        words=(
            "Down and to the left is better: no option is both faster and smaller than one on the "
            "line. The filled point is the plan." + far
        ),
        panels=(Panel(x=sizes, y=times, marks=tuple(marks)),),
        header=("option", "group", "memory_bytes", "step_seconds", "on_front", "chosen", "fits"),
        rows=tuple(
            (
                option.name, option.group, option.memory_bytes, option.step_seconds,
                *("yes" if is_so else "no"
                  for is_so in (option in front, option.is_chosen, option.memory_bytes <= limit)),
            )
            for option in options
        ),
    )  # fmt: skip


def _spots(
    options: Sequence[Option], *, units: tuple[float, float], limit: float
) -> Iterator[Spot]:
    byte, second = units
    for option in options:
        is_above = option.memory_bytes > limit
        words = f"{format_seconds(option.step_seconds)}, {format_bytes(option.memory_bytes)}"
        yield Spot(
            x=option.memory_bytes / byte, y=option.step_seconds / second, group=option.group,
            hover=f"{option.name}\n{words}{', does not fit' if is_above else ''}",
            is_chosen=option.is_chosen,
        )  # fmt: skip


def phases_figure(plans: Mapping[str, Plan]) -> Figure:
    """Return the predicted passes of each plan's layer as stacked bars.

    Args:
        plans: by the name next to the bar.
    """
    return stacked_figure(
        {
            name: {
                "forward": plan.predicted.forward_seconds,
                "backward": plan.predicted.backward_seconds,
                "around": plan.predicted.overhead_seconds,
            }
            for name, plan in plans.items()
        },
        title="One step of the layer",
        words=(
            "Predicted seconds of the forward and the backward pass, and of the gate and the "
            "sorting around them."
        ),
    )


def stacked_figure(parts: Mapping[str, Mapping[str, float]], *, title: str, words: str) -> Figure:
    """Return plans' steps as stacked bars, each as long as the plan's step.

    Args:
        parts: seconds by phase, of at most three phases, by the name next to the bar.
    """
    second, unit = seconds_unit(max(sum(phases.values()) for phases in parts.values()))
    times = Axis(title=unit, from_zero=True)
    return Figure(
        name="phases",
        title=title,
        words=words,
        panels=(Panel(x=times, y=ROWS, marks=tuple(_stacked_bars(parts, second))),),
        header=("plan", "phase", "seconds"),
        rows=tuple((name, *phase) for name, phases in parts.items() for phase in phases.items()),
    )


def _stacked_bars(parts: Mapping[str, Mapping[str, float]], second: float) -> Iterator[Bars]:
    """Yield the bars of each phase that takes time, behind those of the phases before it."""
    ends = dict.fromkeys(parts, 0.0)
    phases = dict.fromkeys(phase for plan in parts.values() for phase in plan)
    for phase, color in zip(phases, SERIES, strict=False):
        seconds = {name: plan.get(phase, 0.0) for name, plan in parts.items()}
        if not any(seconds.values()):
            continue
        yield Bars(
            name=phase, color=color, rows=tuple(parts), starts=tuple(ends.values()),
            lengths=tuple(length / second for length in seconds.values()),
            hover=tuple(f"{phase}: {format_seconds(length)}" for length in seconds.values()),
        )  # fmt: skip
        ends = {name: ends[name] + length / second for name, length in seconds.items()}


_BESIDE = 1.4
"""Multiple of the longest bar, so that its size fits next to it on a phone, too."""


def memory_parts_figure(parts: Mapping[str, float], *, limit_bytes: int, words: str) -> Figure:
    """Return the parts that take memory as bars, the largest first, then what the limit leaves.

    Args:
        parts: bytes by name; those of none are omitted.
        limit_bytes: usable memory of the device.
        words: whose memory it is, a sentence.
    """
    taken = sum(parts.values())
    free = limit_bytes - taken
    taking = sorted(((name, size) for name, size in parts.items() if size), key=lambda row: -row[1])
    left = [("free below the limit" if free >= 0 else "missing to the limit", abs(free))]
    longest = max(size for _, size in (*taking, *left))
    byte, unit = bytes_unit(longest)
    marks = tuple(
        Bars(
            rows=tuple(name for name, _ in rows), starts=(0.0,) * len(rows),
            lengths=tuple(size / byte for _, size in rows), color=color,
            texts=tuple(format_bytes(size) for _, size in rows),
            hover=tuple(
                f"{name}: {format_bytes(size)}, {percent(size / limit_bytes)}"
                for name, size in rows
            ),
        )
        for rows, color in ((taking, SERIES[0]), (left, SERIES[2]))
    )  # fmt: skip
    return Figure(
        name="memory-parts",
        title="Memory part by part",
        is_wide=True,
        words=f"{words} {format_bytes(taken)} of the limit of {format_bytes(limit_bytes)}.",
        panels=(Panel(x=Axis(title=unit, end=_BESIDE * longest / byte), y=ROWS, marks=marks),),
        header=("part", "bytes", "share"),
        rows=tuple((name, size, size / limit_bytes) for name, size in (*taking, *left)),
    )


CLASSES: Mapping[ResourceClass, str] = MappingProxyType({
    "comp": "computation", "comm": "communication", "mem": "copies",
})  # fmt: skip
"""Names of resources."""
_COLORS: dict[ResourceClass, tuple[str, str]] = {
    "comp": ("accent", "surface"), "comm": ("second", "surface"), "mem": ("third", "ink"),
}  # fmt: skip
"""Colours of bars and of the text in them."""
_MEANINGS = {
    "before": "first half of the experts", "after": "second half", "sum": "sum of the outputs",
    "save": "copy to the host", "load": "copy back", "weights": "combine weights",
}  # fmt: skip
"""Meaning of an operation's first word, where the word does not say it."""


def timeline_figure(*, forward: Timeline, backward: Timeline) -> Figure:
    """Return both phases of a layer's step, one lane per stream, on the same time scale."""
    phases = {"forward": forward, "backward": backward}
    longest = max(timeline.makespan_seconds for timeline in phases.values())
    second, unit = seconds_unit(longest)
    return Figure(
        name="timeline",
        title="Timeline of one step",
        words=(
            f"The simulated forward pass takes {format_seconds(forward.makespan_seconds)}, the "
            f"backward pass {format_seconds(backward.makespan_seconds)}. "
            f"{_letters(forward, backward)}"
        ),
        panels=tuple(
            Panel(
                title=f"{phase} {format_seconds(timeline.makespan_seconds)}",
                x=Axis(title=unit, end=1.02 * longest / second),
                y=ROWS,
                marks=tuple(_bars(phase, timeline, second)),
            )
            for phase, timeline in phases.items()
        ),
        is_wide=True,
        header=("phase", "span", "class", "stream", "start_seconds", "end_seconds"),
        rows=tuple(
            (phase, shown_name(span.name), CLASSES[span.resource], span.stream, span.start_seconds,
             span.end_seconds)
            for phase, timeline in phases.items()
            for span in timeline.spans
        ),
    )  # fmt: skip


def _bars(phase: str, timeline: Timeline, second: float) -> Iterator[Bars]:
    """Yield the bars of each class of resources."""
    for resource, name in CLASSES.items():
        spans = [span for span in timeline.spans if span.resource == resource]
        color, text_color = _COLORS[resource]
        if spans:
            yield Bars(
                name=name, color=color, text_color=text_color,
                rows=tuple(span.stream for span in spans),
                starts=tuple(span.start_seconds / second for span in spans),
                lengths=tuple(_seconds(span) / second for span in spans),
                texts=tuple(_short(span.name) for span in spans),
                hover=tuple(
                    f"{phase} {shown_name(span.name)}\n{format_seconds(_seconds(span))}, "
                    f"from {format_seconds(span.start_seconds)}"
                    for span in spans
                ),
            )  # fmt: skip


def _seconds(span: Span) -> float:
    return span.end_seconds - span.start_seconds


def _short(name: str) -> str:
    """Return "D1" of "dispatch 0"; "" of what is no chunk's."""
    operation, chunk = operation_and_chunk(name)
    return "" if chunk is None else f"{operation[:1].upper()}{chunk + 1}"


def _letters(*timelines: Timeline) -> str:
    """Return what the bars' letters stand for, in the order that they appear."""
    names = [operation_and_chunk(span.name) for timeline in timelines for span in timeline.spans]
    operations = dict.fromkeys(
        operation.partition(" ")[0] for operation, chunk in names if chunk is not None
    )
    meanings = ", ".join(
        f"{operation[:1].upper()} {_MEANINGS.get(operation, operation)}" for operation in operations
    )
    return f"Letters with a chunk's number: {meanings}."
