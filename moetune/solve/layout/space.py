"""Which layouts there are for a model on so many ranks, and what is wrong with those there are not.

W ranks = dp·tp·pp. Experts are exchanged among ep of the dp replicas ("all_to_all"), or
lie whole on the tp ranks of a tensor-parallel group ("tensor", PPMoE §3.3). A dense model has
nothing to exchange: its layouts are of the first kind with ep 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from moetune.domain.constraints import LayoutPins
from moetune.domain.errors import InputError
from moetune.domain.layout import AXES, Layout
from moetune.domain.model import Transformer
from moetune.solve.model.traits import OURS, Traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The sequences of one step over all ranks."""

    num_sequences: int
    length: int

    def micro_batches(self, *, dp: int, pp: int) -> tuple[int, ...]:
        """Return the sizes that divide a replica's share: powers of two, and the largest.

        1F1B takes a micro-batch for each stage at least.
        """
        share = self.num_sequences // dp
        sizes = [size for size in divisors(share) if share // size >= pp]
        return tuple(size for size in sizes if size == sizes[-1] or not size & (size - 1))


def whole_batch(*, model: Transformer, tokens_per_rank: int, world_size: int) -> Batch:
    """Return the batch of a step; its tokens do not depend on the layout.

    Raises:
        InputError: the tokens of all ranks are no whole number of sequences.
    """
    tokens, length = tokens_per_rank * world_size, model.length
    if tokens % length:
        unit = length // math.gcd(length, world_size)
        near = _beside(tokens_per_rank, unit)
        raise InputError(
            f"{tokens_per_rank} tokens on each of {world_size} ranks are no whole number of "
            f"sequences of {length}",
            f"use {near} tokens per rank, or another length with --seq",
        )
    return Batch(num_sequences=tokens // length, length=length)


def find_layouts(
    *,
    model: Transformer,
    world_size: int,
    batch: Batch,
    pins: LayoutPins,
    traits: Traits = OURS,
) -> tuple[Layout, ...]:
    """Return every layout that the model, the batch, the runtime and the pins allow.

    Raises:
        InputError: there is none; the text says what is wrong, the hint names the nearest.
    """
    possible = tuple(
        one
        for one in _possible(model, world_size, batch)
        if one.expert_parallel == "tensor"
        or one.tp == 1
        or model.is_dense
        or traits.exchanges_under_tensor
    )
    found = tuple(one for one in possible if pins.allow(one) and _is_wanted(one, pins))
    if pins.micro_batch is not None:
        found = _with_micro_batch(found, batch, pins.micro_batch)
    if found:
        return found
    raise InputError(
        _what_is_wrong(model, world_size, batch, pins), _what_works(possible, world_size, pins)
    )


def _possible(model: Transformer, world_size: int, batch: Batch) -> Iterator[Layout]:
    experts = model.moe.num_experts
    for tp in divisors(world_size):
        if model.num_heads % tp or model.moe.d_hidden % tp or model.vocab_size < tp:
            continue
        for pp in divisors(world_size // tp):
            dp = world_size // tp // pp
            if pp > model.num_layers or batch.num_sequences % dp or batch.num_sequences < dp * pp:
                continue
            if model.is_dense:
                yield Layout(expert_parallel="all_to_all", dp=dp, ep=1, tp=tp, pp=pp)
                continue
            for ep in divisors(math.gcd(dp, experts)):
                yield Layout(expert_parallel="all_to_all", dp=dp, ep=ep, tp=tp, pp=pp)
            if experts % tp == 0:
                yield Layout(expert_parallel="tensor", dp=dp, ep=1, tp=tp, pp=pp)


def _is_wanted(layout: Layout, pins: LayoutPins) -> bool:
    """Leave out one rank's tensor group, the same as one rank's exchange, unless it is pinned."""
    return layout.expert_parallel != "tensor" or layout.tp > 1 or pins.expert_parallel == "tensor"


def _with_micro_batch(
    layouts: tuple[Layout, ...], batch: Batch, sequences: int
) -> tuple[Layout, ...]:
    found = tuple(
        one
        for one in layouts
        if batch.num_sequences % (one.dp * sequences) == 0
        and batch.num_sequences >= one.dp * sequences * one.pp
    )
    if layouts and not found:
        shares = sorted({batch.num_sequences // one.dp for one in layouts})
        sizes = {size for one in layouts for size in batch.micro_batches(dp=one.dp, pp=one.pp)}
        near = min(sizes, key=lambda size: (abs(math.log(size / sequences)), size))
        raise InputError(
            f"micro_batch ({sequences}) does not divide the {_or(shares)} sequences of a replica "
            "into a micro-batch for each stage",
            f"nearest: --micro-batch {near}",
        )
    return found


def _what_is_wrong(model: Transformer, world_size: int, batch: Batch, pins: LayoutPins) -> str:
    """Return the first rule that the pins break, with the numbers that would keep it."""
    rules = chain(_rank_rules(world_size, pins), _expert_rules(model, pins),
                  _model_rules(model, batch, pins))  # fmt: skip
    return next(rules, f"the pinned {_pinned(pins)} leave no layout of {world_size} ranks")


def _rank_rules(world_size: int, pins: LayoutPins) -> Iterator[str]:
    product = (pins.dp or 1) * (pins.tp or 1) * (pins.pp or 1)
    if pins.dp and pins.tp and pins.pp and product != world_size:
        yield f"dp {pins.dp} × tp {pins.tp} × pp {pins.pp} = {product} ranks, not {world_size}"
    for axis in ("dp", "tp", "pp"):
        size = getattr(pins, axis) or 1
        if world_size % size:
            yield f"{axis} ({size}) does not divide the {world_size} ranks"
    if world_size % product:
        yield f"{_pinned(pins)} need a multiple of {product} ranks, not {world_size}"


def _expert_rules(model: Transformer, pins: LayoutPins) -> Iterator[str]:
    experts, ep = model.moe.num_experts, pins.ep or 1
    if model.is_dense and pins.expert_parallel == "tensor":
        yield "expert_parallel tensor is for experts, and the model is dense"
    if experts % ep:
        yield f"num_experts ({experts}) does not divide by ep ({ep})"
    if pins.dp and pins.dp % ep:
        yield f"ep ({ep}) does not divide dp ({pins.dp})"
    if pins.expert_parallel == "all_to_all" and (pins.tp or 1) > 1 and not model.is_dense:
        yield f"all_to_all is not available with tp ({pins.tp}): its ranks see the same tokens"
    if pins.expert_parallel != "tensor":
        return
    if ep > 1:
        yield f"ep ({ep}) is of all_to_all: with tensor the tp ranks share the experts"
    if experts % (pins.tp or 1):
        yield f"num_experts ({experts}) does not divide by tp ({pins.tp})"


def _model_rules(model: Transformer, batch: Batch, pins: LayoutPins) -> Iterator[str]:
    dp, tp, pp = pins.dp or 1, pins.tp or 1, pins.pp or 1
    if pp > model.num_layers:
        yield f"pp ({pp}) is more stages than the model has layers ({model.num_layers})"
    for name, count in (("num_heads", model.num_heads), ("d_hidden", model.moe.d_hidden)):
        if count % tp:
            yield f"{name} ({count}) does not divide by tp ({tp})"
    if model.vocab_size < tp:
        yield f"vocab_size ({model.vocab_size}) leaves some of the tp ({tp}) ranks no token"
    if batch.num_sequences % dp:
        yield f"the {batch.num_sequences} sequences of a step do not divide by dp ({dp})"
    if batch.num_sequences < dp * pp:
        yield (
            f"the {batch.num_sequences} sequences of a step are fewer than dp × pp ({dp * pp}): "
            "each stage of a replica needs a micro-batch"
        )


def _what_works(possible: tuple[Layout, ...], world_size: int, pins: LayoutPins) -> str:
    hint = f"nearest: {_nearest(possible, pins)}" if possible else "use another number of ranks"
    product = (pins.dp or 1) * (pins.tp or 1) * (pins.pp or 1)
    if world_size % product:
        hint += f", or {_beside(world_size, product)} ranks"
    return hint


def _nearest(possible: tuple[Layout, ...], pins: LayoutPins) -> str:
    """Return the flags of the possible layout that is nearest in ratio to the pinned sizes."""
    pinned = [axis for axis in AXES if getattr(pins, axis) is not None]

    def distance(layout: Layout) -> tuple[float, ...]:
        other_kind = pins.expert_parallel not in (None, layout.expert_parallel)
        ratios = [abs(math.log(getattr(layout, axis) / getattr(pins, axis))) for axis in pinned]
        return other_kind, sum(ratio > 0 for ratio in ratios), sum(ratios), layout.pp, layout.tp

    best = min(possible, key=distance)
    kind = "" if pins.expert_parallel is None else f" --expert-parallel {best.expert_parallel}"
    return " ".join(f"--{axis} {getattr(best, axis)}" for axis in pinned) + kind


def _pinned(pins: LayoutPins) -> str:
    named = [f"{axis} {getattr(pins, axis)}" for axis in AXES if getattr(pins, axis) is not None]
    return ", ".join([*named, *([pins.expert_parallel] if pins.expert_parallel else [])])


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, ascending."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return tuple(sorted({*small, *(number // one for one in small)}))


def _beside(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _or(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
