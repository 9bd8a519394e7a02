"""Layouts of a decoder's training that fit into memory, without any profile."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.solve.model.memory import MemoryModel
from moetune.solve.model.pins import contradiction
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.rank_memory import ERROR_SHARE, RankMemory, fillable_bytes
from moetune.solve.model.space import Fitting, LayoutSpace

HOST_BYTES = 2 * 2**40 * 9 // 10 // 8
"""Host memory for one of eight GPUs: 2 TiB on a reference machine, minus a tenth."""
GPUS_PER_NODE = 8
MOST_RANKS = 4096
MOST_LAYOUTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """A training, and the GPUs that it has to fit on.

    Args:
        any_job: the training, for any number of GPUs and sequences of a step.
        world_size: GPUs; None for the fewest: a power of two in a node, else whole nodes.
        global_batch: sequences of a step; None for a micro-batch on each GPU.
        device_bytes: memory of one GPU that a process has, as of `process_bytes`.
        error_share: share of predicted bytes that fitting layouts leave free.
    """

    any_job: TrainingJob
    world_size: int | None
    global_batch: int | None
    pins: LayoutRequest
    target: Target
    device_bytes: int
    error_share: float = ERROR_SHARE

    @property
    def limit_bytes(self) -> int:
        """Bytes of a GPU that may be filled, including its libraries."""
        return fillable_bytes(self.device_bytes)

    def job(self, ranks: int) -> TrainingJob:
        """Return the training on `ranks` GPUs."""
        batch = self.global_batch or ranks * (self.pins.micro_batch or 1)
        return replace(self.any_job, world_size=ranks, global_batch=batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLayout:
    """A layout and the memory of its fullest pipeline rank."""

    layout: FoldedLayout
    memory: RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAnswer:
    """Layouts that fit, the plainest first; if none fits, only the smallest.

    Args:
        num_fitting: number of layouts that fit; `layouts` holds the first of them.
    """

    question: MemoryQuestion
    job: TrainingJob
    layouts: tuple[FittedLayout, ...]
    num_fitting: int

    @property
    def fits(self) -> bool:
        """Whether any layout fits."""
        return self.num_fitting > 0


def fit_memory(
    question: MemoryQuestion, *, most_layouts: int | None = MOST_LAYOUTS
) -> MemoryAnswer:
    """Return the layouts that fit, of which `most_layouts` are listed; None lists all.

    Each shape appears with its lowest ZeRO stage and least recomputation, and uses host memory only
    if it does not fit without. On a given number of GPUs no room is left if nothing else fits.

    Raises:
        InputError: the pins break a rule on every number of GPUs.
    """
    if question.world_size is not None:
        answer = _Fit(question, question.world_size).answer(most_layouts)
        if not question.error_share or (answer.fits and not answer.layouts[0].layout.on_host):
            return answer
        full = fit_memory(replace(question, error_share=0.0), most_layouts=most_layouts)
        return answer if answer.fits and full.layouts[0].layout.on_host else full
    last: _Fit | None = None
    for ranks in _numbers_of_gpus():
        fit = _Fit(question, ranks)
        if next(fit.fitting(), None) is not None:
            return fit.answer(most_layouts)
        last = fit if fit.has_shapes else last
    return (last or _Fit(question, MOST_RANKS)).answer(most_layouts)


def _numbers_of_gpus() -> Iterator[int]:
    """Yield numbers of GPUs: parts of a node, and then whole nodes."""
    yield from (2**power for power in range(GPUS_PER_NODE.bit_length() - 1))
    yield from range(GPUS_PER_NODE, MOST_RANKS + 1, GPUS_PER_NODE)


class _Fit:
    """A question's layouts on a number of GPUs."""

    def __init__(self, question: MemoryQuestion, ranks: int) -> None:
        """Make the job; layouts are tried on demand."""
        self._question, self._job = question, question.job(ranks)
        stages = DecoderStages(self._job.decoder)
        memory = MemoryModel(
            job=self._job, stages=stages, target=question.target, error_share=question.error_share
        )
        self._space = LayoutSpace(job=self._job, target=question.target)
        self._fitting = Fitting(
            space=self._space, memory=memory, limit_bytes=question.limit_bytes,
            host_bytes=HOST_BYTES,
        )  # fmt: skip
        self.has_shapes = False

    def answer(self, most_layouts: int | None) -> MemoryAnswer:
        """Return the layouts that fit, else the smallest; InputError if the pins break a rule."""
        fitting = sorted(self.fitting(), key=_plainness)
        layouts = tuple(fitting[:most_layouts])
        if not layouts:
            layouts = (self._smallest(),)
        return MemoryAnswer(
            question=self._question, job=self._job, layouts=layouts, num_fitting=len(fitting)
        )

    def fitting(self) -> Iterator[FittedLayout]:
        """Yield the first way in which each shape fits."""
        for shape in self._shapes():
            self.has_shapes = True
            if not self._may_fit(shape):
                continue
            layout = next(self._ways(shape), None)
            if layout is not None:
                yield FittedLayout(layout=layout, memory=self._fitting.memory.peak(layout))

    def _shapes(self) -> Iterator[FoldedLayout]:
        """Yield shapes with plain pipelines and micro-batches of 1, unless others are pinned."""
        pins = self._question.pins
        plain = replace(
            pins, micro_batch=pins.micro_batch or 1, vpp=pins.vpp if pins.vpp or pins.stages else 1
        )
        able = (
            shape for shape in self._space.shapes(plain) if shape.order == (pins.schedule or "1f1b")
        )
        for _, same in itertools.groupby(
            able, key=lambda shape: (shape.tp, shape.cp, shape.pp, shape.ep, shape.etp)
        ):
            yield next(same)

    def _may_fit(self, shape: FoldedLayout) -> bool:
        """Return whether a shape may fit with the most sharding, recomputation and offloading."""
        fitting, pins = self._fitting, self._question.pins
        if fitting.least_of_states(shape, pins) > fitting.limit_bytes:
            return False
        most = shape.changed(recompute=self._space.recomputes(pins)[-1])
        on_host = 1.0 if self._question.target.offloads_optimizer else 0.0
        least = (
            fitting.memory.needs(most.changed(zero=zero), on_host=on_host)[0]
            for zero in self._space.zeros(pins, shape.pp, shape.tp)
        )
        return self._waits(shape) or min(least) <= fitting.limit_bytes

    def _waits(self, shape: FoldedLayout) -> bool:
        """Return whether activations may be offloaded, if nothing is recomputed."""
        return self._question.target.offloads_activations and shape.pp == 1

    def _ways(self, shape: FoldedLayout) -> Iterator[FoldedLayout]:
        """Yield the ways in which a shape fits, those without host memory first."""
        variants = [*self._variants(shape)]
        yield from filter(self._fitting.fits, variants)
        for variant in variants:
            yield from self._fitting.with_least_offload(variant, self._question.pins)

    def _variants(self, shape: FoldedLayout) -> Iterator[FoldedLayout]:
        """Yield a shape with each allowed ZeRO stage and recomputation."""
        pins = self._question.pins
        for zero in self._space.zeros(pins, shape.pp, shape.tp):
            for recompute in self._space.recomputes(pins):
                variant = shape.changed(zero=zero, recompute=recompute)
                if self._space.is_allowed(variant):
                    yield variant

    def _smallest(self) -> FittedLayout:
        variants = itertools.chain.from_iterable(map(self._variants, self._shapes()))
        layouts = (
            FittedLayout(layout=layout, memory=self._fitting.memory.peak(layout))
            for layout in variants
        )
        smallest = min(layouts, key=lambda layout: layout.memory.peak_bytes, default=None)
        if smallest is None:
            raise contradiction(self._space, self._question.pins)
        return smallest


def _plainness(fitted: FittedLayout) -> tuple[float, ...]:
    """Return the features that a smaller model would not need, and then the memory."""
    layout = fitted.layout
    return (
        layout.offload_optimizer + layout.offload_activations, layout.zero, len(layout.recompute),
        layout.pp, layout.tp * layout.cp, layout.etp, layout.ep, fitted.memory.peak_bytes,
    )  # fmt: skip
