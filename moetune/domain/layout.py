"""The layout of one layer's ranks, rules that layouts break, and the nearest sizes that divide."""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from moetune.domain.layer import ExpertParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism of a layer's plan."""

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


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, ascending, by prime factors; () for 0."""
    if number == 0:
        return ()
    sizes, left = [1], number
    for prime in itertools.chain((2,), range(3, math.isqrt(number) + 1, 2)):
        if left % prime:
            continue
        powers = [1]
        while left % prime == 0:
            left //= prime
            powers.append(powers[-1] * prime)
        sizes = [size * power for size in sizes for power in powers]
        if prime * prime >= left:
            break
    if left > 1:
        sizes += [size * left for size in sizes]
    return tuple(sorted(sizes))


def nearest_divisors(number: int, near: int) -> tuple[int, ...]:
    """Return the largest divisor of `number` up to `near`, and the smallest from `near` on."""
    sizes = divisors(number)
    below = max((size for size in sizes if size <= near), default=None)
    above = min((size for size in sizes if size >= near), default=None)
    return tuple(dict.fromkeys(size for size in (below, above) if size is not None))


def divisor_words(number: int, near: int) -> str:
    """Return `nearest_divisors` in words, such as "2 or 4"."""
    return " or ".join(map(str, nearest_divisors(number, near)))


def nearest_multiples(number: int, unit: int) -> tuple[int, ...]:
    """Return the nearest positive multiples of `unit` below and above a number between them."""
    below = number // unit * unit
    return (below, below + unit) if below else (unit,)
