"""Lower bounds of the times of phases that reuse memory, from how much their streams overlap."""

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from moetune.domain.arrays import Floats
from moetune.solve.layer.phase_arrays import PLACES, Bools, ManyPhases
from moetune.solve.layer.reuse import num_transfers

_COMM, _COMP, _MEM = range(3)
_Set = tuple[dict[int, Floats], Bools | None]
"""Speeds of the classes that run at once, and the phases in which they may; None for all."""


def least_seconds(phases: ManyPhases) -> Floats:
    """Return a lower bound of each phase's time, shape (n,).

        T >= Σ w·work      for weights w >= 0 with Σ w·speed <= 1 in every set of classes that run

    since no second then does more than a second of weighted work: the dual of the least time in
    which the sets do all the work. The experts wait for the first chunk's dispatch, and the last
    combine for them, so that these exchanges overlap none of them.
    """
    transfer, before, after, copy_input, copy_middle = phases.durations
    transfers = np.array([num_transfers(is_sent_again=one.sends_again) for one in phases.kinds])
    ends = transfers[phases.kind] * transfer
    device, copies = phases.degree * (before + after), phases.degree * (copy_input + copy_middle)
    found = np.zeros(len(phases.degree))
    sets = list(_sets(phases, copies > 0))
    for order in permutations((_COMM, _COMP, _MEM)):
        weights = _weights(sets, order)
        comm, comp, mem = weights[_COMM], weights[_COMP], weights[_MEM]
        between = np.maximum((1 - comm) * ends, mem * copies)
        np.maximum(found, comm * phases.degree * ends + comp * device + between, out=found)
    return found


def _sets(phases: ManyPhases, copies: Bools) -> Iterator[_Set]:
    """Yield the sets of two and three classes that may run at once."""

    def speed(victim: str, beside: str) -> Floats:
        found: Floats = phases.speeds[PLACES[victim, beside]]
        return found

    yield {_COMM: speed("comm", "comp"), _COMP: speed("comp", "comm")}, None
    if copies.any():
        yield {_COMM: speed("comm", "mem"), _MEM: speed("mem", "comm")}, copies
    overlap = copies & np.array([one.copies_overlap for one in phases.kinds])[phases.kind]
    if overlap.any():
        yield {_COMP: speed("comp", "mem"), _MEM: speed("mem", "comp")}, overlap
        yield {
            _COMM: speed("comm", "all"), _COMP: speed("comp", "all"), _MEM: speed("mem", "all"),
        }, overlap  # fmt: skip


def _weights(sets: list[_Set], order: tuple[int, ...]) -> dict[int, Floats | float]:
    """Return weights that no set exceeds, each as large as those chosen before leave it."""
    weights: dict[int, Floats | float] = {}
    for at in order:
        largest: Floats | float = 1.0  # where the class runs alone
        for speeds, where in sets:
            if at in speeds:
                others = sum(weights[one] * speeds[one] for one in speeds if one in weights)
                most = (1 - others) / speeds[at]
                largest = np.minimum(largest, most if where is None else np.where(where, most, 1.0))
        weights[at] = largest
    return weights
