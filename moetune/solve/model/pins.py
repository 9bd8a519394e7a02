"""Pins that no layout obeys: the rules that they break, and the nearest pins that can be obeyed."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from moetune.domain.errors import InputError, RefusedLayoutError
from moetune.domain.layout import BrokenRule
from moetune.domain.rules import broken_rules
from moetune.domain.target_rules import target_rules
from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.solve.model.space import LayoutSpace

_SIZES = ("cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch")
_SHARES = ("offload_activations", "offload_optimizer")
_TRIED_SIZES = 64
"""Number of sizes in which contradictory pins are tried, to name a rule that they break."""


class NearPins(NamedTuple):
    """Pins that some layout obeys, that layout, and their distance from the requested pins."""

    distance: float
    pins: LayoutRequest
    layout: FoldedLayout


def contradiction(space: LayoutSpace, pins: LayoutRequest) -> InputError | RefusedLayoutError:
    """Return the error that says why no layout obeys the pins, with the nearest possible pins.

    It is a `RefusedLayoutError` if the rules of the job allow the pins and the runtime does not.
    Its field is the first pin to change.
    """
    near = nearest(space, pins)
    broken = _fewest_broken(space, pins, near)
    what = "; ".join(dict.fromkeys(rule.what for rule in broken)) or "no layout has all pins"
    if near is None:
        changed, hint = "", broken[0].hint if broken else "pin less of it"
    else:
        changed = next(
            name for name in pins.pinned if getattr(pins, name) != getattr(near.pins, name)
        )
        hint = _advice(pins, near.pins)
    if space.asks_runtime and _nearest_of(replace(space, asks_runtime=False), pins, ()):
        return RefusedLayoutError(what, hint, field=changed)
    return InputError(what, hint, field=changed)


def _fewest_broken(
    space: LayoutSpace, pins: LayoutRequest, near: NearPins | None
) -> Sequence[BrokenRule]:
    """Return the rules that the pins break, for the tried sizes with the fewest broken rules."""
    if near is None:
        return [*_all_broken(space, _plainest(space))]
    changed = [name for name in pins.pinned if getattr(pins, name) != getattr(near.pins, name)]
    sizes = itertools.islice(space.sizes(pins.without(changed)), _TRIED_SIZES)
    layouts = (_with_pins(space, layout, pins) for layout in (near.layout, *sizes))
    lists = [broken for layout in layouts if (broken := [*_all_broken(space, layout)])]
    return min(lists, key=len, default=[])


def _with_pins(space: LayoutSpace, layout: FoldedLayout, pins: LayoutRequest) -> FoldedLayout:
    """Return the layout with the pins, and as many replicas as the ranks allow."""
    values = pins.pinned
    if pins.stages is not None and pins.pp is None:
        values["pp"] = max(1, len(pins.stages) // (pins.vpp or 1))
    pinned = replace(layout, **values)
    return replace(pinned, dp=max(1, space.job.world_size // (pinned.cp * pinned.tp * pinned.pp)))


def nearest(space: LayoutSpace, pins: LayoutRequest) -> NearPins | None:
    """Return the pins with fewest and nearest changes that a layout obeys; None without any."""
    names = tuple(pins.pinned)
    for num in range(1, len(names) + 1):
        tried = (_nearest_of(space, pins, some) for some in itertools.combinations(names, num))
        if near := [candidate for candidate in tried if candidate is not None]:
            return min(near, key=lambda candidate: candidate.distance)
    return None


def _nearest_of(space: LayoutSpace, pins: LayoutRequest, changed: Sequence[str]) -> NearPins | None:
    """Return the nearest pins if only the fields in `changed` may differ."""
    free, best = pins.without(changed), None
    sizes = [name for name in changed if name in _SIZES and name != "vpp"]
    words = [name for name in changed if name not in _SIZES]
    by_size = ((_distance(pins, layout, sizes), layout) for layout in space.sizes(free))
    for least, sized in sorted(by_size, key=lambda pair: pair[0]):
        if best is not None and least + len(words) >= best.distance:
            break  # every changed word adds 1 to the distance
        for layout in _whole(space, free, sized, changed, pins.recompute or ()):
            far = _distance(pins, layout, changed)
            if best is None or far < best.distance:
                values = {name: getattr(layout, name) for name in changed}
                best = NearPins(far, replace(pins, **values), layout)
    return best


def _whole(
    space: LayoutSpace,
    pins: LayoutRequest,
    sizes: FoldedLayout,
    changed: Sequence[str],
    modules: Sequence[str],
) -> Iterator[FoldedLayout]:
    """Yield allowed layouts of the sizes, plain where free, recomputed most like `modules`.

    Where modules are asked for, others come before none: they save memory, too.
    """
    overlaps = space.target.overlaps if "overlap" in changed else (pins.overlap or "none",)
    recomputes = space.recomputes(pins)[: None if "recompute" in changed else 1]
    recomputes = sorted(recomputes, key=lambda again: (
        bool(modules) > bool(again), ("full" in again) > ("full" in modules),
        len({*again} ^ {*modules}),
    ))  # fmt: skip
    for overlap, recompute in itertools.product(overlaps, recomputes):
        plain = replace(sizes, overlap=overlap, recompute=recompute)
        for dispatcher in space.dispatchers(plain, pins)[:1]:
            able = replace(plain, dispatcher=dispatcher)
            yield from filter(space.is_allowed, space.pipelines(able, pins))


def _distance(pins: LayoutRequest, layout: FoldedLayout, changed: Sequence[str]) -> float:
    """Return the layout's distance from the pins: |log2| of sizes' ratios, and 1 for each word."""
    values = ((name, getattr(pins, name), getattr(layout, name)) for name in changed)
    return sum(
        abs(math.log2(given / asked)) if name in _SIZES else float(asked != given)
        for name, asked, given in values
    )


def _advice(pins: LayoutRequest, near: LayoutRequest) -> str:
    """Return the nearest pins as flags, and the flags to omit."""
    gone = [
        name
        for name in pins.pinned
        if getattr(near, name) is None or (name in _SHARES and not getattr(near, name))
    ]
    pinned, omitted = near.without(gone).words, " and ".join(pins.only(name).words for name in gone)
    if not pinned:
        return f"omit {omitted}"
    return f"nearest that agree: {pinned}" + (f", without {omitted}" if omitted else "")


def _plainest(space: LayoutSpace) -> FoldedLayout:
    """Return the layout of replicas alone, regardless of rules."""
    free = LayoutRequest()
    return FoldedLayout(
        dp=space.job.world_size, zero=space.zeros(free, 1, 1)[0],
        dispatcher=space.first_dispatcher(free, 1),
    )  # fmt: skip


def _all_broken(space: LayoutSpace, layout: FoldedLayout) -> Iterator[BrokenRule]:
    yield from broken_rules(layout, space.job)
    yield from target_rules(layout, space.target, space.job, space.site)
