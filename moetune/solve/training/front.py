"""Pareto front of a job's layouts: for every memory of a device the fastest step that it allows.

Layouts are looked at by their memory, least first, and priced only where their bounds are below
the fastest step so far: each that is faster is on the front. Steps that save less than `NOISE` of
the one before are omitted.
"""

from collections.abc import Iterator
from dataclasses import replace

from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.solve.training.search import NOISE, FoldedSearch, PricedLayout


def memory_front(search: FoldedSearch, pins: LayoutRequest) -> tuple[PricedLayout, ...]:
    """Return the layouts of which none is both as fast and as small as another one.

    In order of memory; no limit of memory holds, and nothing is kept in host memory unless it is
    pinned.

    Raises:
        InputError: the pins break a rule, or no layout obeys the rules.
    """
    prices, peak = search.prices, search.memory.peak
    sized = [(peak(one).peak_bytes, prices.floor(one), one) for one in _candidates(search, pins)]
    if not sized:
        raise search.space.impossible(pins)
    sized.sort(key=lambda one: one[:2])
    front: dict[float, PricedLayout] = {}
    worth = float("inf")
    for peak_bytes, floor, layout in sized:
        if floor <= worth and prices.least(layout) <= worth:
            priced = search.priced(layout)
            if priced.step.seconds <= worth:
                front[peak_bytes] = search.told(priced)  # in place of a slower one of that memory
                worth = priced.step.seconds * (1 - NOISE)
    return tuple(front.values())


def _candidates(search: FoldedSearch, pins: LayoutRequest) -> Iterator[FoldedLayout]:
    """Yield every layout with each overlap, recomputation and cut, and its fastest dispatcher."""
    space, prices = search.space, search.prices
    for sizes in search.unsized(pins):
        for recompute in space.recomputes(pins):
            layout = _allowed(search, replace(sizes, recompute=recompute), pins)
            if layout is None:
                continue
            yield layout
            if layout.pp > 1 and pins.stages is None:
                balanced = prices.balanced(layout)
                if balanced != layout and space.is_allowed(balanced):
                    yield balanced


def _allowed(
    search: FoldedSearch, layout: FoldedLayout, pins: LayoutRequest
) -> FoldedLayout | None:
    """Return the layout with the fastest of the dispatchers that it may have."""
    if search.space.is_allowed(layout):
        return layout
    able = [replace(layout, dispatcher=one) for one in search.space.dispatchers(layout, pins)]
    able = [one for one in able if search.space.is_allowed(one)]
    return min(able, key=search.prices.floor, default=None)
