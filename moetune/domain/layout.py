"""Layouts of ranks whose tensor-parallel ranks have the same tokens, and the nearest that work.

`domain.training.FoldedLayout` is of plans; these are of layers, and of PPMoE's experts.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel

AXES = ("dp", "ep", "tp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism of a model's training."""

    expert_parallel: ExpertParallel
    dp: int
    ep: int
    tp: int
    pp: int

    @classmethod
    def of_layer(cls, expert_parallel: ExpertParallel, num_ranks: int) -> "Layout":
        """Return the layout of one layer alone, whose experts all ranks share."""
        if expert_parallel == "tensor":
            return cls(expert_parallel=expert_parallel, dp=1, ep=1, tp=num_ranks, pp=1)
        return cls(expert_parallel=expert_parallel, dp=num_ranks, ep=num_ranks, tp=1, pp=1)

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the experts of one layer."""
        return self.ep if self.expert_parallel == "all_to_all" else self.tp


class BrokenRule(NamedTuple):
    """A violated rule about a layout's sizes, and the nearest sizes that obey it."""

    what: str
    hint: str


def check_ranks(layout: Layout, world_size: int) -> None:
    """Raise InputError, with the nearest sizes that work, unless the layout fits the ranks.

    The ranks are dp·tp·pp. Experts are spread over ep of the dp ranks, or over the tp ranks.
    """
    for name in AXES:
        if (size := getattr(layout, name)) < 1:
            raise InputError(f"{name} must be at least 1, got {size}")
    dp, ep, tp = layout.dp, layout.ep, layout.tp
    product = dp * tp * layout.pp
    if product != world_size:
        raise InputError(
            f"dp ({dp}) × tp ({tp}) × pp ({layout.pp}) is {product} ranks, but there are "
            f"{world_size}",
            _nearest_world(layout, world_size),
        )
    if layout.expert_parallel == "tensor" and ep != 1:
        raise InputError(
            f"ep ({ep}) belongs to all_to_all: with tensor the tp ranks share the experts",
            "use ep 1, or expert_parallel all_to_all with tp 1",
        )
    if layout.expert_parallel == "all_to_all" and tp != 1:
        raise InputError(
            f"all_to_all is not available with tp ({tp}): its ranks see the same tokens",
            f"use expert_parallel tensor with ep 1, or tp 1 with dp {dp * tp}",
        )
    if dp % ep:
        raise InputError(
            f"dp ({dp}) does not divide by ep ({ep})", f"use ep {_either(nearest_divisors(dp, ep))}"
        )


def _nearest_world(layout: Layout, world_size: int) -> str:
    dp, tp, pp = layout.dp, layout.tp, layout.pp
    fewer, rest = divmod(world_size, tp * pp)
    if not rest:
        return f"use dp {fewer}, or start {dp * tp * pp} ranks"
    near = [f"{one * tp * pp} ranks (dp {one})" for one in (fewer, fewer + 1) if one]
    return f"with tp {tp} and pp {pp} start {' or '.join(near)}"


def check_micro_batches(
    num_micro_batches: int, *, num_sequences: int, pp: int, stages_per_rank: int = 1
) -> None:
    """Raise InputError, with the nearest numbers that work, where 1F1B cannot run.

    Args:
        num_sequences: of one data-parallel rank in one step.
    """
    works = runnable_micro_batches(num_sequences, pp=pp, stages_per_rank=stages_per_rank)
    if num_micro_batches in works:
        return
    interleaved = " interleaved" if stages_per_rank > 1 else ""
    what = f"{num_micro_batches} micro-batches of {num_sequences} sequences a rank"
    if not works:
        raise InputError(
            f"{what} do not run on {pp} stages{interleaved}: no number of micro-batches does",
            f"give every data-parallel rank a multiple of {pp} sequences",
        )
    raise InputError(
        f"{what} do not run on {pp} stages{interleaved}",
        f"use {_either(_nearest(works, num_micro_batches))} micro-batches",
    )


def runnable_micro_batches(
    num_sequences: int, *, pp: int, stages_per_rank: int = 1
) -> tuple[int, ...]:
    """Return the numbers of equal micro-batches that 1F1B runs, ascending.

    Args:
        num_sequences: of one data-parallel rank in one step.
    """
    return tuple(one for one in divisors(num_sequences) if _fills(one, pp, stages_per_rank))


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, ascending; none of 0.

    By prime factors: sizes of jobs are products of small ones, found in a few divisions each.
    """
    if number == 0:
        return ()
    found, left = [1], number
    for prime in itertools.chain((2,), range(3, math.isqrt(number) + 1, 2)):
        if left % prime:
            continue
        powers = [1]
        while left % prime == 0:
            left //= prime
            powers.append(powers[-1] * prime)
        found = [one * power for one in found for power in powers]
        if prime * prime >= left:
            break
    if left > 1:
        found += [one * left for one in found]
    return tuple(sorted(found))


def nearest_divisors(number: int, near: int) -> tuple[int, ...]:
    """Return the largest divisor of `number` up to `near`, and the smallest from there on."""
    return _nearest(divisors(number), near)


def nearest_multiples(number: int, unit: int) -> tuple[int, ...]:
    """Return the positive multiples of `unit` on both sides of a number that is none."""
    below = number // unit * unit
    return (below, below + unit) if below else (unit,)


def _fills(num_micro_batches: int, pp: int, stages_per_rank: int) -> bool:
    """Return whether torch's Schedule1F1B or ScheduleInterleaved1F1B accepts so many."""
    if stages_per_rank == 1:
        return num_micro_batches >= pp
    return num_micro_batches % max(1, num_micro_batches // pp) == 0


def _nearest(works: Iterable[int], near: int) -> tuple[int, ...]:
    sizes = tuple(works)
    below = max((size for size in sizes if size <= near), default=None)
    above = min((size for size in sizes if size >= near), default=None)
    return tuple(dict.fromkeys(size for size in (below, above) if size is not None))


def _either(sizes: tuple[int, ...]) -> str:
    return " or ".join(str(size) for size in sizes)
