"""Step time against memory: what every choice costs, and which of them is worth having."""

from collections.abc import Sequence
from dataclasses import dataclass

from moetune.domain.units import format_bytes, format_seconds
from moetune.report.picture import Picture
from moetune.report.theme import axis, bytes_scale, figure, seconds_scale, upright

_NEAR = 1.25
"""Times the largest memory up to which the limit is drawn, and does not squeeze the rest."""
_SYMBOLS = ("circle-open", "square-open", "diamond-open", "triangle-up-open", "cross-open")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run the step.

    Args:
        group: options that belong together, such as a strategy.
        memory_bytes: on the device that needs the most.
    """

    name: str
    group: str
    step_seconds: float
    memory_bytes: int
    is_chosen: bool = False


def pareto_front(options: Sequence[Option]) -> tuple[Option, ...]:
    """Return the options that no other beats in both, the least memory first.

    Of equals the first one is taken.
    """
    front: list[Option] = []
    for one in sorted(options, key=lambda option: (option.memory_bytes, option.step_seconds)):
        if not front or one.step_seconds < front[-1].step_seconds:
            front.append(one)
    return tuple(front)


def pareto_picture(options: Sequence[Option], *, limit_bytes: int | None) -> Picture:
    """Return every option by memory and time, the front, the choice and the limit."""
    scales = _Scales.of(options, limit_bytes)
    front = pareto_front(options)
    most = max(one.memory_bytes for one in options)
    is_near = limit_bytes is not None and limit_bytes <= _NEAR * most
    limit = upright((limit_bytes or 0) / scales.size, "limit ") if is_near else {}
    far = f" The limit, {format_bytes(limit_bytes)}, is far." if limit_bytes and not is_near else ""
    return Picture(
        name="memory",
        title="Step time against memory",
        words=(
            "Down and to the left is better. What lies on the line is beaten by nothing that is "
            "both faster and smaller; the filled point is the plan." + far
        ),
        figure=figure(
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
    """What the axes count in."""

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
            "text": [_hover(one, self.limit_bytes) for one in some],
            "hovertemplate": "%{text}<extra></extra>", **changes,
        }  # fmt: skip


def _traces(
    options: Sequence[Option], front: Sequence[Option], scales: _Scales
) -> list[dict[str, object]]:
    """Return the front, each group, and the choice on top."""
    groups = list(dict.fromkeys(one.group for one in options))
    return [
        scales.trace(
            front, name="Pareto front", mode="lines", hoverinfo="skip", hovertemplate=None,
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
        f"{one.name}<br>{format_seconds(one.step_seconds)}, {format_bytes(one.memory_bytes)}"
        f"{', does not fit' if over else ''}"
    )


def _yes(*, is_so: bool) -> str:
    return "yes" if is_so else "no"
