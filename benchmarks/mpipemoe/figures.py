"""The paper's figures, drawn from this project's measurements."""

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from benchmarks.mpipemoe.lab import StrategyCell
from benchmarks.mpipemoe.memory import Row
from moetune.domain.constraints import STRATEGIES
from moetune.domain.interference import Interference

MIB = 2**20
_SIZE = {"width": 900, "height": 480, "scale": 1.5}
_COLOURS = dict(
    zip(STRATEGIES, ("#4c566a", "#5e81ac", "#88c0d0", "#d08770", "#a3be8c"), strict=True)
)


def write_figure(figure: go.Figure, path: Path) -> Path:
    """Write a PNG, or where no browser can draw it an HTML page; return its path."""
    figure.update_layout(template="plotly_white", margin={"t": 60, "r": 20})
    try:
        figure.write_image(path.with_suffix(".png"), **_SIZE)
    except (RuntimeError, ValueError):
        figure.write_html(path.with_suffix(".html"), include_plotlyjs=True)
        return path.with_suffix(".html")
    return path.with_suffix(".png")


def breakdown(rows: Sequence[tuple[str, int, int, int, int]]) -> go.Figure:
    """Return Fig. 2: states, activations and buffers by model and tokens, in bytes."""
    labels = [f"{model}<br>{tokens // 1024}k" for model, tokens, *_ in rows]
    figure = go.Figure()
    for name, parts in (
        ("states", [row[2] for row in rows]),
        ("activations", [row[3] for row in rows]),
        ("buffers", [row[4] for row in rows]),
    ):
        figure.add_bar(name=name, x=labels, y=[part / MIB for part in parts])
    return figure.update_layout(
        title="Fig. 2 · memory of one layer on one rank (formula)", barmode="stack",
        yaxis_title="MiB",
    )  # fmt: skip


def interference(tables: Sequence[tuple[str, Interference]]) -> go.Figure:
    """Return Fig. 3: speed of each class beside the others, by link."""
    figure = go.Figure()
    for name, table in tables:
        speeds = interference_speeds(table)
        figure.add_bar(name=name, x=list(speeds), y=list(speeds.values()))
    return figure.update_layout(
        title="Fig. 3 · speed beside others, 1 = undisturbed (measured)", barmode="group",
        yaxis_range=[0, 1.05],
    )  # fmt: skip


def interference_speeds(table: Interference) -> dict[str, float]:
    """Return the nine speeds by name."""
    return {
        "comp | comm": table.comp.comm, "comp | mem": table.comp.mem, "comp | all": table.comp.all,
        "comm | comp": table.comm.comp, "comm | mem": table.comm.mem, "comm | all": table.comm.all,
        "mem | comp": table.mem.comp, "mem | comm": table.mem.comm, "mem | all": table.mem.all,
    }  # fmt: skip


def speed_ups(cells: Sequence[StrategyCell]) -> go.Figure:
    """Return Fig. 8: how many times as fast as DeepSpeed each degree and the plan are."""
    labels = [_label(cell) for cell in cells]
    figure = go.Figure()
    for degree in sorted({one.degree for one in cells[0].steps}):
        times = [cell.of("none", degree).seconds for cell in cells]
        figure.add_bar(
            name=f"n = {degree}", x=labels,
            y=[cell.peer_seconds / one for cell, one in zip(cells, times, strict=True)],
        )  # fmt: skip
    figure.add_bar(
        name="plan", x=labels, y=[cell.peer_seconds / cell.free.seconds for cell in cells]
    )
    return figure.update_layout(
        title="Fig. 8 · times as fast as DeepSpeed's expert parallelism (network lab)",
        barmode="group",
    )


def memory_and_time(cell: StrategyCell) -> go.Figure:
    """Return Figs. 9 and 11: measured peak against measured step, down and left is better."""
    figure = go.Figure()
    for strategy in STRATEGIES:
        steps = [one for one in cell.steps if one.strategy == strategy]
        figure.add_scatter(
            name=strategy, x=[one.peak_bytes / MIB for one in steps],
            y=[one.seconds * 1e3 for one in steps], text=[f"n={one.degree}" for one in steps],
            mode="lines+markers+text", textposition="top center",
            line={"color": _COLOURS[strategy]},
        )  # fmt: skip
    if cell.peer_seconds:
        figure.add_scatter(
            name="DeepSpeed", x=[cell.peer_bytes / MIB], y=[cell.peer_seconds * 1e3],
            mode="markers", marker={"symbol": "x", "size": 12, "color": "#bf616a"},
        )  # fmt: skip
    return figure.update_layout(
        title=f"Figs. 9 and 11 · memory against time, {_label(cell, ' · ')} (network lab)",
        xaxis_title="peak of live tensors with Adam's states, MiB", yaxis_title="step, ms",
    )  # fmt: skip


def achieved(rows: Sequence[Row]) -> go.Figure:
    """Return Fig. 10: saving over that of Eq. 6, one point a model, batch, degree and strategy."""
    figure = go.Figure()
    for strategy in STRATEGIES[1:]:
        mine = [row for row in rows if row.strategy == strategy]
        figure.add_scatter(
            name=strategy, mode="markers", x=[f"{r.model}<br>n={r.degree}" for r in mine],
            y=[100 * row.share_of_bound for row in mine], marker={"color": _COLOURS[strategy]},
        )  # fmt: skip
    figure.add_hline(y=98, line_dash="dot", annotation_text="98 %")
    return figure.update_layout(
        title="Fig. 10 · saving achieved, per cent of Eq. 6 (4k to 32k tokens)", yaxis_title="%"
    )


def degree_by_batch(cells: Sequence[StrategyCell]) -> go.Figure:
    """Return Fig. 12: step over the fastest degree's, by tokens; the plan dashed."""
    figure = go.Figure()
    tokens = [cell.tokens for cell in cells]
    best = [min(one.seconds for one in cell.steps if one.strategy == "none") for cell in cells]
    for degree in sorted({one.degree for one in cells[0].steps}):
        times = [cell.of("none", degree).seconds for cell in cells]
        figure.add_scatter(
            name=f"n = {degree}", x=tokens,
            y=[one / least for one, least in zip(times, best, strict=True)],
        )  # fmt: skip
    figure.add_scatter(
        name="plan", x=tokens, line={"dash": "dash", "color": "black"},
        y=[cell.free.seconds / least for cell, least in zip(cells, best, strict=True)],
    )  # fmt: skip
    return figure.update_layout(
        title=f"Fig. 12 · step over the best degree's, {_link(cells[0])} (network lab)",
        xaxis={"type": "log", "title": "tokens a rank", "tickvals": tokens},
    )


def strategies(cells: Sequence[StrategyCell]) -> go.Figure:
    """Return Fig. 13: each strategy's fastest feasible step over none's, and the one chosen."""
    labels = [f"{_link(cell)}<br>{cell.tokens}" for cell in cells]
    least = [min(one.seconds for one in cell.steps if one.strategy == "none") for cell in cells]
    figure = go.Figure()
    for strategy in STRATEGIES[1:]:
        times = [
            min(one.seconds for one in cell.feasible if one.strategy == strategy) for cell in cells
        ]
        figure.add_bar(
            name=strategy, x=labels, marker={"color": _COLOURS[strategy]},
            y=[one / free for one, free in zip(times, least, strict=True)],
        )  # fmt: skip
    figure.add_scatter(
        name="planned", x=labels, mode="markers", marker={"symbol": "diamond", "color": "black"},
        y=[cell.limited.seconds / free for cell, free in zip(cells, least, strict=True)],
    )  # fmt: skip
    return figure.update_layout(
        title="Fig. 13 · step with reused memory over the fastest without (network lab)",
        barmode="group",
    )


def _label(cell: StrategyCell, between: str = "<br>") -> str:
    return f"{cell.model}{between}{cell.tokens}{between}{_link(cell)}"


def _link(cell: StrategyCell) -> str:
    return "loopback" if cell.rate_mbit is None else f"{cell.rate_mbit:g} Mbit/s"
