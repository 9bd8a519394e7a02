"""Layouts of given sizes that fit: cut into stages, sharded, and in host memory where they must.

Stages are equal or balanced. Higher ZeRO stages take no less time, and neither does what is in host
memory: each is tried only where less of it does not fit, or leaves too little memory free.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moetune.domain.cluster import HEADROOM
from moetune.domain.pipeline import StageLetters
from moetune.domain.training import FoldedLayout, LayoutRequest, Recompute, ZeroStage
from moetune.solve.joint.memory_bounds import least_bytes
from moetune.solve.joint.space import LayoutSpace
from moetune.solve.joint.ties import on_host
from moetune.solve.training.memory import MemoryModel
from moetune.solve.training.offload import OPTIMIZER_SHARES
from moetune.solve.training.step import StepPrices

_ALL_OF_EXPERTS = frozenset({"moe_act", "shared_experts"})
"""Modules that recomputation of "moe" repeats as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roomy:
    """A cut that leaves memory free: more recomputation or sharding of it is never better."""

    recompute: tuple[Recompute, ...]
    stages: StageLetters | None
    zero: ZeroStage

    def covers(self, layout: FoldedLayout, recompute: tuple[Recompute, ...]) -> bool:
        """Return whether a layout would recompute and shard as much or more, equally cut."""
        return (
            self.stages == layout.stages
            and self.zero <= layout.zero
            and repeats(recompute, self.recompute)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Layouts that fit into memory.

    Args:
        limit_bytes: usable memory of a device.
        host_bytes: host memory of one rank.
        prices: that balance stages; None where they stay equal.
    """

    space: LayoutSpace
    memory: MemoryModel
    limit_bytes: float
    host_bytes: float
    prices: StepPrices | None = None

    def fits(self, layout: FoldedLayout) -> bool:
        """Return whether a layout fits into the memory of the devices and of their host."""
        return self.fits_into(*self.memory.needs(layout))

    def fits_into(self, peak_bytes: float, host_bytes: float) -> bool:
        """Return whether the bytes of a device and those of its host fit."""
        return peak_bytes <= self.limit_bytes and self.fits_host(host_bytes)

    def fits_host(self, host_bytes: float) -> bool:
        """Return whether the bytes that a device has in host memory fit there."""
        return host_bytes <= self.host_bytes

    def is_roomy(self, layout: FoldedLayout, peak_bytes: float) -> bool:
        """Return whether a layout of so many bytes leaves memory free, and the host alone."""
        return peak_bytes <= self.limit_bytes * (1 - HEADROOM) and not on_host(layout)

    def is_hopeless(self, sizes: FoldedLayout, pins: LayoutRequest) -> bool:
        """Return whether the states alone are too large, whatever is cut, sharded or offloaded."""
        return self.least_of_states(sizes, pins, may_offload=True) > self.limit_bytes

    def least_of_states(
        self, sizes: FoldedLayout, pins: LayoutRequest, *, may_offload: bool
    ) -> float:
        """Return bytes that the states alone need at least on the fullest device."""
        ways = self._ways(sizes, pins, may_offload=may_offload)
        return min(self.memory.least(one, on_host=share) for one, share in ways)

    def _ways(
        self, sizes: FoldedLayout, pins: LayoutRequest, *, may_offload: bool
    ) -> list[tuple[FoldedLayout, float]]:
        """Return how the states take least: sharded most, or on the host at the lowest stage."""
        pinned = pins.offload_optimizer
        zero = self.space.zeros(pins, sizes.pp)[-1]
        highest = sizes if zero == sizes.zero else sizes.changed(zero=zero)
        ways = [(highest, pinned or 0.0)]
        if may_offload and pinned is None and self.space.target.offloads_optimizer:
            ways.append((sizes, 1.0))
        return ways

    def least_bytes(
        self,
        pipelines: Sequence[FoldedLayout],
        recomputes: Sequence[tuple[Recompute, ...]],
        pins: LayoutRequest,
        *,
        may_offload: bool,
    ) -> npt.NDArray[np.float64]:
        """Return bytes that a device needs at least, [pipeline, recomputation].

        Args:
            pipelines: of the same sizes.
            may_offload: whether what is not pinned may be in host memory.
        """
        if not pipelines or pins.stages is not None:
            return np.zeros((len(pipelines), len(recomputes)))
        sizes = pipelines[0]
        usual = self.memory.kept(sizes)
        least = self.memory.kept(self._with_most_waiting(sizes, pins)) if may_offload else usual
        return least_bytes(
            self.memory,
            pipelines,
            recomputes,
            ways=self._ways(sizes, pins, may_offload=may_offload),
            kept=[usual if one else least for one in recomputes],
        )

    def _with_most_waiting(self, layout: FoldedLayout, pins: LayoutRequest) -> FoldedLayout:
        """Return a layout with as many blocks' activations in host memory as may be."""
        able = self.space.target.offloads_activations and layout.pp == 1 and not layout.recompute
        if not able or pins.offload_activations is not None:
            return layout
        num = self.space.job.decoder.num_layers
        return layout.changed(offload_activations=(num - 1) / num)

    def cuts(self, layout: FoldedLayout, pins: LayoutRequest) -> Sequence[FoldedLayout]:
        """Return a layout with equal stages, and with balanced ones where these are others."""
        if layout.pp == 1 or pins.stages is not None or self.prices is None:
            return (layout,)
        balanced = self.prices.balanced(layout)
        return (layout,) if balanced.stages is None else (layout, balanced)

    def sharded(self, cut: FoldedLayout, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield a cut that is allowed with each other ZeRO stage that is, the lowest first."""
        for zero in self.space.zeros(pins, cut.pp):
            if zero == cut.zero:
                yield cut
                continue
            one = cut.changed(zero=zero)
            if self.space.is_allowed(one):
                yield one

    def least_share(self, layout: FoldedLayout, pins: LayoutRequest) -> float | None:
        """Return the least share of the optimizer on the host with which a layout may fit.

        None where nothing in host memory makes it fit.
        """
        target = self.space.target
        if not (target.offloads_optimizer or target.offloads_activations):
            return None
        most = self._with_most_waiting(layout, pins)
        if self.memory.needs(most, on_host=1.0)[0] > self.limit_bytes:
            return None  # whatever is allowed
        if not self.space.may_use_host(most):
            most = layout
        for share in self.shares(layout, pins):
            is_plain = most is layout and share == layout.offload_optimizer
            if not is_plain and self.memory.needs(most, on_host=share)[0] <= self.limit_bytes:
                return share
        return None

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
        most = self._with_most_waiting(layout, pins)
        return self.memory.needs(most, on_host=self.shares(layout, pins)[-1])[0]

    def waiting(
        self, layout: FoldedLayout, share: float, pins: LayoutRequest
    ) -> Iterator[FoldedLayout]:
        """Yield a layout with a share of the optimizer, and each number of blocks' activations."""
        num = self.space.job.decoder.num_layers
        one = layout.changed(offload_optimizer=share) if share else layout
        yield one
        most = self._with_most_waiting(one, pins)
        if most is one or not self.space.may_use_host(most):
            return
        for count in range(1, num):
            yield one.changed(offload_activations=count / num)

    def _with_activations(self, layout: FoldedLayout, pins: LayoutRequest) -> FoldedLayout | None:
        """Return a layout with the fewest blocks' activations in host memory; None where no fit."""
        num = self.space.job.decoder.num_layers
        if num == 1 or self._with_most_waiting(layout, pins) is layout:
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


def repeats(more: Sequence[Recompute], less: Sequence[Recompute]) -> bool:
    """Return whether one list of modules recomputes all that another one does."""
    every = {*more, *(_ALL_OF_EXPERTS if "moe" in more else ())}
    return "full" in more or {*less} <= every  # "selective" is a list of its own
