"""How operations that run side by side slow each other down, as a matrix."""

from collections.abc import Sequence

from moetune.domain.costs import Interference
from moetune.domain.samples import ResourceClass
from moetune.report.picture import Picture
from moetune.report.theme import axis, figure, note

CLASSES: dict[ResourceClass, str] = {
    "comp": "computation",
    "comm": "communication",
    "mem": "copies",
}
_BESIDE = (*CLASSES.values(), "both others")
_STRONGEST = 0.55
"""How opaque a cell is whose operation stands still: text on it stays readable."""
_Cell = tuple[int, int, float]
"""(row, column, speed)."""


def interference_picture(table: Interference) -> Picture:
    """Return the speed of each class beside the others; 1 is undisturbed (MPipeMoE Fig. 3)."""
    cells = [
        (row, column, speed)
        for row, victim in enumerate(CLASSES)
        for column, speed in enumerate(_speeds(table, victim))
        if speed is not None
    ]
    names = list(CLASSES.values())
    return Picture(
        name="interference",
        title="Interference",
        words=(
            "Speed of the row's operation while the column's runs beside it; 1.00 is undisturbed, "
            "and the stronger the colour, the slower."
        ),
        figure=figure(
            [_numbers(cells, names)],
            x=axis(
                "", side="top", tickvals=list(range(4)), ticktext=list(_BESIDE), showgrid=False,
                range=[-0.5, 3.5], showline=False, fixedrange=True, tickangle=0,
            ),
            y=axis(
                "", tickvals=list(range(3)), ticktext=names, showgrid=False, range=[2.5, -0.5],
                showline=False, fixedrange=True,
            ),
            shapes=[_cell(row, column, speed) for row, column, speed in cells],
            annotations=[
                note("–", x=row, y=row, font={"color": "@muted", "size": 15}) for row in range(3)
            ],
            margin={"l": 8, "r": 8, "t": 24, "b": 8},
        ),
        header=("operation", "beside", "speed"),
        rows=tuple((names[row], _BESIDE[column], speed) for row, column, speed in cells),
    )  # fmt: skip


def _speeds(table: Interference, victim: ResourceClass) -> tuple[float | None, ...]:
    """Return the victim's speed beside each class and beside both others; None beside itself."""
    alone = (
        None if other == victim else table.speed(victim, frozenset({other})) for other in CLASSES
    )
    return (*alone, table.speed(victim, frozenset(CLASSES)))


def _numbers(cells: Sequence[_Cell], names: Sequence[str]) -> dict[str, object]:
    return {
        "type": "scatter", "mode": "text", "showlegend": False, "hoverinfo": "text",
        "x": [column for _, column, _ in cells], "y": [row for row, _, _ in cells],
        "text": [f"{speed:.2f}" for _, _, speed in cells],
        "hovertext": [
            f"{names[row]} beside {_BESIDE[column]}: {speed:.1%} of its speed"
            for row, column, speed in cells
        ],
        "textfont": {"size": 15, "color": "@ink"},
    }  # fmt: skip


def _cell(row: int, column: int, speed: float) -> dict[str, object]:
    return {
        "type": "rect", "layer": "below",
        "x0": column - 0.47, "x1": column + 0.47, "y0": row - 0.45, "y1": row + 0.45,
        "fillcolor": f"@accent/{0.04 + (1 - speed) * _STRONGEST:.3f}", "line": {"width": 0},
    }  # fmt: skip
