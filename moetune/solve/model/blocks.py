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
from moetune.solve.model.block import BlockPrices
from moetune.solve.model.chunks import (
    ChunkedBlock,
    ChunkedPasses,
    best_degree,
    chunked_passes,
    hidden_beside,
)
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.passes import (
    BlockSeconds,
    BlockTimes,
    DevicePasses,
    block_seconds,
    device_passes,
    host_seconds,
    idle_seconds,
    repeats_exchange,
)
from moetune.solve.model.stages import DecoderStages, block_counts

_Key = tuple[object, ...]
_Priced = TypeVar("_Priced")


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
    _counts: tuple[int, ...] = field(init=False, repr=False)
    _local: tuple[tuple[Block, ...], tuple[int, ...]] = field(init=False, repr=False)
    _routed: tuple[tuple[RoutedExperts | None, ...], tuple[int, ...]] = field(
        init=False, repr=False
    )

    def __post_init__(self) -> None:
        kinds, at = _distinct(self.job.decoder.kinds_and_predictions)
        counts = [0] * len(kinds)
        for index, count in zip(at, block_counts(self.stages.whole, len(at)), strict=True):
            counts[index] += count
        object.__setattr__(self, "_kinds", kinds)
        object.__setattr__(self, "_at", at)
        object.__setattr__(self, "_counts", tuple(counts))
        object.__setattr__(self, "_local", _distinct(kind.with_record(None) for kind in kinds))
        object.__setattr__(self, "_routed", _distinct(kind.routed for kind in kinds))

    @once(
        lambda layout: (
            _shape(layout), layout.recompute, layout.overlap, layout.cuda_graphs, layout.degree,
        )
    )  # fmt: skip
    def seconds(self, layout: FoldedLayout) -> tuple[BlockSeconds, ...]:
        """Return the seconds of the blocks for one micro-batch."""
        degrees, is_chunked = self.degree(layout), layout.overlap == "chunks"
        on_device = self._on_device(layout)
        nothing: Sequence[ChunkedBlock | None] = (None,) * len(on_device)
        chunked = self._chunked(layout, on_device) if is_chunked else nothing
        # Prices of runtimes that chunk have no such idle time.
        has_idle = not is_chunked and "chunks" not in self.target.overlaps
        found = []
        parts, at = self._routed
        for place, one, cut, beside in zip(
            at, on_device, chunked, self._beside(layout), strict=True
        ):
            slack, saved = one.slack, (0.0, 0.0)
            if cut is not None and degrees is not None:
                slack = slack - cut.launches(degrees.common)
                saved = cut.saved(degrees.common)
            if has_idle:
                slack = min(slack, -idle_seconds(parts[place], layout))
            found.append(
                block_seconds(
                    one.times, layout, device=one.passes, slack=slack, saved=saved, beside=beside,
                    overlap_hidden=self.target.overlap_hidden,
                )
            )  # fmt: skip
        return tuple(found[index] for index in self._at)

    @once(_shape)
    def _times_of_kinds(self, layout: FoldedLayout) -> tuple[BlockTimes, ...]:
        return self._with(self._computed_times(layout), layout, BlockPrices.sent_times)

    @once(lambda layout: (_of_tokens(layout), layout.ep, layout.etp, layout.cuda_graphs == "full"))
    def _computed_times(self, layout: FoldedLayout) -> tuple[BlockTimes, ...]:
        """Return the times without exchanges."""
        return self._with(self._local_times(layout), layout, BlockPrices.expert_times)

    @once(_of_tokens)
    def _local_times(self, layout: FoldedLayout) -> tuple[BlockTimes, ...]:
        """Return the times without the experts."""
        blocks, at = self._local
        every = [*map(self._prices(layout).local_times, blocks)]
        return tuple(every[index] for index in at)

    def degree(self, layout: FoldedLayout) -> Degrees | None:
        """Return the layout's degree, the fastest where it has none; None without chunks."""
        if layout.overlap != "chunks" or layout.degree is not None:
            return layout.degree
        chunked = zip(self._counts, self._chunked(layout, self._on_device(layout)), strict=True)
        return Degrees.of_both(
            best_degree([(count, one) for count, one in chunked if one is not None])
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

    def _beside(self, layout: FoldedLayout) -> tuple[tuple[float, float], ...]:
        """Return what each kind's shared experts hide in one chunk, of both passes."""
        if not self.target.shared_beside:
            return ((0.0, 0.0),) * len(self._kinds)
        return self._hidden(self._prices(layout))

    @once(_of_exchange)
    def _hidden(self, prices: BlockPrices) -> tuple[tuple[float, float], ...]:
        return tuple(one or (0.0, 0.0) for one in self._of_parts(prices, hidden_beside))

    def _chunked(
        self, layout: FoldedLayout, on_device: Sequence[_OnDevice]
    ) -> tuple[ChunkedBlock | None, ...]:
        found, repeats = self._passes_in_chunks(self._prices(layout)), repeats_exchange(layout)
        return tuple(
            one and ChunkedBlock(passes=one, slack=slack, repeats=repeats)
            for one, (_, _, slack) in zip(found, on_device, strict=True)
        )

    @once(lambda prices: (_of_exchange(prices), prices.layout.degree))
    def _passes_in_chunks(self, prices: BlockPrices) -> Sequence[ChunkedPasses | None]:
        if not prices.exchanges:
            return (None,) * len(self._kinds)
        degrees = prices.layout.degree
        cut = None if degrees is None else degrees.common
        return self._of_parts(prices, partial(chunked_passes, degree=cut))

    def _prices(self, layout: FoldedLayout) -> BlockPrices:
        return BlockPrices(job=self.job, layout=layout, device=self.device, target=self.target)

    def _with(
        self,
        times: Sequence[BlockTimes],
        layout: FoldedLayout,
        price: Callable[[BlockPrices, RoutedExperts], BlockTimes],
    ) -> tuple[BlockTimes, ...]:
        """Return the times of each kind with a price of its experts."""
        every = self._of_parts(self._prices(layout), price)
        return tuple(
            own if added is None else own + added for own, added in zip(times, every, strict=True)
        )

    def _of_parts(
        self, prices: BlockPrices, price: Callable[[BlockPrices, RoutedExperts], _Priced]
    ) -> list[_Priced | None]:
        """Return a price of each kind's experts; None without any."""
        parts, at = self._routed
        priced = [None if part is None else price(prices, part) for part in parts]
        return [priced[index] for index in at]

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


def _distinct(values: Iterable[_Priced]) -> tuple[tuple[_Priced, ...], tuple[int, ...]]:
    """Return the values, of equal ones the first, and the index among them of each."""
    found: dict[_Priced, int] = {}
    at = tuple(found.setdefault(one, len(found)) for one in values)
    return tuple(found), at
