"""Layouts of given sizes that fit: cut into stages, sharded, and in host memory where they must.

Stages are equal or balanced. Higher ZeRO stages take no less time, and neither does what is in host
memory: each is tried only where less of it does not fit, or leaves too little memory free.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetune.domain.cluster import HEADROOM
from moetune.domain.pipeline import StageLetters
from moetune.domain.training import FoldedLayout, LayoutRequest, Recompute, ZeroStage
from moetune.solve.training.memory import MemoryModel
from moetune.solve.training.offload import OPTIMIZER_SHARES
from moetune.solve.training.space import LayoutSpace
from moetune.solve.training.step import StepPrices
from moetune.solve.training.ties import on_host

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
        host_bytes: memory of a node's host.
    """

    space: LayoutSpace
    prices: StepPrices
    memory: MemoryModel
    limit_bytes: float
    host_bytes: float

    def fits(self, layout: FoldedLayout) -> bool:
        """Return whether a layout fits into the memory of the devices and of their host."""
        return self.fits_into(*self.memory.needs(layout))

    def fits_into(self, peak_bytes: float, host_bytes: float) -> bool:
        """Return whether the bytes of a device and those of its host fit."""
        ranks = min(self.space.job.world_size, self.prices.device.per_node)
        return peak_bytes <= self.limit_bytes and host_bytes * ranks <= self.host_bytes

    def is_roomy(self, layout: FoldedLayout, peak_bytes: float) -> bool:
        """Return whether a layout of so many bytes leaves memory free, and the host alone."""
        return peak_bytes <= self.limit_bytes * (1 - HEADROOM) and not on_host(layout)

    def is_hopeless(self, sizes: FoldedLayout, pins: LayoutRequest) -> bool:
        """Return whether the states alone are too large, whatever is cut, sharded or offloaded."""
        most = pins.offload_optimizer
        if most is None:
            most = float(self.space.target.offloads_optimizer)
        highest = replace(sizes, zero=self.space.zeros(pins, sizes.pp)[-1])
        least = min(
            self.memory.least(highest, on_host=pins.offload_optimizer or 0.0),
            self.memory.least(sizes, on_host=most),
        )
        return least > self.limit_bytes

    def cuts(self, layout: FoldedLayout, pins: LayoutRequest) -> Sequence[FoldedLayout]:
        """Return a layout with equal stages, and with balanced ones where these are others."""
        if layout.pp == 1 or pins.stages is not None:
            return (layout,)
        balanced = self.prices.balanced(layout)
        return (layout,) if balanced.stages is None else (layout, balanced)

    def sharded(self, cut: FoldedLayout, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield a cut that is allowed with each other ZeRO stage that is, the lowest first."""
        for zero in self.space.zeros(pins, cut.pp):
            if zero == cut.zero:
                yield cut
                continue
            one = replace(cut, zero=zero)
            if self.space.is_allowed(one):
                yield one

    def least_share(self, layout: FoldedLayout, pins: LayoutRequest) -> float | None:
        """Return the least share of the optimizer on the host with which a layout may fit.

        None where nothing in host memory makes it fit.
        """
        target, most = self.space.target, layout
        if not (target.offloads_optimizer or target.offloads_activations):
            return None
        if pins.offload_activations is None and not layout.recompute and layout.pp == 1:
            num = self.space.job.decoder.num_layers
            most = replace(layout, offload_activations=(num - 1) / num)
        if not self._fits_device(replace(most, offload_optimizer=1.0)):
            return None  # whatever is allowed
        if not self.space.is_allowed(most):
            most = layout
        for share in self._shares(layout, pins):
            one = replace(most, offload_optimizer=share)
            if one != layout and self._fits_device(one):
                return share
        return None

    def _shares(self, layout: FoldedLayout, pins: LayoutRequest) -> Sequence[float]:
        """Return the shares of the optimizer that the host may keep."""
        if pins.offload_optimizer is not None:
            return (pins.offload_optimizer,)
        one = replace(layout, offload_optimizer=OPTIMIZER_SHARES[0])
        is_able = self.space.target.offloads_optimizer and self.space.is_allowed(one)
        return (0.0, *OPTIMIZER_SHARES) if is_able else (0.0,)

    def offloaded(self, layout: FoldedLayout, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield a layout with as few blocks in host memory as make it fit.

        One for each share of the optimizer: what it frees, activations need not.
        """
        for share in self._shares(layout, pins):
            one = replace(layout, offload_optimizer=share)
            found = one if self.fits(one) else self._with_activations(one, pins)
            if found is not None and self.space.is_allowed(found):
                yield found
            if found == one:
                return

    def _with_activations(self, layout: FoldedLayout, pins: LayoutRequest) -> FoldedLayout | None:
        """Return a layout with the fewest blocks' activations in host memory; None where no fit."""
        if pins.offload_activations is not None:
            return None
        num = self.space.job.decoder.num_layers
        first = replace(layout, offload_activations=1 / num)
        if num == 1 or not self.space.is_allowed(first):
            return None
        low, high = 0, num - 1
        while high - low > 1:
            middle = (low + high) // 2
            one = replace(layout, offload_activations=middle / num)
            low, high = (low, middle) if self._fits_device(one) else (middle, high)
        found = replace(layout, offload_activations=high / num)
        return found if self.fits(found) else None

    def _fits_device(self, layout: FoldedLayout) -> bool:
        return self.memory.needs(layout)[0] <= self.limit_bytes


def repeats(more: Sequence[Recompute], less: Sequence[Recompute]) -> bool:
    """Return whether one list of modules recomputes all that another one does."""
    every = {*more, *(_ALL_OF_EXPERTS if "moe" in more else ())}
    return "full" in more or {*less} <= every
