"""Layouts that fit into memory: with as much in host memory as they must have.

What is in host memory takes no less time: it is tried only where less of it does not fit.

Before pipelines are cut there are bounds. Of L blocks on p pipeline ranks some rank has ⌈L/p⌉ or
more. Equal and balanced cuts tell more: a rank between the ends has ⌈L/p⌉ − 1 or more, because a
block goes to the rank that has least to do (`balanced_stages`). Which blocks these are is not
known: those of the model that take least.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.cluster import HEADROOM
from moetune.domain.pipeline import V_SCHEDULES
from moetune.domain.training import FoldedLayout, LayoutRequest, Recompute
from moetune.solve.model.memory import FRAGMENTATION, LIBRARY_BYTES, OPTIMIZER_SHARES, MemoryModel
from moetune.solve.model.space import LayoutSpace

_LESS = np.array([[[0.0]], [[-1.0]]])
"""Blocks that the rank that has most of them has more, and one between the ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Layouts that fit into memory.

    Args:
        limit_bytes: usable memory of a device.
        host_bytes: host memory of one rank.
    """

    space: LayoutSpace
    memory: MemoryModel
    limit_bytes: float
    host_bytes: float

    def fits(self, layout: FoldedLayout) -> bool:
        """Return whether a layout fits into the memory of the devices and of their host."""
        return self.fits_into(*self.memory.needs(layout))

    def fits_into(self, peak_bytes: float, host_bytes: float) -> bool:
        """Return whether the bytes of a device and those of its host fit."""
        return peak_bytes <= self.limit_bytes and host_bytes <= self.host_bytes

    def is_roomy(self, layout: FoldedLayout) -> bool:
        """Return whether a layout leaves memory free, and the host alone."""
        most = self.limit_bytes * (1 - HEADROOM)
        return not layout.on_host and self.memory.needs(layout)[0] <= most

    def least_of_states(
        self, sizes: FoldedLayout, pins: LayoutRequest, *, may_offload: bool = True
    ) -> float:
        """Return bytes that the states alone need at least on the fullest device."""
        ways = self.ways(sizes, pins, may_offload=may_offload)
        return min(self.memory.least(one, on_host=share) for one, share in ways)

    def ways(
        self, sizes: FoldedLayout, pins: LayoutRequest, *, may_offload: bool
    ) -> list[tuple[FoldedLayout, float]]:
        """Return how the states take least: sharded most, or on the host at the lowest stage."""
        pinned = pins.offload_optimizer
        zero = self.space.zeros(pins, sizes.pp, sizes.tp)[-1]
        highest = sizes if zero == sizes.zero else sizes.changed(zero=zero)
        ways = [(highest, pinned or 0.0)]
        if may_offload and pinned is None and self.space.target.offloads_optimizer:
            ways.append((sizes, 1.0))
        return ways

    def with_most_waiting(self, layout: FoldedLayout, pins: LayoutRequest) -> FoldedLayout:
        """Return a layout with as many blocks' activations in host memory as may be."""
        able = self.space.target.offloads_activations and layout.pp == 1 and not layout.recompute
        if not able or pins.offload_activations is not None:
            return layout
        num = self.space.job.decoder.num_layers
        return layout.changed(offload_activations=(num - 1) / num)

    def fitted(self, layout: FoldedLayout, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield a layout if it fits, else as it fits with some of it in host memory."""
        if self.fits(layout):
            yield layout
            return
        target = self.space.target
        if target.offloads_optimizer or target.offloads_activations:
            most = self.with_most_waiting(layout, pins)
            if self.memory.needs(most, on_host=1.0)[0] <= self.limit_bytes:
                yield from self.offloaded(layout, pins)

    def shares(self, layout: FoldedLayout, pins: LayoutRequest) -> Sequence[float]:
        """Return the shares of the optimizer that the host may keep."""
        if pins.offload_optimizer is not None:
            return (pins.offload_optimizer,)
        one = layout.changed(offload_optimizer=OPTIMIZER_SHARES[0])
        return (0.0, *OPTIMIZER_SHARES) if self.space.may_use_host(one) else (0.0,)

    def offloaded(self, layout: FoldedLayout, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield a layout with as few blocks in host memory as make it fit.

        One for each share of the optimizer: what it frees, activations need not.
        """
        for share in self.shares(layout, pins):
            one = layout.changed(offload_optimizer=share)
            found = one if self.fits(one) else self._with_activations(one, pins)
            if found is not None and self.space.is_allowed(found):
                yield found
            if found == one:
                return

    def least_offloaded(self, layout: FoldedLayout, pins: LayoutRequest) -> float:
        """Return bytes that a device needs at least, with as much in host memory as may be."""
        most = self.with_most_waiting(layout, pins)
        return self.memory.needs(most, on_host=self.shares(layout, pins)[-1])[0]

    def waiting(
        self, layout: FoldedLayout, share: float, pins: LayoutRequest
    ) -> Iterator[FoldedLayout]:
        """Yield a layout with a share of the optimizer, and each number of blocks' activations."""
        num = self.space.job.decoder.num_layers
        one = layout.changed(offload_optimizer=share) if share else layout
        yield one
        most = self.with_most_waiting(one, pins)
        if most is one or not self.space.may_use_host(most):
            return
        for count in range(1, num):
            yield one.changed(offload_activations=count / num)

    def _with_activations(self, layout: FoldedLayout, pins: LayoutRequest) -> FoldedLayout | None:
        """Return a layout with the fewest blocks' activations in host memory; None where no fit."""
        num = self.space.job.decoder.num_layers
        able = self.with_most_waiting(layout, pins) is not layout
        if not able or not self.space.is_allowed(layout.changed(offload_activations=1 / num)):
            return None
        shares = [count / num for count in range(1, num)]
        fitting = bisect_left(
            shares, -self.limit_bytes,
            key=lambda share: -self.memory.needs(layout.changed(offload_activations=share))[0],
        )  # fmt: skip
        if fitting == len(shares):
            return None
        waiting = layout.changed(offload_activations=shares[fitting])
        return waiting if self.fits(waiting) else None

    def least_bytes(
        self,
        pipelines: Sequence[FoldedLayout],
        recomputes: Sequence[tuple[Recompute, ...]],
        pins: LayoutRequest,
        *,
        may_offload: bool,
    ) -> Floats:
        """Return bytes that the fullest device needs at least, [pipeline, recomputation].

        Pipelines are cut equally or balanced, the states are kept in the way that takes least.

        Args:
            pipelines: layouts of the same sizes, which differ in overlap, vpp and schedule.
            may_offload: whether what is not pinned may be in host memory.
        """
        if pins.stages is not None:
            return np.zeros((len(pipelines), len(recomputes)))
        first, memory, loss = pipelines[0], self.memory, 1 + FRAGMENTATION
        usual = memory.kept(first)
        kept = memory.kept(self.with_most_waiting(first, pins)) if may_offload else usual
        ways = self.ways(first, pins, may_offload=may_offload)
        counts = np.array(memory.stages.whole.counts, dtype=float)
        blocks = memory.sizes_of_blocks(first, recomputes)
        activations = np.array(
            [
                [loss * (usual if modules else kept) * one.total for one in every]
                for modules, every in zip(recomputes, blocks, strict=True)
            ]
        )
        workspace = np.array([min(one.workspace for one in every) for every in blocks])
        live = np.array([self._live(one) for one in pipelines])[:, :, None, None] * activations
        states = loss * np.array([memory.states_of_blocks(to, on_host=share) for to, share in ways])
        num = -(-self.space.job.decoder.num_layers // first.pp)
        taken = cheapest(_LESS + num, counts, states[:, None, None, None] + live)
        fullest = np.maximum(taken[:, :, 0], taken[:, :, 1])
        if first.pp == 1:  # all is on one rank, the ends with it
            whole = [memory.least(to, on_host=share) - LIBRARY_BYTES for to, share in ways]
            fullest += (np.array(whole) - states @ counts)[:, None, None]
        bound: Floats = fullest.min(axis=0) + (loss * workspace + LIBRARY_BYTES)
        return bound

    def _live(self, layout: FoldedLayout) -> tuple[float, float]:
        """Return the least micro-batches in work on any rank, and the most between the ends."""
        live = self.memory.live(layout)
        middle = live[1:] if layout.order in V_SCHEDULES else live[1:-1]
        return min(live), max(middle, default=0.0)


def cheapest(num: Floats, counts: Floats, sizes: Floats) -> Floats:
    """Return the bytes of those blocks that take least, [way, pipeline, rank, recomputation].

        min Σ x_k·s_k  for  Σ x_k = n, 0 ≤ x_k ≤ c_k  is  max_j (n·s_j − Σ c_k·max(0, s_j − s_k))

    Args:
        num: n, of the blocks, [rank, 1, 1].
        counts: c, that the model has of each kind.
        sizes: s, of one block, [way, pipeline, rank, recomputation, kind].
    """
    if len(counts) == 1:
        return (num * sizes)[..., 0]
    saved = np.maximum(sizes[..., :, None] - sizes[..., None, :], 0.0) @ counts
    least: Floats = (num * sizes - saved).max(axis=-1)
    return least
