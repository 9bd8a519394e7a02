"""CUDA graphs that a search takes by itself: those of a runtime's own recipes that save enough."""

from collections.abc import Callable
from dataclasses import replace

from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.solve.joint.best import BestLayouts
from moetune.solve.joint.front import merged
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.joint.ties import PricedLayout
from moetune.solve.joint.uncertainty import OWN_SPREAD

Front = tuple[PricedLayout, ...]
WORTH_GRAPHS = OWN_SPREAD
"""Of a step, what graphs save at least: less is within the error of either price."""
ROOM_FOR_GRAPHS = 0.1
"""Of the memory limit, what a layout with graphs leaves free. Runs with graphs of parts took 6 to
20 % more than predicted, which has no pools of theirs (docs/results/public-runs.md)."""


def with_graphs(
    search: FoldedSearch, pins: LayoutRequest, plain: PricedLayout
) -> BestLayouts | None:
    """Return the layouts with the graphs that save most; None where none saves enough.

    Args:
        plain: the best layout without graphs.

    Raises:
        InputError: as of `BestLayouts.best`.
    """
    if pins.cuda_graphs is not None or search.site is None or not search.fits(plain.layout):
        return None
    most_bytes = search.limit_bytes * (1 - ROOM_FOR_GRAPHS)
    found, step_seconds = None, plain.step.seconds
    for graphs in search.target.tried_graphs(search.site, search.job.dtype):
        graphed, most = replace(pins, cuda_graphs=graphs), step_seconds * (1 - WORTH_GRAPHS)
        layouts = BestLayouts.of(search, graphed)
        best = layouts.best_below(most)
        if best is not None and best.memory.peak_bytes > most_bytes:
            layouts = BestLayouts(replace(search, limit_bytes=most_bytes), graphed)
            best = layouts.best_below(most)
        if best is not None:
            found, step_seconds = layouts, best.step.seconds
    return found


def with_and_without_graphs(
    pins: LayoutRequest, layout: FoldedLayout, front_of: Callable[[LayoutRequest], Front]
) -> Front:
    """Return a front of layouts with a layout's CUDA graphs and without, where pins allow both.

    Args:
        front_of: the front of pins.
    """
    front, graphed = front_of(pins), as_graphed(pins, layout)
    if pins.cuda_graphs is not None or graphed.cuda_graphs == "none":
        return front
    return merged(front, front_of(graphed))


def as_graphed(pins: LayoutRequest, layout: FoldedLayout) -> LayoutRequest:
    """Return pins with a layout's CUDA graphs, where they pin none."""
    return pins if pins.cuda_graphs else replace(pins, cuda_graphs=layout.cuda_graphs)
