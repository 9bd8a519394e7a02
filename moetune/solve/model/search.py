"""The layouts of a job that a plan chooses among, with their prices and memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moetune.domain.once import Tables
from moetune.domain.routing_record import RecordedLayers
from moetune.domain.site import Site
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.model.fitting import Fitting
from moetune.solve.model.memory import MemoryModel, RankMemory
from moetune.solve.model.space import LayoutSpace
from moetune.solve.model.stages import DecoderStages
from moetune.solve.model.step import StepPrices, StepSeconds

NOISE = 0.01
"""Steps within it of each other tie: one that leaves memory free is taken, then the simpler one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayout:
    """A layout with its step and its fullest pipeline rank.

    Args:
        saved_seconds: of the step, by hidden exchanges; only of a search's answers.
        saved_by_graphs_seconds: as against launching each kernel; only of a search's answers.
        mean_parts: of the step, on the mean of the pipeline ranks; only of a search's answers
            with a pipeline.
    """

    layout: FoldedLayout
    step: StepSeconds
    memory: RankMemory
    saved_seconds: float = 0.0
    saved_by_graphs_seconds: float = 0.0
    mean_parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedSearch(Tables):
    """The layouts of a job.

    Where layers are told apart by their routing, bounds are those of their mean: `prices`, `memory`
    and `job` are of it.

    Args:
        wholes: prices of whole layouts, of which the runtime's rules bound the layouts.
        limit_bytes: usable memory of a device.
        site: the machine, as the runtime's rules ask for it; None where it is not known.
        asks_runtime: as of `LayoutSpace`.
        host_bytes: host memory of one rank.
        memory_of_wholes: of whole layouts.
        space: the layouts that the rules and the target allow.
        fitting: those that fit into memory.
    """

    wholes: StepPrices
    limit_bytes: float
    site: Site | None = None
    asks_runtime: bool = True
    host_bytes: float = float("inf")
    prices: StepPrices = field(init=False)
    memory_of_wholes: MemoryModel = field(init=False, repr=False)
    space: LayoutSpace = field(init=False)
    fitting: Fitting = field(init=False)

    def __post_init__(self) -> None:
        prices = self.wholes
        memory = of_wholes = _memory(prices)
        if isinstance(prices.job.routing, RecordedLayers):
            job = prices.job.alike
            prices = replace(prices, job=job, stages=DecoderStages(job.decoder))
            memory = _memory(prices)
        space = LayoutSpace(
            job=prices.job, target=prices.target, site=self.site, asks_runtime=self.asks_runtime
        )
        fitting = Fitting(
            space=space, memory=memory, limit_bytes=self.limit_bytes, host_bytes=self.host_bytes
        )
        object.__setattr__(self, "prices", prices)
        object.__setattr__(self, "memory_of_wholes", of_wholes)
        object.__setattr__(self, "space", space)
        object.__setattr__(self, "fitting", fitting)

    @property
    def job(self) -> TrainingJob:
        """The job."""
        return self.prices.job

    @property
    def target(self) -> Target:
        """The runtime."""
        return self.prices.target

    @property
    def memory(self) -> MemoryModel:
        """The memory of layouts."""
        return self.fitting.memory

    def priced(self, layout: FoldedLayout) -> PricedLayout:
        """Return a layout with its price and memory, whether it fits or not."""
        step = self.wholes.step(self._cut(layout))
        return PricedLayout(layout=layout, step=step, memory=self.memory_of_wholes.peak(layout))

    def fits(self, layout: FoldedLayout) -> bool:
        """Return whether a layout fits into the memory of the devices and of their host."""
        return self.fitting.fits_into(*self.memory_of_wholes.needs(layout))

    def _cut(self, layout: FoldedLayout) -> FoldedLayout:
        """Return a layout with the degree that is the fastest on the mean of its layers.

        All layers have the same one, and a hundred layers told apart need not be priced in each.
        """
        if layout.overlap != "chunks" or self.prices is self.wholes:
            return layout
        return replace(layout, degree=self.prices.blocks.degree(layout))

    def answer_of(self, priced: PricedLayout) -> PricedLayout:
        """Return an answer with its degree, its parts on all ranks, and what it saves by what."""
        if priced.layout.cuda_graphs != "none":
            launched = self._cut(priced.layout.changed(cuda_graphs="none"))
            saved = self.wholes.step(launched).seconds - priced.step.seconds
            priced = replace(priced, saved_by_graphs_seconds=saved)
        if priced.layout.pp > 1:
            priced = replace(priced, mean_parts=self.wholes.mean_parts(self._cut(priced.layout)))
        if priced.layout.overlap == "none":
            return priced
        plain = replace(priced.layout, overlap="none", degree=None)
        return replace(
            priced,
            layout=replace(priced.layout, degree=self.prices.blocks.degree(priced.layout)),
            saved_seconds=self.wholes.step(plain).seconds - priced.step.seconds,
        )


def _memory(prices: StepPrices) -> MemoryModel:
    return MemoryModel(job=prices.job, stages=prices.stages, target=prices.target)
