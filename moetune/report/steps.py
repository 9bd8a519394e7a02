"""What a step consists of, beside another's."""

from collections.abc import Mapping

from moetune.domain.model_plan import TransformerPlan
from moetune.domain.plan import Plan
from moetune.domain.units import format_seconds
from moetune.report.picture import Picture
from moetune.report.theme import SERIES, axis, figure, seconds_scale

PHASES = ("forward", "backward", "around")


def phases_picture(plans: Mapping[str, Plan]) -> Picture:
    """Return the predicted passes of each plan's layer as stacked bars, by the plan's name."""
    parts = {
        name: (
            plan.predicted.forward_seconds,
            plan.predicted.backward_seconds,
            plan.predicted.overhead_seconds,
        )
        for name, plan in plans.items()
    }
    scale, unit = seconds_scale(max(sum(each) for each in parts.values()))
    return Picture(
        name="phases",
        title="One step of the layer",
        words=(
            "Predicted seconds of the forward and the backward pass, and of the gate and the "
            "sorting around them."
        ),
        figure=figure(
            _stacked(parts, scale),
            x=axis(unit, rangemode="tozero"),
            y=axis("", autorange="reversed", showgrid=False, fixedrange=True),
            barmode="stack",
            bargap=0.4,
            legend={
                "orientation": "h", "x": 0, "y": 1.04, "yanchor": "bottom", "traceorder": "normal",
            },
        ),
        header=("plan", "phase", "seconds"),
        rows=tuple(
            (name, phase, each[at])
            for name, each in parts.items()
            for at, phase in enumerate(PHASES)
        ),
    )  # fmt: skip


def _stacked(
    parts: Mapping[str, tuple[float, float, float]], scale: float
) -> list[dict[str, object]]:
    """Return a bar for each phase that anything takes time of."""
    return [
        {
            "type": "bar", "orientation": "h", "name": phase, "y": list(parts),
            "x": [each[at] / scale for each in parts.values()],
            "marker": {"color": SERIES[at], "line": {"color": "@surface", "width": 1}},
            "hovertext": [f"{phase}: {format_seconds(each[at])}" for each in parts.values()],
            "hoverinfo": "text",
        }
        for at, phase in enumerate(PHASES)
        if any(each[at] for each in parts.values())
    ]  # fmt: skip


def parts_picture(whole: TransformerPlan) -> Picture:
    """Return what a whole model's step consists of, the longest part first."""
    parts = sorted(whole.parts, key=lambda part: part.seconds, reverse=True)
    scale, unit = seconds_scale(max(whole.step_seconds, 1e-9))
    return Picture(
        name="parts",
        title="What the model's step consists of",
        words=f"Seconds of {format_seconds(whole.step_seconds)}, on the slowest stage.",
        figure=figure(
            [
                {
                    "type": "bar", "orientation": "h", "y": [part.name for part in parts],
                    "x": [part.seconds / scale for part in parts], "marker": {"color": SERIES[0]},
                    "text": [f"{part.share:.1%}" for part in parts], "textposition": "outside",
                    "cliponaxis": False, "hoverinfo": "text",
                    "hovertext": [
                        f"{part.name}: {format_seconds(part.seconds)}, {part.share:.1%}"
                        for part in parts
                    ],
                }
            ],
            x=axis(unit, rangemode="tozero"),
            y=axis("", autorange="reversed", showgrid=False, fixedrange=True),
        ),
        header=("part", "seconds", "share", "forward_seconds", "layer_seconds"),
        rows=tuple(
            (part.name, part.seconds, part.share, part.forward_seconds, part.layer_seconds)
            for part in parts
        ),
    )  # fmt: skip
