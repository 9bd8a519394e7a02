"""The layouts of a job that a plan chooses among, with their prices and memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from moetune.domain.site import Site
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, LayoutRequest, Recompute, TrainingJob
from moetune.solve.joint.dispatchers import RankedDispatchers
from moetune.solve.joint.fitting import Fitting
from moetune.solve.joint.pins import contradiction
from moetune.solve.joint.space import LayoutSpace
from moetune.solve.joint.ties import PricedLayout
from moetune.solve.training.memory import MemoryModel
from moetune.solve.training.step import StepPrices


class BoundedPipeline(NamedTuple):
    """A pipeline that is not cut yet.

    Args:
        least_bytes: that a device needs at least with each list of modules that it may recompute.
    """

    layout: FoldedLayout
    least_bytes: Mapping[tuple[Recompute, ...], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedSearch:
    """The layouts of a job.

    Args:
        limit_bytes: usable memory of a device.
        target: the runtime, which bounds the layouts.
        host_bytes: host memory of one rank.
        site: the machine, as the runtime's rules ask for it; None where it is not known.
        asks_runtime: as of `LayoutSpace`.
        apart: prices and memory of whole layouts whose layers are told apart by their routing; None
            where layers of a kind are alike. `prices` and `memory` take the mean of such layers.
        space: the layouts that the rules and the target allow.
        fitting: those that fit into memory.
        answers: `BestLayouts` of pins that were asked for.
    """

    job: TrainingJob
    prices: StepPrices
    memory: MemoryModel
    limit_bytes: float
    target: Target
    site: Site | None = None
    asks_runtime: bool = True
    host_bytes: float = float("inf")
    apart: tuple[StepPrices, MemoryModel] | None = None
    space: LayoutSpace = field(init=False)
    fitting: Fitting = field(init=False)
    answers: dict[LayoutRequest, Any] = field(default_factory=dict, init=False, repr=False)
    _sizes: dict[LayoutRequest, tuple[FoldedLayout, ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _tables: dict[tuple[object, ...], RankedDispatchers] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        space = LayoutSpace(
            job=self.job, target=self.target, site=self.site, asks_runtime=self.asks_runtime
        )
        fitting = Fitting(
            space=space, prices=self.prices, memory=self.memory,
            limit_bytes=self.limit_bytes, host_bytes=self.host_bytes,
        )  # fmt: skip
        object.__setattr__(self, "space", space)
        object.__setattr__(self, "fitting", fitting)

    def priced(self, layout: FoldedLayout) -> PricedLayout:
        """Return a layout with its price and memory, whether it fits or not."""
        prices, memory = self.of_wholes
        step = prices.step(self._cut(layout))
        return PricedLayout(layout=layout, step=step, memory=memory.peak(layout))

    def _cut(self, layout: FoldedLayout) -> FoldedLayout:
        """Return a layout with the degrees that are the fastest on the mean of its layers.

        All layers have the same ones, and a hundred layers told apart need not be priced in each.
        """
        if layout.overlap != "chunks" or self.apart is None:
            return layout
        return replace(layout, degree=self.prices.blocks.degree(layout))

    def keeps(self, layout: FoldedLayout) -> bool:
        """Return whether a layout that fits on the mean of its layers fits as it is."""
        return self.apart is None or self.fits(layout)

    @property
    def of_wholes(self) -> tuple[StepPrices, MemoryModel]:
        """Prices and memory of whole layouts."""
        return self.apart or (self.prices, self.memory)

    def smallest(self, pins: LayoutRequest) -> FoldedLayout:
        """Return the layout that takes least memory, of equals the fastest by its bound.

        Nothing is in host memory unless it is pinned.

        Raises:
            InputError: the pins break a rule, or no layout obeys the rules.
            RefusedLayoutError: the runtime would refuse every layout that obeys the pins.
        """
        least, found = (float("inf"), float("inf")), None
        table = self.dispatchers(pins)
        for least_bytes, one, recompute in sorted(self._bounded(pins), key=lambda one: one[0]):
            if least_bytes > least[0]:
                break
            for cut in self.cuts(one, recompute, pins, table):
                needed = self.memory.needs(cut)[0]
                if needed > least[0] or not self.space.is_allowed(cut):
                    continue
                if (needed, self.prices.floor(cut)) < least:
                    least, found = (needed, self.prices.floor(cut)), cut
        if found is None:
            raise contradiction(self.space, pins)
        return found

    def _bounded(
        self, pins: LayoutRequest
    ) -> Iterator[tuple[float, FoldedLayout, tuple[Recompute, ...]]]:
        """Yield bytes that pipelines with each recomputation need at least, and these."""
        for sizes in self.space.sizes(pins):
            overlapped = [*self.space.overlapped(sizes, pins)]
            for one in self.pipelines(overlapped, pins, may_offload=False):
                for recompute, least in one.least_bytes.items():
                    yield least, one.layout, recompute

    def pipelines(
        self, overlapped: Sequence[FoldedLayout], pins: LayoutRequest, *, may_offload: bool
    ) -> Iterator[BoundedPipeline]:
        """Yield the pipelines of sizes with some overlaps.

        Args:
            may_offload: whether what is not pinned may be in host memory.
        """
        recomputes = self.space.recomputes(pins)
        every = [one for sizes in overlapped for one in self.space.pipelines(sizes, pins)]
        bounds = self.fitting.least_bytes(every, recomputes, pins, may_offload=may_offload)
        for one, row in zip(every, bounds.tolist(), strict=True):
            least = dict(zip(recomputes, row, strict=True))
            if self.space.keeps_all(one):
                least = {modules: peak for modules, peak in least.items() if not modules}
            yield BoundedPipeline(one, least)

    def cuts(
        self, layout: FoldedLayout, recompute: tuple[Recompute, ...], pins: LayoutRequest,
        table: RankedDispatchers,
    ) -> Iterator[FoldedLayout]:  # fmt: skip
        """Yield a layout, where it is allowed, with each cut and ZeRO stage.

        It has the fastest dispatcher, whose times balanced stages are cut by.
        """
        able = self.with_fastest(layout, recompute, table)
        for cut in self.fitting.cuts(able, pins) if able else ():
            yield from self.fitting.sharded(cut, pins)

    def with_fastest(
        self, layout: FoldedLayout, recompute: tuple[Recompute, ...], table: RankedDispatchers
    ) -> FoldedLayout | None:
        """Return a layout with its fastest dispatcher; None where it breaks a rule."""
        ranked = table.ranked(layout, recompute)
        if not ranked:
            return None
        able = layout.changed(recompute=recompute, dispatcher=ranked[0].dispatcher)
        return able if self.space.is_allowed(able) else None

    def sizes(self, pins: LayoutRequest) -> Sequence[FoldedLayout]:
        """Return the sizes of the ranks in `space`, as found for earlier questions."""
        key = replace(
            pins, offload_activations=pins.offload_activations or 0.0,
            offload_optimizer=pins.offload_optimizer or 0.0,
        )  # fmt: skip
        found = self._sizes.get(key)
        if found is None:
            found = self._sizes[key] = tuple(self.space.sizes(pins))
        return found

    def dispatchers(self, pins: LayoutRequest) -> RankedDispatchers:
        """Return the dispatchers of its layouts, as ranked by earlier questions."""
        of_dispatcher = pins.dispatcher, pins.cuda_graphs
        found = self._tables.get(of_dispatcher)
        if found is None:
            found = self._tables[of_dispatcher] = RankedDispatchers(
                space=self.space, prices=self.prices, pins=pins
            )
        return found

    def told(self, one: PricedLayout) -> PricedLayout:
        """Return an answer with its degrees, its parts on all ranks, and what it saves by what."""
        prices, _ = self.of_wholes
        if one.layout.cuda_graphs != "none":
            launched = self._cut(one.layout.changed(cuda_graphs="none"))
            saved = prices.step(launched).seconds - one.step.seconds
            one = replace(one, saved_by_graphs_seconds=saved)
        if one.layout.pp > 1:
            one = replace(one, mean_parts=prices.mean_parts(self._cut(one.layout)))
        if one.layout.overlap == "none":
            return one
        plain = replace(one.layout, overlap="none", degree=None)
        return replace(
            one,
            layout=replace(one.layout, degree=self.prices.blocks.degree(one.layout)),
            saved_seconds=prices.step(plain).seconds - one.step.seconds,
        )

    def fits(self, layout: FoldedLayout) -> bool:
        """Return whether a layout fits into the memory of the devices and of their host."""
        return self.fitting.fits_into(*self.of_wholes[1].needs(layout))
