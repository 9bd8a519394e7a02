"""The layouts of a job that a plan chooses among, with their prices and memory."""

from dataclasses import dataclass, field, replace
from typing import Any

from moetune.domain.recorded_layers import RecordedLayers
from moetune.domain.site import Site
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.solve.joint.fitting import Fitting
from moetune.solve.joint.space import LayoutSpace
from moetune.solve.joint.ties import PricedLayout
from moetune.solve.training.memory import MemoryModel
from moetune.solve.training.stages import DecoderStages
from moetune.solve.training.step import StepPrices


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

    def __post_init__(self) -> None:
        space = LayoutSpace(
            job=self.job, target=self.target, site=self.site, asks_runtime=self.asks_runtime
        )
        fitting = Fitting(
            space=space, memory=self.memory, limit_bytes=self.limit_bytes,
            host_bytes=self.host_bytes,
        )  # fmt: skip
        object.__setattr__(self, "space", space)
        object.__setattr__(self, "fitting", fitting)

    @classmethod
    def of(
        cls, prices: StepPrices, *, limit_bytes: float, site: Site | None = None,
        host_bytes: float = float("inf"), asks_runtime: bool = True,
    ) -> "FoldedSearch":  # fmt: skip
        """Return the search of the layouts of a job that has prices."""
        apart, job, target = None, prices.job, prices.target
        if isinstance(job.routing, RecordedLayers):
            apart = prices, MemoryModel(job=job, stages=prices.stages, target=target)
            job = job.alike
            prices = replace(prices, job=job, stages=DecoderStages(job.decoder))
        return cls(
            job=job, prices=prices, apart=apart, target=target, limit_bytes=limit_bytes,
            memory=MemoryModel(job=job, stages=prices.stages, target=target),
            site=site, host_bytes=host_bytes, asks_runtime=asks_runtime,
        )  # fmt: skip

    def under(self, prices: StepPrices) -> "FoldedSearch":
        """Return the search on the same machine with other prices."""
        return FoldedSearch.of(
            prices, limit_bytes=self.limit_bytes, site=self.site, host_bytes=self.host_bytes,
            asks_runtime=self.asks_runtime,
        )  # fmt: skip

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
