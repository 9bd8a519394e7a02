"""Seconds of a decoder's blocks under layouts, each computed once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from moetune.domain.architecture import Block
from moetune.domain.experts import RoutedExperts
from moetune.domain.targets import Target
from moetune.domain.training import Degrees, FoldedLayout, TrainingJob
from moetune.solve.training.alike import AlikeLayers, alike_layers
from moetune.solve.training.block import BlockPrices
from moetune.solve.training.block_times import NO_TIME, BlockTimes
from moetune.solve.training.chunks import (
    ChunkedBlock,
    ChunkedPasses,
    Hidden,
    best_degrees,
    chunked_passes,
    hidden_beside,
    most_saved,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """Blocks of a job on a machine: each kind, and then each block of predictions.

    Those that are alike are priced once.

    Not safe for several threads.
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
    _seconds: dict[_Key, tuple[BlockSeconds, ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _times: dict[_Key, tuple[BlockTimes, ...]] = field(default_factory=dict, init=False, repr=False)
    _local_times: dict[_Key, tuple[BlockTimes, ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _computed_times: dict[_Key, tuple[BlockTimes, ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _host: dict[_Key, tuple[float, ...]] = field(default_factory=dict, init=False, repr=False)
    _chunks: dict[_Key, tuple[ChunkedPasses | None, ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _hidden: dict[_Key, tuple[Hidden, ...]] = field(default_factory=dict, init=False, repr=False)

    def seconds(self, layout: FoldedLayout) -> tuple[BlockSeconds, ...]:
        """Return the seconds of the blocks for one micro-batch."""
        key = *_shape(layout), layout.recompute, layout.overlap, layout.cuda_graphs, layout.degree
        found = self._seconds.get(key)
        if found is None:
            price = self._in_chunks if layout.overlap == "chunks" else self._whole
            priced = price(layout)
            found = self._seconds[key] = tuple(priced[index] for index in self._at)
        return found

    def times(self, layout: FoldedLayout) -> tuple[BlockTimes, ...]:
        """Return the blocks' modules for one micro-batch, before recomputation and overlap."""
        every = self._times_of_kinds(layout)
        return tuple(every[index] for index in self._at)

    def _times_of_kinds(self, layout: FoldedLayout) -> tuple[BlockTimes, ...]:
        shape = _shape(layout)
        found = self._times.get(shape)
        if found is None:
            found = self._times[shape] = self._together(layout)
        return found

    def degree(self, layout: FoldedLayout) -> Degrees | None:
        """Return the layout's degrees, the fastest where it has none; None without chunks."""
        if layout.overlap != "chunks" or layout.degree is not None:
            return layout.degree
        chunked = zip(self._counts, self._chunked(layout, self._on_device(layout)), strict=True)
        is_measured = self.device.costs.gemm_line(dtype=self.job.element) is None
        return best_degrees(
            [(count, one) for count, one in chunked if one is not None], are_paired=is_measured
        )

    def most_saved(self, layout: FoldedLayout) -> float:
        """Return the seconds of a micro-batch in the whole model that chunks save at most."""
        repeats = repeats_exchange(layout)
        every = zip(
            self._counts, self._routed, self._times_of_kinds(layout), self._beside(layout),
            strict=True,
        )  # fmt: skip
        prices = self._prices(layout)
        return sum(
            count
            * most_saved(
                times, repeats=repeats, beside=NO_TIME if part is None else prices.beside(part),
                hidden=sum(hidden) + (hidden[0] if repeats else 0.0),
            )
            for count, part, times, hidden in every
        )  # fmt: skip

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
        prices = self._prices(layout)
        key = _of_exchange(prices)
        found = self._hidden.get(key)
        if found is None:
            every = self._of_parts(prices, hidden_beside, Hidden.split)
            found = self._hidden[key] = tuple(one or _NOTHING_HIDDEN for one in every)
        return found

    def _chunked(
        self, layout: FoldedLayout, on_device: Sequence[_OnDevice]
    ) -> tuple[ChunkedBlock | None, ...]:
        prices = self._prices(layout)
        key = *_of_exchange(prices), layout.degree
        found = self._chunks.get(key)
        if found is None:
            found = self._chunks[key] = self._passes_in_chunks(prices)
        repeats = repeats_exchange(layout)
        return tuple(
            one and ChunkedBlock(passes=one, slack=slack, repeats=repeats)
            for one, (_, _, slack) in zip(found, on_device, strict=True)
        )

    def _passes_in_chunks(self, prices: BlockPrices) -> tuple[ChunkedPasses | None, ...]:
        if not prices.exchanges:
            return (None,) * len(self._routed)
        price = partial(chunked_passes, cut=prices.layout.degree)
        found = self._of_parts(prices, price, ChunkedPasses.split)
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

    def _together(self, layout: FoldedLayout) -> tuple[BlockTimes, ...]:
        """Return the blocks' times, of which layouts share what does not depend on the rest."""
        prices = self._prices(layout)
        key = layout.tp, layout.cp, layout.micro_batch
        local = self._local_times.get(key)
        if local is None:
            every = [*map(prices.local_times, self._local)]
            local = self._local_times[key] = tuple(every[index] for index in self._local_at)
        if not any(self._routed):
            return local
        of_experts = *key, layout.ep, layout.etp, layout.cuda_graphs == "full"
        computed = self._computed_times.get(of_experts)
        if computed is None:
            computed = self._computed_times[of_experts] = self._with(
                local, prices, BlockPrices.expert_times
            )
        return self._with(computed, prices, BlockPrices.sent_times)

    def _with(
        self,
        times: Sequence[BlockTimes],
        prices: BlockPrices,
        price: Callable[[BlockPrices, RoutedExperts], BlockTimes],
    ) -> tuple[BlockTimes, ...]:
        """Return the times of each kind with a price of its experts; equal ones have the same."""
        every = self._of_parts(prices, price, BlockTimes.split)
        return tuple(
            own if added is None else own + added for own, added in zip(times, every, strict=True)
        )

    def _of_parts(
        self,
        prices: BlockPrices,
        price: Callable[[BlockPrices, RoutedExperts], _Priced],
        split: Callable[[_Priced, int], Sequence[_Priced]],
    ) -> list[_Priced | None]:
        """Return a price of each kind's experts; None without any.

        Args:
            price, split: as of `AlikeLayers.priced`.
        """
        found: list[_Priced | None] = [None] * len(self._routed)
        for layers in self._alike:
            for place, one in zip(layers.places, layers.priced(prices, price, split), strict=True):
                found[place] = one
        return found

    def _on_device(self, layout: FoldedLayout) -> list[_OnDevice]:
        every = zip(self._times_of_kinds(layout), self._host_seconds(layout), strict=True)
        found = []
        for times, host in every:
            passes = device_passes(times, layout)
            found.append(_OnDevice(times, passes, passes.forward + passes.backward - host))
        return found

    def _host_seconds(self, layout: FoldedLayout) -> tuple[float, ...]:
        key = layout.tp > 1, layout.ep, layout.recompute, layout.cuda_graphs
        found = self._host.get(key)
        if found is None:
            found = self._host[key] = tuple(
                self.device.host_seconds * host_seconds(kind, layout, self.target, self.job.dtype)
                for kind in self._kinds
            )
        return found


def _distinct(blocks: Iterable[Block]) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Return the blocks, of equal ones the first, and the index among them of each."""
    found: dict[Block, int] = {}
    at = tuple(found.setdefault(one, len(found)) for one in blocks)
    return tuple(found), at


def _of_exchange(prices: BlockPrices) -> _Key:
    """Return what exchanges, and what is computed beside them, depend on."""
    layout = prices.layout
    return prices.own_tokens, layout.tp, layout.ep, layout.etp, layout.dispatcher


def _shape(layout: FoldedLayout) -> _Key:
    return (
        layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.dispatcher,
        layout.cuda_graphs == "full",
    )  # fmt: skip
