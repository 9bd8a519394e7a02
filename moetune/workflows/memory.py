"""Layouts of a decoder's training that fit into memory, without any profile."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moetune.domain.architecture import Decoder
from moetune.domain.cluster import plannable
from moetune.domain.errors import InputError
from moetune.domain.optimizers import OptimizerName
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingDtype, TrainingJob
from moetune.solve.joint.pins import contradiction
from moetune.solve.joint.space import LayoutSpace
from moetune.solve.training.memory import RankMemory
from moetune.solve.training.stages import DecoderStages
from moetune.workflows.training import memory_model

MOST_RANKS = 4096
MOST_LAYOUTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """A training, and the GPUs that it has to fit on.

    Args:
        world_size: GPUs; None for the fewest, a power of two.
        global_batch: sequences of a step; None for one on each GPU.
        length: tokens of a sequence.
        device_bytes: memory of one GPU that a process has, as of `process_bytes`.
    """

    decoder: Decoder
    world_size: int | None
    global_batch: int | None
    length: int
    dtype: TrainingDtype
    optimizer: OptimizerName
    pins: LayoutRequest
    target: Target
    device_bytes: int

    @property
    def limit_bytes(self) -> int:
        """Bytes of a GPU that may be filled."""
        return plannable(self.device_bytes)

    def job(self, ranks: int) -> TrainingJob:
        """Return the training on so many GPUs."""
        return TrainingJob(
            decoder=self.decoder, world_size=ranks, global_batch=self.global_batch or ranks,
            length=self.length, dtype=self.dtype, optimizer=self.optimizer,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLayout:
    """A layout and the memory of its fullest pipeline rank."""

    layout: FoldedLayout
    memory: RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAnswer:
    """Layouts that fit, the plainest first; where none does, the smallest alone.

    Args:
        num_fitting: layouts that fit, of which `found` has the first.
    """

    question: MemoryQuestion
    job: TrainingJob
    found: tuple[FittedLayout, ...]
    num_fitting: int

    @property
    def fits(self) -> bool:
        """Whether any layout fits."""
        return self.num_fitting > 0


def fit_memory(
    question: MemoryQuestion, *, most_layouts: int | None = MOST_LAYOUTS
) -> MemoryAnswer:
    """Return the layouts that fit: of each shape the lowest ZeRO stage, and the least recomputed.

    Args:
        most_layouts: that are returned; None for all.

    Raises:
        InputError: the pins break a rule on every number of GPUs.
    """
    if question.world_size is not None:
        return _fit(question, question.world_size, most_layouts)
    last: MemoryAnswer | None = None
    problem: InputError | None = None
    ranks = 1
    while ranks <= MOST_RANKS:
        try:
            last = _fit(question, ranks, most_layouts)
        except InputError as error:  # such as more stages than GPUs
            problem = error
        if last is not None and last.fits:
            return last
        ranks *= 2
    if last is None:
        raise problem or InputError("no layout obeys the rules", "pin less of it")
    return last


def _fit(question: MemoryQuestion, ranks: int, most_layouts: int | None) -> MemoryAnswer:
    job = question.job(ranks)
    memory = memory_model(job, question.target, DecoderStages(question.decoder))
    space = LayoutSpace(job=job, target=question.target)
    fitting: list[FittedLayout] = []
    smallest: FittedLayout | None = None
    for layout in _layouts(space, question.pins):
        for one in _kept(space, question.pins, layout):
            found = FittedLayout(layout=one, memory=memory.peak(one))
            if smallest is None or found.memory.peak_bytes < smallest.memory.peak_bytes:
                smallest = found
            if found.memory.peak_bytes <= question.limit_bytes:
                fitting.append(found)
                break
    if smallest is None:
        raise contradiction(space, question.pins)
    fitting.sort(key=_plainness)
    found_layouts = tuple(fitting[:most_layouts]) or (smallest,)
    return MemoryAnswer(question=question, job=job, found=found_layouts, num_fitting=len(fitting))


def _layouts(space: LayoutSpace, pins: LayoutRequest) -> Iterator[FoldedLayout]:
    """Yield the shapes with plain pipelines and micro-batches of one, unless others are pinned."""
    plain = replace(
        pins,
        micro_batch=pins.micro_batch or 1,
        vpp=pins.vpp if pins.vpp or pins.stages else 1,
    )
    able = (one for one in space.shapes(plain) if one.order == (pins.schedule or "1f1b"))
    for _, same in itertools.groupby(
        able, key=lambda one: (one.tp, one.cp, one.pp, one.ep, one.etp)
    ):
        yield next(same)


def _kept(space: LayoutSpace, pins: LayoutRequest, layout: FoldedLayout) -> Iterator[FoldedLayout]:
    """Yield a shape with each ZeRO stage and recomputation that are allowed, the least first."""
    for zero in space.zeros(pins, layout.pp, layout.tp):
        for recompute in space.recomputes(pins):
            one = replace(layout, zero=zero, recompute=recompute)
            if space.is_allowed(one):
                yield one


def _plainness(one: FittedLayout) -> tuple[float, ...]:
    """Return how much a layout has that a smaller model would leave out, then its memory."""
    layout = one.layout
    return (
        layout.zero, len(layout.recompute), layout.pp, layout.tp * layout.cp, layout.etp, layout.ep,
        one.memory.peak_bytes,
    )  # fmt: skip
