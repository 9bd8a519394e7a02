"""Seconds of a decoder's blocks under layouts, each computed once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from moetune.domain.architecture import Block
from moetune.domain.experts import RoutedExperts
from moetune.domain.once import Tables, once
from moetune.domain.targets import Target
from moetune.domain.training import Degrees, FoldedLayout, TrainingJob
from moetune.solve.training.alike import AlikeLayers, alike_layers
from moetune.solve.training.block import BlockPrices
from moetune.solve.training.block_times import BlockTimes
from moetune.solve.training.chunks import (
    ChunkedBlock,
    ChunkedPasses,
    Hidden,
    best_degrees,
    chunked_passes,
    hidden_beside,
)
from moetune.solve.training.machine import DevicePrices
from moetune.solve.training.passes import (
    BlockSeconds,
    DevicePasses,
    block_seconds,
    device_passes,
    host_seconds,
    idle_seconds,
    repeats_exchange,
)
from moetune.solve.training.stages import DecoderStages, block_counts

_Key = tuple[object, ...]
_Priced = TypeVar("_Priced")
_NOTHING_HIDDEN = Hidden()


class _OnDevice(NamedTuple):
    """A kind of block: its modules, its passes, and by how long they are longer than the host."""

    times: BlockTimes
    passes: DevicePasses
    slack: float


def _of_exchange(prices: BlockPrices) -> _Key:
    """Return what exchanges, and what is computed beside them, depend on."""
    layout = prices.layout
    return prices.own_tokens, layout.tp, layout.ep, layout.etp, layout.dispatcher


def _shape(layout: FoldedLayout) -> _Key:
    return (
        layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.dispatcher,
        layout.cuda_graphs == "full",
    )  # fmt: skip


def _of_tokens(layout: FoldedLayout) -> _Key:
    return layout.tp, layout.cp, layout.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable(Tables):
    """Blocks of a job on a machine: each kind, and then each block of predictions.

    Those that are alike are priced once.
    """

    job: TrainingJob
    device: DevicePrices
    stages: DecoderStages
    target: Target
    _kinds: tuple[Block, ...] = field(init=False, repr=False)
    _at: tuple[int, ...] = field(init=False, repr=False)
    _local: tuple[Block, ...] = field(init=False, repr=False)
    _local_at: tuple[int, ...] = field(init=False, repr=False)
    _counts: tuple[int, ...] = field(init=False, repr=False)
    _routed: tuple[RoutedExperts | None, ...] = field(init=False, repr=False)
    _alike: tuple[AlikeLayers, ...] = field(init=False, repr=False)

    @once(
        lambda layout: (
            _shape(layout), layout.recompute, layout.overlap, layout.cuda_graphs, layout.degree,
        )
    )  # fmt: skip
    def seconds(self, layout: FoldedLayout) -> tuple[BlockSeconds, ...]:
        """Return the seconds of the blocks for one micro-batch."""
        priced = (self._in_chunks if layout.overlap == "chunks" else self._whole)(layout)
        return tuple(priced[index] for index in self._at)

    def times(self, layout: FoldedLayout) -> tuple[BlockTimes, ...]:
        """Return the blocks' modules for one micro-batch, before recomputation and overlap."""
        every = self._times_of_kinds(layout)
        return tuple(every[index] for index in self._at)

    @once(_shape)
    def _times_of_kinds(self, layout: FoldedLayout) -> tuple[BlockTimes, ...]:
        computed = self._computed_times(layout)
        if not any(self._routed):
            return computed
        return self._with(computed, layout, BlockPrices.sent_times)

    @once(lambda layout: (_of_tokens(layout), layout.ep, layout.etp, layout.cuda_graphs == "full"))
    def _computed_times(self, layout: FoldedLayout) -> tuple[BlockTimes, ...]:
        """Return the times without exchanges."""
        if not any(self._routed):
            return self._local_times(layout)
        return self._with(self._local_times(layout), layout, BlockPrices.expert_times)

    @once(_of_tokens)
    def _local_times(self, layout: FoldedLayout) -> tuple[BlockTimes, ...]:
        """Return the times without the experts."""
        every = [*map(self._prices(layout).local_times, self._local)]
        return tuple(every[index] for index in self._local_at)

    def degree(self, layout: FoldedLayout) -> Degrees | None:
        """Return the layout's degrees, the fastest where it has none; None without chunks."""
        if layout.overlap != "chunks" or layout.degree is not None:
            return layout.degree
        chunked = zip(self._counts, self._chunked(layout, self._on_device(layout)), strict=True)
        is_measured = self.device.costs.is_measured(self.job.element)
        return best_degrees(
            [(count, one) for count, one in chunked if one is not None], are_paired=is_measured
        )

    def most_saved(self, layout: FoldedLayout) -> float:
        """Return the seconds of a micro-batch in the whole model that chunks save at most.

        Those are its exchanges, as far as shared experts do not hide them in one chunk.
        """
        repeats = repeats_exchange(layout)
        every = zip(self._counts, self._times_of_kinds(layout), self._beside(layout), strict=True)
        saved = 0.0
        for count, times, (forward, backward) in every:
            sent = times.passes("exchange")
            both = (1 + repeats) * (sent.forward - forward) + sent.grad_input - backward
            saved += count * both
        return saved

    def __post_init__(self) -> None:
        decoder = self.job.decoder
        every = *decoder.kinds, *(block for one in decoder.predictions for block in one.blocks)
        kinds, at = _distinct(every)
        counts = [0] * len(kinds)
        for index, count in zip(at, block_counts(self.stages.whole, len(at)), strict=True):
            counts[index] += count
        local, local_at = _distinct(kind.with_record(None) for kind in kinds)
        object.__setattr__(self, "_local", local)
        object.__setattr__(self, "_local_at", local_at)
        object.__setattr__(self, "_kinds", kinds)
        object.__setattr__(self, "_at", at)
        object.__setattr__(self, "_counts", tuple(counts))
        object.__setattr__(self, "_routed", tuple(kind.routed for kind in kinds))
        object.__setattr__(self, "_alike", alike_layers(self._routed))

    def _whole(self, layout: FoldedLayout) -> list[BlockSeconds]:
        is_chunked = "chunks" in self.target.overlaps  # whose prices have no such idle time
        return [
            block_seconds(
                times, layout, device=device, overlap_hidden=self.target.overlap_hidden,
                beside=beside,
                slack=slack if is_chunked else min(slack, -idle_seconds(part, layout)),
            )
            for (times, device, slack), beside, part in zip(
                self._on_device(layout), self._beside(layout), self._routed, strict=True
            )
        ]  # fmt: skip

    def _in_chunks(self, layout: FoldedLayout) -> list[BlockSeconds]:
        degree, found, every = self.degree(layout), [], self._on_device(layout)
        for (times, device, slack), chunked, beside in zip(
            every, self._chunked(layout, every), self._beside(layout), strict=True
        ):
            left, saved = slack, (0.0, 0.0)
            if chunked is not None and degree is not None:
                left, saved = slack - chunked.launches(degree), chunked.saved(degree)
            found.append(
                block_seconds(times, layout, device=device, slack=left, saved=saved, beside=beside)
            )
        return found

    def _beside(self, layout: FoldedLayout) -> tuple[Hidden, ...]:
        """Return what each kind's shared experts hide in one chunk, of both passes."""
        if not self.target.shared_beside:
            return (_NOTHING_HIDDEN,) * len(self._routed)
        return self._hidden(self._prices(layout))

    @once(_of_exchange)
    def _hidden(self, prices: BlockPrices) -> tuple[Hidden, ...]:
        every = self._of_parts(prices, hidden_beside)
        return tuple(one or _NOTHING_HIDDEN for one in every)

    def _chunked(
        self, layout: FoldedLayout, on_device: Sequence[_OnDevice]
    ) -> tuple[ChunkedBlock | None, ...]:
        found, repeats = self._passes_in_chunks(self._prices(layout)), repeats_exchange(layout)
        return tuple(
            one and ChunkedBlock(passes=one, slack=slack, repeats=repeats)
            for one, (_, _, slack) in zip(found, on_device, strict=True)
        )

    @once(lambda prices: (_of_exchange(prices), prices.layout.degree))
    def _passes_in_chunks(self, prices: BlockPrices) -> tuple[ChunkedPasses | None, ...]:
        if not prices.exchanges:
            return (None,) * len(self._routed)
        price = partial(chunked_passes, cut=prices.layout.degree)
        found = self._of_parts(prices, price)
        return tuple(found)

    def _prices(self, layout: FoldedLayout) -> BlockPrices:
        return BlockPrices(
            job=self.job,
            layout=layout,
            device=self.device,
            repeats_activations=not self.target.kept_by_experts.activations,
            shared_beside=self.target.shared_beside,
            comm=self.target.comm,
            kernels=self.target.kernels,
        )

    def _with(
        self,
        times: Sequence[BlockTimes],
        layout: FoldedLayout,
        price: Callable[[BlockPrices, RoutedExperts], BlockTimes],
    ) -> tuple[BlockTimes, ...]:
        """Return the times of each kind with a price of its experts; equal ones have the same."""
        every = self._of_parts(self._prices(layout), price)
        return tuple(
            own if added is None else own + added for own, added in zip(times, every, strict=True)
        )

    def _of_parts(
        self,
        prices: BlockPrices,
        price: Callable[[BlockPrices, RoutedExperts], _Priced],
    ) -> list[_Priced | None]:
        """Return a price of each kind's experts; None without any."""
        found: list[_Priced | None] = [None] * len(self._routed)
        for layers in self._alike:
            for place, one in zip(layers.places, layers.priced(prices, price), strict=True):
                found[place] = one
        return found

    def _on_device(self, layout: FoldedLayout) -> list[_OnDevice]:
        every = zip(self._times_of_kinds(layout), self._host_seconds(layout), strict=True)
        found = []
        for times, host in every:
            passes = device_passes(times, layout)
            found.append(_OnDevice(times, passes, passes.forward + passes.backward - host))
        return found

    @once(lambda layout: (layout.tp > 1, layout.ep, layout.recompute, layout.cuda_graphs))
    def _host_seconds(self, layout: FoldedLayout) -> tuple[float, ...]:
        return tuple(
            self.device.host_seconds * host_seconds(kind, layout, self.target, self.job.dtype)
            for kind in self._kinds
        )


def _distinct(blocks: Iterable[Block]) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Return the blocks, of equal ones the first, and the index among them of each."""
    found: dict[Block, int] = {}
    at = tuple(found.setdefault(one, len(found)) for one in blocks)
    return tuple(found), at
