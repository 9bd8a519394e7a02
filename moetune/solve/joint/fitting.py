"""Layouts that fit into memory: with as much in host memory as they must have.

What is in host memory takes no less time: it is tried only where less of it does not fit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moetune.domain.cluster import HEADROOM
from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.solve.joint.space import LayoutSpace
from moetune.solve.joint.ties import on_host
from moetune.solve.training.memory import OPTIMIZER_SHARES, MemoryModel


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
        return peak_bytes <= self.limit_bytes and self.fits_host(host_bytes)

    def fits_host(self, host_bytes: float) -> bool:
        """Return whether the bytes that a device has in host memory fit there."""
        return host_bytes <= self.host_bytes

    def is_roomy(self, layout: FoldedLayout) -> bool:
        """Return whether a layout leaves memory free, and the host alone."""
        most = self.limit_bytes * (1 - HEADROOM)
        return not on_host(layout) and self.memory.needs(layout)[0] <= most

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
        elif self._may_fit_with_host(layout, pins):
            yield from self.offloaded(layout, pins)

    def _may_fit_with_host(self, layout: FoldedLayout, pins: LayoutRequest) -> bool:
        target = self.space.target
        if not (target.offloads_optimizer or target.offloads_activations):
            return False
        most = self.with_most_waiting(layout, pins)
        return self.memory.needs(most, on_host=1.0)[0] <= self.limit_bytes

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
        if num == 1 or self.with_most_waiting(layout, pins) is layout:
            return None
        if not self.space.is_allowed(layout.changed(offload_activations=1 / num)):
            return None
        low, high = 0, num - 1
        while high - low > 1:
            middle = (low + high) // 2
            one = layout.changed(offload_activations=middle / num)
            low, high = (low, middle) if self._fits_device(one) else (middle, high)
        found = layout.changed(offload_activations=high / num)
        return found if self.fits(found) else None

    def _fits_device(self, layout: FoldedLayout) -> bool:
        return self.memory.needs(layout)[0] <= self.limit_bytes
