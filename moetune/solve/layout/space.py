"""The space of layouts: every one that a model, its batch, the runtime and the pins allow.

W ranks = dp·tp·pp. Experts are exchanged among ep of the dp replicas ("all_to_all"), or
lie whole on the tp ranks of a tensor-parallel group ("tensor", PPMoE §3.3). A dense model has
nothing to exchange: its layouts are of the first kind with ep 1.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moetune.domain.constraints import LayoutPins
from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel
from moetune.domain.layout import (
    AXES,
    BrokenRule,
    Layout,
    LayoutSizes,
    ModelSizes,
    divisors,
    model_rules,
    nearest_multiples,
    rank_rules,
    runnable_micro_batches,
)
from moetune.domain.model import Transformer
from moetune.solve.runtime import MOETUNE, TargetRuntime


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
        sizes = [share // number for number in reversed(runnable_micro_batches(share, pp=pp))]
        return tuple(size for size in sizes if size == sizes[-1] or not size & (size - 1))


def whole_batch(*, model: Transformer, tokens_per_rank: int, world_size: int) -> Batch:
    """Return the batch of a step; its tokens do not depend on the layout.

    Raises:
        InputError: the tokens of all ranks are no whole number of sequences.
    """
    tokens, length = tokens_per_rank * world_size, model.length
    if tokens % length:
        unit = length // math.gcd(length, world_size)
        near = _or(nearest_multiples(tokens_per_rank, unit))
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
    runtime: TargetRuntime = MOETUNE,
) -> tuple[Layout, ...]:
    """Return every layout that the model, the batch, the runtime and the pins allow.

    Raises:
        InputError: there is none; the text says which rule is broken, the hint names the nearest.
    """
    space = _Space(model=model, world_size=world_size, batch=batch, runtime=runtime)
    possible = tuple(space.layouts())
    found = tuple(one for one in possible if pins.allow(one) and _is_wanted(one, pins))
    if pins.micro_batch is not None:
        found = _with_micro_batch(found, batch, pins.micro_batch)
    if found:
        return found
    broken = next(space.broken_rules(pins), None)
    what = f"the pinned {_pinned(pins)} leave no layout of {world_size} ranks"
    raise InputError(broken.what if broken else what, _what_works(possible, world_size, pins))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Space:
    """A model and its batch on so many ranks."""

    model: Transformer
    world_size: int
    batch: Batch
    runtime: TargetRuntime

    def layouts(self) -> Iterator[Layout]:
        """Yield the layouts that keep all rules, by tp, pp and ep; all-to-all before tensor."""
        for tp in divisors(self.world_size):
            for pp in divisors(self.world_size // tp):
                dp = self.world_size // tp // pp
                for kind, ep in self._ways(dp):
                    one = Layout(expert_parallel=kind, dp=dp, ep=ep, tp=tp, pp=pp)
                    if next(self.broken_rules(one), None) is None:
                        yield one

    def broken_rules(self, sizes: LayoutSizes) -> Iterator[BrokenRule]:
        """Yield the rules that a layout breaks, or the pins of one."""
        model = self.model
        exchanges = model.is_dense or self.runtime.exchanges_under_tensor
        yield from rank_rules(sizes, self.world_size, exchanges_under_tensor=exchanges)
        yield from model_rules(
            sizes,
            ModelSizes(
                num_blocks=model.num_layers,
                num_heads=model.num_heads,
                d_hidden=model.moe.d_hidden,
                num_experts=model.moe.num_experts,
                vocab_size=model.vocab_size,
                is_dense=model.is_dense,
            ),
        )
        yield from _batch_rules(sizes, self.batch)

    def _ways(self, dp: int) -> Iterator[tuple[ExpertParallel, int]]:
        for ep in divisors(math.gcd(dp, self.model.moe.num_experts)):
            yield "all_to_all", ep
        yield "tensor", 1


def _batch_rules(sizes: LayoutSizes, batch: Batch) -> Iterator[BrokenRule]:
    dp, pp = sizes.dp or 1, sizes.pp or 1
    if batch.num_sequences % dp:
        what = f"the {batch.num_sequences} sequences of a step do not divide by dp ({dp})"
        yield BrokenRule(what, "")
    elif not runnable_micro_batches(batch.num_sequences // dp, pp=pp):
        yield BrokenRule(
            f"the {batch.num_sequences} sequences of a step are fewer than dp × pp ({dp * pp}): "
            "each stage of a replica needs a micro-batch",
            "",
        )


def _is_wanted(layout: Layout, pins: LayoutPins) -> bool:
    """Return False for a tensor group of one rank, which equals all-to-all, unless it is pinned."""
    return layout.expert_parallel != "tensor" or layout.tp > 1 or pins.expert_parallel == "tensor"


def _with_micro_batch(
    layouts: tuple[Layout, ...], batch: Batch, sequences: int
) -> tuple[Layout, ...]:
    def runs(layout: Layout) -> bool:
        share = batch.num_sequences // layout.dp
        number, rest = divmod(share, sequences)
        return not rest and number in runnable_micro_batches(share, pp=layout.pp)

    found = tuple(one for one in layouts if runs(one))
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


def _what_works(possible: tuple[Layout, ...], world_size: int, pins: LayoutPins) -> str:
    hint = f"nearest: {_nearest(possible, pins)}" if possible else "use another number of ranks"
    product = (pins.dp or 1) * (pins.tp or 1) * (pins.pp or 1)
    if world_size % product:
        hint += f", or {_or(nearest_multiples(world_size, product))} ranks"
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


def _or(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))
