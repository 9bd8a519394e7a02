"""The number of chunks for every number of tokens."""

from collections.abc import Mapping

from moetune.domain.plan import Plan, Range
from moetune.report.picture import Picture
from moetune.report.theme import SERIES, axis, figure, log_sizes, upright


def degree_picture(plans: Mapping[str, Plan]) -> Picture:
    """Return the ranges of one plan or several, by the name each is shown under.

    One size is marked where there is one plan: its own.
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
    mark = {} if several else upright(plan.workload.tokens_per_rank, "this plan ", is_log=True)
    return Picture(
        name="degrees",
        title="Chunks by batch",
        words=(
            "How many chunks the tokens of a step are cut into, for every number of tokens on a "
            "rank. A layer that runs with this plan looks its batch up here."
        ),
        figure=figure(
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
        "hovertemplate": "from %{x:,} tokens: %{y} chunks<extra>" + f"{name}{phase}</extra>",
    }  # fmt: skip
