"""Two costs of several options against each other: points, and the line that none is below."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from moetune.report.marks import OUTLINES, Line, Mark, Outline, Points

Item = TypeVar("Item")


class Spot(NamedTuple):
    """One option at its two costs.

    Args:
        group: of options that have the same outline and stand together in the legend.
    """

    x: float
    y: float
    group: str
    hover: str
    is_chosen: bool = False


def front_of(items: Sequence[Item], place: Callable[[Item], tuple[float, float]]) -> list[Item]:
    """Return the items than which no other is smaller in both, the least of the first first.

    Of equal ones the first is taken.
    """
    front: list[Item] = []
    for item in sorted(items, key=place):
        if not front or place(item)[1] < place(front[-1])[1]:
            front.append(item)
    return front


def tradeoff_marks(spots: Sequence[Spot]) -> Iterator[Mark]:
    """Yield the front, the spots of each group, and the chosen ones on top."""

    def points(
        some: Sequence[Spot], name: str, color: str, size: float, outline: Outline | None
    ) -> Points:
        return Points(
            x=tuple(spot.x for spot in some), y=tuple(spot.y for spot in some), name=name,
            color=color, size=size, outline=outline, hover=tuple(spot.hover for spot in some),
        )  # fmt: skip

    front = front_of(spots, lambda spot: (spot.x, spot.y))
    yield Line(
        x=tuple(spot.x for spot in front), y=tuple(spot.y for spot in front),
        name="Pareto front", color="accent/0.6", width=1.5, has_steps=True,
    )  # fmt: skip
    groups = dict.fromkeys(spot.group for spot in spots)
    for group, outline in zip(groups, itertools.cycle(OUTLINES), strict=False):
        yield points([spot for spot in spots if spot.group == group], group, "second", 8, outline)
    if chosen := [spot for spot in spots if spot.is_chosen]:
        yield points(chosen, "chosen", "accent", 12, None)
