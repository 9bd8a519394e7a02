"""Seconds of a decoder's blocks under layouts, each computed once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from moetune.domain.architecture import Block
from moetune.domain.experts import RoutedExperts
from moetune.domain.once import Tables, once
from moetune.domain.samples import GEMM_FORMS
from moetune.domain.targets import Target
from moetune.domain.training import Degrees, FoldedLayout, TrainingJob
from moetune.solve.model.activations import ELEMENT
from moetune.solve.model.block import BlockPrices
from moetune.solve.model.chunks import ChunkedPasses, best_degree, chunked_passes
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.passes import (
    FORWARD_OF_BOTH,
    BlockSeconds,
    BlockTimes,
    DevicePasses,
    Room,
    block_seconds,
    device_passes,
    host_seconds,
    idle_seconds,
    repeats_exchange,
)
from moetune.solve.model.pipeline import DecoderStages, StageBlocks, counted

_MOVED_BY_LOSS = {6: 52, 10: 30, 14: 48}
"""Bytes that a loss moves for each logit in both passes, by the bytes that it keeps
(`logit_bytes`). They are of kernels in Megatron-Core (tensor_parallel/cross_entropy.py,
fusions/fused_cross_entropy.py) and of torch (log_softmax and nll_loss in float32). A loss in one
kernel moves 16."""
_Key = tuple[object, ...]
_Priced = TypeVar("_Priced")


def _shape(layout: FoldedLayout) -> _Key:
    return (
        layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.dispatcher,
        layout.cuda_graphs == "full",
    )  # fmt: skip


def _of_tokens(layout: FoldedLayout) -> _Key:
    return layout.tp, layout.cp, layout.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable(Tables):
    """Blocks of a job: each kind, then each prediction block; equal blocks are priced once."""

    job: TrainingJob
    device: DevicePrices
    stages: DecoderStages
    target: Target
    _kinds: tuple[Block, ...] = field(init=False, repr=False)
    _kind_of: tuple[int, ...] = field(init=False, repr=False)
    _counts: tuple[int, ...] = field(init=False, repr=False)
    _local: tuple[tuple[Block, ...], tuple[int, ...]] = field(init=False, repr=False)
    _routed: tuple[tuple[RoutedExperts | None, ...], tuple[int, ...]] = field(
        init=False, repr=False
    )

    def __post_init__(self) -> None:
        kinds, places = _distinct(self.job.decoder.kinds_and_predictions)
        counts = [0] * len(kinds)
        for count, index in counted(self.stages.whole, places):
            counts[index] += count
        local = _distinct(kind.with_record(None) for kind in kinds)
        routed, derived = _distinct(kind.routed for kind in kinds), (kinds, places, tuple(counts))
        names = ("_kinds", "_kind_of", "_counts", "_local", "_routed")
        for name, value in zip(names, (*derived, local, routed), strict=True):
            object.__setattr__(self, name, value)

    @once(
        lambda layout: (
            _shape(layout), layout.recompute, layout.overlap, layout.cuda_graphs, layout.degree,
        )
    )  # fmt: skip
    def seconds(self, layout: FoldedLayout) -> tuple[BlockSeconds, ...]:
        """Return the seconds of the blocks for one micro-batch."""
        degrees, repeats = self.degree(layout), repeats_exchange(layout)
        chunked: Sequence[ChunkedPasses | None] = (None,) * len(self._kinds)
        if layout.overlap == "chunks":
            chunked = self._passes_in_chunks(layout)
        seconds = []
        parts, places = self._routed
        for place, kind, cut in zip(places, self._on_device(layout), chunked, strict=True):
            slack, saved = kind.slack, (0.0, 0.0)
            if cut is not None and degrees is not None:
                saved = cut.saved(degrees.common, repeats=repeats)
            if not self.target.runs_layer and layout.overlap != "chunks":  # chunks do not idle
                slack = min(slack, -idle_seconds(parts[place], layout))
            seconds.append(
                block_seconds(
                    layout, device=kind._replace(slack=slack), saved=saved,
                    overlap_hidden=self.target.overlap_hidden,
                )
            )  # fmt: skip
        return tuple(seconds[index] for index in self._kind_of)

    @once(_shape)
    def _times_of_kinds(self, layout: FoldedLayout) -> tuple[BlockTimes, ...]:
        local, (_, places) = self._local_times(layout), self._local
        routed = self._of_parts(self._prices(layout), BlockPrices.routed_times)
        return tuple(
            local[place] if experts is None else local[place] + experts
            for place, experts in zip(places, routed, strict=True)
        )

    @once(_of_tokens)
    def _local_times(self, layout: FoldedLayout) -> tuple[BlockTimes, ...]:
        return tuple(map(self._prices(layout).local_times, self._local[0]))

    def degree(self, layout: FoldedLayout) -> Degrees | None:
        """Return the layout's degree, by default the fastest; None without chunks."""
        if layout.overlap != "chunks" or layout.degree is not None:
            return layout.degree
        chunked = zip(self._counts, self._passes_in_chunks(layout), strict=True)
        blocks = [(count, block) for count, block in chunked if block is not None]
        return Degrees.of_both(best_degree(blocks, repeats=repeats_exchange(layout)))

    @once(_of_tokens)
    def ends(self, layout: FoldedLayout) -> tuple[float, float]:
        """Return the seconds of the embedding and of a head for one micro-batch, both passes."""
        decoder, device = self.job.decoder, self.device
        tokens = layout.micro_batch * self.job.length / layout.cp
        vocab = -(-decoder.vocab_size // layout.tp)
        tuning = self.job.tuning
        passes = 1 + tuning.trains("embedding")
        embedding = passes * device.memory_seconds(
            2 * ELEMENT * tokens * decoder.d_model, kernels=2
        )
        gemms = sum(
            device.gemm(product, rows=tokens, d_in=decoder.d_model, d_out=vocab)
            for product in GEMM_FORMS[: None if tuning.trains("head") else -1]
        )
        moved = _MOVED_BY_LOSS.get(self.target.logit_bytes, 16)
        loss = device.memory_seconds(moved * tokens * vocab, kernels=6)
        return embedding, gemms + loss

    def room(self, rank: StageBlocks, layout: FoldedLayout) -> Room:
        """Return a rank's room for overlap: its passes without any communication, hidden or not."""
        embedding, head = self.ends(layout)
        both = rank.has_embedding * embedding + rank.heads(self.job.decoder) * head
        forward, backward = FORWARD_OF_BOTH * both, (1 - FORWARD_OF_BOTH) * both
        for count, block in counted(rank, self.seconds(layout)):
            sent = block.times.communication
            again = sent.forward if "full" in layout.recompute else 0.0
            if not again and repeats_exchange(layout):
                again = block.times.passes("exchange").forward
            forward += count * max(0.0, block.forward - sent.forward)
            backward += count * max(0.0, block.backward - sent.backward - again)
        return Room(forward, backward)

    @once(lambda layout: (_shape(layout), layout.degree))
    def _passes_in_chunks(self, layout: FoldedLayout) -> Sequence[ChunkedPasses | None]:
        if layout.ep == 1:
            return (None,) * len(self._kinds)
        cut = None if layout.degree is None else layout.degree.common
        return self._of_parts(self._prices(layout), partial(chunked_passes, degree=cut))

    def _prices(self, layout: FoldedLayout) -> BlockPrices:
        return BlockPrices(job=self.job, layout=layout, device=self.device, target=self.target)

    def _of_parts(
        self, prices: BlockPrices, price: Callable[[BlockPrices, RoutedExperts], _Priced]
    ) -> list[_Priced | None]:
        """Return the price of each kind's experts; None for kinds without experts."""
        parts, places = self._routed
        priced = [None if part is None else price(prices, part) for part in parts]
        return [priced[index] for index in places]

    def _on_device(self, layout: FoldedLayout) -> list[DevicePasses]:
        kinds = zip(self._times_of_kinds(layout), self._host_seconds(layout), strict=True)
        return [device_passes(times, layout, host=host) for times, host in kinds]

    @once(
        lambda layout: (
            layout.tp > 1, layout.ep, layout.etp, layout.dispatcher, layout.recompute,
            layout.cuda_graphs,
        )
    )  # fmt: skip
    def _host_seconds(self, layout: FoldedLayout) -> tuple[float, ...]:
        device, runs_layer = self.device, self._prices(layout).runs_layer
        routed = device.layer_launch_seconds if runs_layer else None
        return tuple(
            device.host_seconds * host_seconds(kind, layout, self.target, self.job, routed)
            for kind in self._kinds
        )


def _distinct(values: Iterable[_Priced]) -> tuple[tuple[_Priced, ...], tuple[int, ...]]:
    """Return the distinct values in order of appearance, and each value's index among them."""
    numbers: dict[_Priced, int] = {}
    places = tuple(numbers.setdefault(value, len(numbers)) for value in values)
    return tuple(numbers), places
