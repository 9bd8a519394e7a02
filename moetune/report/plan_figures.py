"""Figures of plans: chunks by batch, time against memory, passes, and the parts of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetune.domain.plan import Plan, Range
from moetune.domain.units import format_bytes, format_seconds
from moetune.report.section import Figure
from moetune.report.theme import (
    SERIES,
    axis,
    bytes_scale,
    drawing,
    log_sizes,
    seconds_scale,
    upright,
)


def degree_figure(plans: Mapping[str, Plan]) -> Figure:
    """Return the chunks of one plan or several over the batch size.

    Args:
        plans: by the name in the legend. A single plan's own batch size is marked.
    """
    several = len(plans) > 1
    data = [
        _steps(plan.pipeline.ranges, at, f"{name} " if several else "", color)
        for (name, plan), color in zip(plans.items(), SERIES, strict=False)
        for at in (0, 1)
    ]
    ranges = [row for plan in plans.values() for row in plan.pipeline.ranges]
    highest = max((max(row[2:]) for row in ranges), default=1)
    top = max((row[1] for row in ranges), default=1)
    plan = next(iter(plans.values()))
    mark = {} if several else upright(plan.tokens_per_rank, "this plan ")
    return Figure(
        name="degrees",
        title="Chunks by batch",
        words=(
            "Number of chunks that a step's tokens are cut into, by the tokens on each rank. A "
            "layer that runs with this plan looks its batch up here."
        ),
        drawing=drawing(
            data,
            x=log_sizes("tokens per rank", 1, top, unit="tokens"),
            y=axis("chunks", rangemode="tozero", dtick=1 if highest <= 8 else None),  # noqa: PLR2004 - few enough to label each
            **mark,
        ),
        header=("plan", "low_tokens", "high_tokens", "forward_degree", "backward_degree"),
        rows=tuple((name, *row) for name, one in plans.items() for row in one.pipeline.ranges),
    )


def _steps(ranges: tuple[Range, ...], at: int, name: str, color: str) -> dict[str, object]:
    """Return one phase's degrees as a line of steps; `at` is 0 forward, 1 backward."""
    sizes = [row[0] for row in ranges]
    degrees = [row[2 + at] for row in ranges]
    if ranges:
        sizes.append(ranges[-1][1])
        degrees.append(degrees[-1])
    phase = ("forward", "backward")[at]
    return {
        "type": "scatter", "mode": "lines", "name": f"{name}{phase}", "x": sizes, "y": degrees,
        "line": {"shape": "hv", "color": color, "width": 2, "dash": ("solid", "dot")[at]},
    }  # fmt: skip


_NEAR = 1.25
"""Multiple of the largest memory up to which the limit is drawn; a farther one would squeeze the
points together."""
_SYMBOLS = ("circle-open", "square-open", "diamond-open", "triangle-up-open", "cross-open")


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
    front: list[Option] = []
    for one in sorted(options, key=lambda option: (option.memory_bytes, option.step_seconds)):
        if not front or one.step_seconds < front[-1].step_seconds:
            front.append(one)
    return tuple(front)


def pareto_figure(options: Sequence[Option], *, limit_bytes: int | None) -> Figure:
    """Return all options by memory and step time, with Pareto front, chosen one and limit."""
    scales = _Scales.of(options, limit_bytes)
    front = pareto_front(options)
    most = max(one.memory_bytes for one in options)
    is_near = limit_bytes is not None and limit_bytes <= _NEAR * most
    limit = upright((limit_bytes or 0) / scales.size, "limit ") if is_near else {}
    far = f" The limit is {format_bytes(limit_bytes)}." if limit_bytes and not is_near else ""
    return Figure(
        name="memory",
        title="Step time against memory",
        words=(
            "Down and to the left is better: no option is both faster and smaller than one on the "
            "line. The filled point is the plan." + far
        ),
        drawing=drawing(
            _traces(options, front, scales),
            x=axis(f"memory of one device, {scales.size_unit}"),
            y=axis(f"one step, {scales.time_unit}"),
            **limit,
        ),
        header=("option", "group", "memory_bytes", "step_seconds", "on_front", "chosen", "fits"),
        rows=tuple(
            (
                one.name, one.group, one.memory_bytes, one.step_seconds,
                _yes(is_so=one in front), _yes(is_so=one.is_chosen),
                _yes(is_so=limit_bytes is None or one.memory_bytes <= limit_bytes),
            )
            for one in options
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Scales:
    """Units of the axes, and the memory limit."""

    seconds: float
    time_unit: str
    size: float
    size_unit: str
    limit_bytes: int | None

    @classmethod
    def of(cls, options: Sequence[Option], limit_bytes: int | None) -> "_Scales":
        times = seconds_scale(min(one.step_seconds for one in options))
        sizes = bytes_scale(max(one.memory_bytes for one in options))
        return cls(*times, *sizes, limit_bytes)

    def trace(self, some: Sequence[Option], **changes: object) -> dict[str, object]:
        """Return options as points."""
        return {
            "type": "scatter", "x": [one.memory_bytes / self.size for one in some],
            "y": [one.step_seconds / self.seconds for one in some],
            "hovertext": [_hover(one, self.limit_bytes) for one in some], **changes,
        }  # fmt: skip


def _traces(
    options: Sequence[Option], front: Sequence[Option], scales: _Scales
) -> list[dict[str, object]]:
    """Return the front, the options of each group, and the chosen one on top."""
    groups = list(dict.fromkeys(one.group for one in options))
    return [
        scales.trace(
            front, name="Pareto front", mode="lines",
            line={"color": "@accent/0.6", "width": 1.5, "shape": "hv"},
        ),
        *(
            scales.trace(
                [one for one in options if one.group == group], name=group, mode="markers",
                marker={"symbol": _SYMBOLS[at % len(_SYMBOLS)], "color": "@second", "size": 8},
            )
            for at, group in enumerate(groups)
        ),
        scales.trace(
            [one for one in options if one.is_chosen], name="chosen", mode="markers",
            marker={"color": "@accent", "size": 12, "line": {"color": "@surface", "width": 2}},
        ),
    ]  # fmt: skip


def _hover(one: Option, limit_bytes: int | None) -> str:
    over = limit_bytes is not None and one.memory_bytes > limit_bytes
    return (
        f"{one.name}\n{format_seconds(one.step_seconds)}, {format_bytes(one.memory_bytes)}"
        f"{', does not fit' if over else ''}"
    )


def _yes(*, is_so: bool) -> str:
    return "yes" if is_so else "no"


PHASES = ("forward", "backward", "around")


def phases_figure(plans: Mapping[str, Plan]) -> Figure:
    """Return the predicted passes of each plan's layer as stacked bars.

    Args:
        plans: by the name next to the bar.
    """
    return stacked_figure(
        {
            name: dict(
                zip(
                    PHASES,
                    (
                        plan.predicted.forward_seconds,
                        plan.predicted.backward_seconds,
                        plan.predicted.overhead_seconds,
                    ),
                    strict=True,
                )
            )
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
    scale, unit = seconds_scale(max(sum(each.values()) for each in parts.values()))
    return Figure(
        name="phases",
        title=title,
        words=words,
        drawing=drawing(
            _stacked(parts, scale),
            x=axis(unit, rangemode="tozero"),
            y=axis("", autorange="reversed", showgrid=False),
            barmode="stack",
            bargap=0.4,
        ),
        header=("plan", "phase", "seconds"),
        rows=tuple(
            (name, phase, seconds)
            for name, each in parts.items()
            for phase, seconds in each.items()
        ),
    )  # fmt: skip


def _stacked(parts: Mapping[str, Mapping[str, float]], scale: float) -> list[dict[str, object]]:
    """Return a trace of bars for each phase that takes time."""
    phases = list(dict.fromkeys(phase for each in parts.values() for phase in each))
    return [
        {
            "type": "bar", "name": phase, "y": list(parts),
            "x": [each.get(phase, 0.0) / scale for each in parts.values()],
            "marker": {"color": color, "line": {"color": "@surface", "width": 1}},
            "hovertext": [
                f"{phase}: {format_seconds(each.get(phase, 0.0))}" for each in parts.values()
            ],
        }
        for phase, color in zip(phases, SERIES, strict=False)
        if any(each.get(phase) for each in parts.values())
    ]  # fmt: skip
