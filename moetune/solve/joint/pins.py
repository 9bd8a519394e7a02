"""Pins that contradict each other or the job: all that do, and the nearest pins that agree.

Of a set of pins that no layout obeys, pins are dropped one by one as long as none does: what is
left contradicts as a whole, and no pin of it alone is to blame. Such sets are taken out until what
remains agrees. The nearest pins change as few as possible: of these the layout whose sizes have the
least product of ratios to what was asked.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from moetune.domain.errors import InputError, RefusedLayoutError
from moetune.domain.layout import BrokenRule
from moetune.domain.pipeline import stage_words
from moetune.domain.target_rules import target_rules
from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.domain.training_rules import broken_rules
from moetune.solve.joint.space import LayoutSpace

_NAMES = tuple(one.name for one in fields(LayoutRequest))
_SIZES = ("cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch")
_SHARES = ("offload_activations", "offload_optimizer")
_TRIED_SIZES = 64
"""Sizes in which pins that contradict are tried for the rule that they break in any."""


class NearPins(NamedTuple):
    """Pins that some layout obeys, that layout, and how far they are from those asked for."""

    distance: float
    pins: LayoutRequest
    layout: FoldedLayout


def contradiction(space: LayoutSpace, pins: LayoutRequest) -> InputError | RefusedLayoutError:
    """Return why no layout obeys the pins, with the nearest that some layout obeys.

    It is a `RefusedLayoutError` where the rules of the job allow them and the runtime does not.
    """
    error = _contradiction(space, pins)
    if space.asks_runtime and _is_possible(replace(space, asks_runtime=False), pins):
        return RefusedLayoutError(error.what, error.hint)
    return error


def _contradiction(space: LayoutSpace, pins: LayoutRequest) -> InputError:
    groups = [*conflicts(space, pins)]
    near = nearest(space, pins, groups) if groups else None
    if near is None:  # even without pins there is none, or none was found
        none = BrokenRule("no layout obeys the rules", "pin less of it")
        broken = next(_all_broken(space, _plainest(space, pins)), none)
        return InputError(broken.what, broken.hint)
    problems = (_problem(space, pins, group, near.pins) for group in groups)
    return InputError("; ".join(problems), _advice(pins, near.pins))


def pin_words(pins: LayoutRequest) -> str:
    """Return pins as flags, such as "--tp 8 --recompute moe_act,norm"."""
    return " ".join(pin_flag(pins, name) for name in pinned(pins))


def conflicts(space: LayoutSpace, pins: LayoutRequest) -> Iterator[tuple[str, ...]]:
    """Yield disjoint sets of pins that contradict, none with a pin that could be left out.

    Nothing where even without pins no layout obeys the rules.
    """
    left = pins
    if not _is_possible(space, LayoutRequest()):
        return
    while not _is_possible(space, left):
        group = left
        for name in pinned(left):
            fewer = without(group, [name])
            if not _is_possible(space, fewer):
                group = fewer
        yield pinned(group)
        left = without(left, pinned(group))


def _problem(
    space: LayoutSpace, pins: LayoutRequest, group: Sequence[str], near: LayoutRequest
) -> str:
    """Return the rule that the pins of a group break where they break fewest.

    That is in the plainest layout that has them, in one that obeys all of them but one, or in one
    of the first sizes that obey the rest.
    """
    values: dict[str, Any] = {name: getattr(pins, name) for name in group}
    layouts = [_plainest(space, replace(LayoutRequest(), **values))]
    for name in group:
        obeying = _nearest_of(space, replace(near, **values), [name])
        if obeying is not None:
            layouts.append(_with_pins(space, obeying.layout, values))
    sizes = itertools.islice(space.sizes(without(near, group)), _TRIED_SIZES)
    layouts += [_with_pins(space, one, values) for one in sizes]
    every = [broken for one in layouts if (broken := [*_all_broken(space, one)])]
    what = min(every, key=len)[0].what if every else "no layout has them all"
    if len(pinned(pins)) == 1:
        return what
    flags = [pin_flag(pins, name) for name in group]
    words = f"{', '.join(flags[:-1])} and {flags[-1]}" if len(flags) > 1 else flags[0]
    return f"{words}: {what}"


def _with_pins(space: LayoutSpace, layout: FoldedLayout, values: Mapping[str, Any]) -> FoldedLayout:
    """Return a layout with other values, and as many replicas as the ranks leave room for."""
    found = replace(layout, **values)
    return replace(found, dp=max(1, space.job.world_size // (found.cp * found.tp * found.pp)))


def nearest(space: LayoutSpace, pins: LayoutRequest, groups: Sequence[Sequence[str]]) -> NearPins:
    """Return the pins that some layout obeys of which fewest are others, and these near.

    Args:
        groups: all of `conflicts`, so that there is such a layout once all of their pins change.
    """
    names = [name for name in pinned(pins) if any(name in group for group in groups)]

    def found(num: int) -> list[NearPins]:
        every = (
            _nearest_of(space, pins, changed)
            for changed in itertools.combinations(names, num)
            if all(any(name in changed for name in group) for group in groups)
        )
        return [one for one in every if one is not None]

    fewest = next(filter(None, map(found, range(len(groups), len(names) + 1))))
    return min(fewest, key=lambda one: one.distance)


def _nearest_of(space: LayoutSpace, pins: LayoutRequest, changed: Sequence[str]) -> NearPins | None:
    """Return the nearest pins with other values of the changed ones."""
    free, best = without(pins, changed), None
    sizes = [name for name in changed if name in _SIZES and name != "vpp"]
    words = [name for name in changed if name not in _SIZES]
    by_size = ((_distance(pins, one, sizes), one) for one in space.sizes(free))
    for least, sized in sorted(by_size, key=lambda one: one[0]):
        if best is not None and least + len(words) >= best.distance:
            break  # every changed word is another one
        for one in _whole(space, free, sized, changed, pins.recompute or ()):
            far = _distance(pins, one, changed)
            if best is None or far < best.distance:
                values = {name: getattr(one, name) for name in changed}
                best = NearPins(far, replace(pins, **values), one)
    return best


def _is_possible(space: LayoutSpace, pins: LayoutRequest) -> bool:
    """Return whether some layout obeys the pins."""
    every = (one for sizes in space.sizes(pins) for one in _whole(space, pins, sizes))
    return next(every, None) is not None


def _whole(
    space: LayoutSpace,
    pins: LayoutRequest,
    sizes: FoldedLayout,
    changed: Sequence[str] = (),
    modules: Sequence[str] = (),
) -> Iterator[FoldedLayout]:
    """Yield the layouts of sizes that are allowed.

    What is not pinned is the plainest, which goes with most, but for what is to be changed: lists
    of modules to recompute come in the order of how many they do not share with `modules`.
    """
    overlaps = space.target.overlaps if "overlap" in changed else (pins.overlap or "none",)
    recomputes = space.recomputes(pins)[: None if "recompute" in changed else 1]
    recomputes = sorted(recomputes, key=lambda one: len({*one} ^ {*modules}))
    for overlap, recompute in itertools.product(overlaps, recomputes):
        plain = replace(sizes, overlap=overlap, recompute=recompute)
        for dispatcher in space.dispatchers(plain, pins)[:1]:
            able = replace(plain, dispatcher=dispatcher)
            yield from filter(space.is_allowed, space.pipelines(able, pins))


def _distance(pins: LayoutRequest, layout: FoldedLayout, changed: Sequence[str]) -> float:
    """Return how far a layout is from pins: logarithms of sizes' ratios, and 1 for each word."""
    far = 0.0
    for name in changed:
        asked, given = getattr(pins, name), getattr(layout, name)
        if name in _SIZES:
            far += abs(math.log2(given / asked))
        else:
            far += asked != given
    return far


def _advice(pins: LayoutRequest, near: LayoutRequest) -> str:
    """Return the nearest pins as flags, and which are to be left out."""
    gone = [
        name
        for name in pinned(pins)
        if getattr(near, name) is None or (name in _SHARES and not getattr(near, name))
    ]
    kept, others = pin_words(without(near, gone)), " and ".join(pin_flag(pins, one) for one in gone)
    if not kept:
        return f"omit {others}"
    return f"nearest that agree: {kept}" + (f", without {others}" if others else "")


def _plainest(space: LayoutSpace, pins: LayoutRequest) -> FoldedLayout:
    """Return the layout that has the pins, and 1 of all else, whether it breaks rules or not."""
    sizes: dict[str, Any] = {name: getattr(pins, name) or 1 for name in _SIZES}
    if pins.stages is not None:
        sizes["pp"] = pins.pp or max(1, len(pins.stages) // sizes["vpp"])
        sizes["vpp"] = pins.vpp or max(1, len(pins.stages) // sizes["pp"])
    sharers = sizes["cp"] * sizes["tp"] * sizes["pp"]
    return FoldedLayout(
        dp=max(1, space.job.world_size // sharers), recompute=pins.recompute or (),
        dispatcher=pins.dispatcher or space.first_dispatcher(pins),
        overlap=pins.overlap or "none", zero=space.zeros(pins, sizes["pp"], sizes["tp"])[0],
        cuda_graphs=pins.cuda_graphs or "none",
        schedule=pins.schedule, stages=pins.stages,
        offload_activations=pins.offload_activations or 0.0,
        offload_optimizer=pins.offload_optimizer or 0.0,
        dispatcher_sms=pins.dispatcher_sms, **sizes,
    )  # fmt: skip


def _all_broken(space: LayoutSpace, layout: FoldedLayout) -> Iterator[BrokenRule]:
    yield from broken_rules(layout, space.job)
    yield from target_rules(layout, space.target, space.job, space.site)


def pinned(pins: LayoutRequest) -> tuple[str, ...]:
    """Return the names of the fields that are pinned."""
    return tuple(name for name in _NAMES if getattr(pins, name) is not None)


def without(pins: LayoutRequest, names: Sequence[str]) -> LayoutRequest:
    """Return the pins without some of them."""
    nothing: dict[str, Any] = dict.fromkeys(names)
    return replace(pins, **nothing)


def pin_flag(pins: LayoutRequest, name: str) -> str:
    """Return a pin as a flag, such as "--tp 8"."""
    value = getattr(pins, name)
    if name == "stages":
        value = repr(stage_words(value))
    elif name == "recompute":
        value = ",".join(value) or "none"
    elif name in _SHARES:
        value = f"{value:g}"
    return f"--{name.replace('_', '-')} {value}"
