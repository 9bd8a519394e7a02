"""Pareto front of a job's layouts: for every memory of a device the fastest step that it allows.

Layouts are looked at by their memory, least first, and priced only where their bounds are below
the fastest step so far: each that is faster is on the front. Steps that save less than `NOISE` of
the one before are omitted.
"""

from collections.abc import Iterator
from dataclasses import replace

from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.solve.training.search import FoldedSearch
from moetune.solve.training.ties import NOISE, PricedLayout


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
    """Yield every layout with all that it may have; nothing is put into host memory."""
    space, fitting = search.space, search.fitting
    for sizes in space.sizes(pins):
        for overlapped in space.overlapped(sizes, pins):
            for one in space.pipelines(overlapped, pins):
                for recompute in space.recomputes(pins):
                    able = search.exchanged(replace(one, recompute=recompute), pins)
                    for cut in fitting.cuts(able[0], pins) if able else ():
                        for sharded in fitting.sharded(cut, pins):
                            yield from (replace(sharded, dispatcher=to.dispatcher) for to in able)
