"""Search over layouts: each tried with every micro-batch, ZeRO, recomputation and chunks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetune.domain.cluster import HEADROOM
from moetune.domain.constraints import LayoutPins
from moetune.domain.costs import Estimate
from moetune.domain.errors import ProfileError
from moetune.domain.layout import Layout
from moetune.domain.model_plan import ModelMemory
from moetune.solve.chunks.choose import ChunkChoice
from moetune.solve.layer.choose import NOISE
from moetune.solve.layer.operations import NOTHING
from moetune.solve.layout.candidates import Batching, Candidate, SearchResult, Unfit
from moetune.solve.layout.chunked import Chunker, can_chunk, can_offload
from moetune.solve.layout.settings import LayoutSettings
from moetune.solve.layout.space import Batch
from moetune.solve.model.exposed import exposed_gradients
from moetune.solve.model.groups import Groups
from moetune.solve.model.prices import Priced, Prices
from moetune.solve.model.stages import one_f_one_b
from moetune.solve.runtime import MOETUNE


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSearch:
    """A model, its batch and pins, and its memory limits.

    Args:
        host_bytes: of the host, for one rank; None where unknown.
    """

    prices: Prices
    batch: Batch
    pins: LayoutPins
    limit_bytes: int
    host_bytes: int | None = None

    def trial(self, layout: Layout) -> "LayoutTrial":
        """Return the trial of one layout."""
        return LayoutTrial(search=self, layout=layout, groups=self.prices.groups(layout))

    def ranked(self, among: Sequence[Candidate]) -> list[Candidate]:
        """Return candidates by time; where the first leaves little memory, one that ties leads."""
        found = sorted(among, key=lambda one: one.order)
        roomy = self.limit_bytes * (1 - HEADROOM)
        for at, one in enumerate(found):
            if one.seconds > found[0].seconds * (1 + NOISE):
                break
            if one.memory.total_bytes <= roomy:
                return [one, *found[:at], *found[at + 1 :]]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTrial:
    """One layout, tried with every micro-batch."""

    search: LayoutSearch
    layout: Layout
    groups: Groups

    def candidates(self) -> Iterator[Candidate]:
        """Yield what fits; blocks are recomputed only where they must be.

        Raises:
            ProfileError: an operation was not measured.
        """
        for sequences in self.settings.sizes():
            fits = False
            for candidate in self._ways(sequences):
                fits = True
                yield candidate
            if not fits:
                return  # more sequences take more memory

    def _ways(self, sequences: int) -> Iterator[Candidate]:
        """Yield what fits with so many sequences.

        States are offloaded where they do not fit, or where they leave so little memory that the
        step is slower: by a cache that gathers chunks twice, or by recomputed blocks.
        """
        on_device = list[Candidate]()
        for zero in self.settings.zeros():
            setting = self.settings.first_that_fits(sequences, zero=zero)
            if setting is not None:
                on_device.append(self.timed(setting))
        ways = self._chunk_ways()
        if False in ways:
            on_device += self._first_chunked(sequences)
        yield from on_device
        if True not in ways or any(one.keeps_everything for one in on_device):
            return
        fastest = min((one.seconds for one in on_device), default=math.inf)
        for recompute in (False, True):
            found = self._chunked(sequences, offload=True, recompute=recompute)
            if found is not None and found.seconds < (1 - NOISE) * fastest:
                yield found

    def _first_chunked(self, sequences: int) -> list[Candidate]:
        """Return chunks on the device; blocks are recomputed only where they must be."""
        for recompute in (False, True):
            found = self._chunked(sequences, offload=False, recompute=recompute)
            if found is not None:
                return [found]
        return []

    def smallest(self) -> Unfit:
        """Return the setting with the least memory."""
        setting = self.settings.of(
            min(self.settings.sizes()), zero=self.settings.zeros()[-1:] == (True,), recompute=True
        )
        memory = self.settings.memory(setting, degrees=self.search.prices.fewest_chunks)
        found = [Unfit(layout=self.layout, setting=setting, memory=memory)]
        host_bytes = 0
        for offload in self._chunk_ways():
            least, taken = self.chunker.least(others=memory, offload=offload)
            if taken > (taken if self.search.host_bytes is None else self.search.host_bytes):
                host_bytes = taken
                continue
            setting = replace(setting, chunked=True, zero=self.layout.dp > 1, offload=offload)
            found.append(Unfit(layout=self.layout, setting=setting, memory=least))
        best = min(found, key=lambda one: one.memory.total_bytes)
        return replace(best, host_bytes=host_bytes)

    @property
    def settings(self) -> LayoutSettings:
        """The settings that the layout is tried with."""
        search = self.search
        return LayoutSettings(
            layout=self.layout,
            prices=search.prices,
            batch=search.batch,
            pins=search.pins,
            limit_bytes=search.limit_bytes,
        )

    @property
    def chunker(self) -> Chunker:
        """The planner of this layout's chunks."""
        search = self.search
        return Chunker(
            prices=search.prices,
            layout=self.layout,
            groups=self.groups,
            limit_bytes=search.limit_bytes,
            host_bytes=search.host_bytes,
        )

    def _chunk_ways(self) -> tuple[bool, ...]:
        """Return the values of `offload` to try with states in chunks; none without chunks."""
        prices, pins, dp = self.search.prices, self.search.pins, self.layout.dp
        is_whole = dp > 1 and pins.zero is False
        if is_whole or not can_chunk(self.layout, prices):
            return ()
        ways = (False,) if dp > 1 and not pins.offload else ()
        offloads = pins.offload is not False and can_offload(prices.costs)
        return (*ways, True) if offloads else ways

    def _chunked(self, sequences: int, *, offload: bool, recompute: bool) -> Candidate | None:
        setting = self.settings.of(sequences, zero=self.layout.dp > 1, recompute=recompute)
        return self._in_chunks(replace(setting, chunked=True, offload=offload))

    def _in_chunks(self, setting: Batching) -> Candidate | None:
        """Return the candidate with its states in chunks; None where they do not fit."""
        priced = self._priced(setting)
        choice = self.chunker.choose(
            priced=priced,
            others=self.settings.memory(setting, degrees=priced.moe.step.degrees),
            offload=setting.offload,
            recompute=setting.recompute,
        )
        if choice is None and not setting.one_chunk and max(priced.moe.step.degrees) > 1:
            return self._in_chunks(replace(setting, one_chunk=True))
        if choice is None:
            return None
        return self._with_chunks(setting, priced, choice)

    def _with_chunks(self, setting: Batching, priced: Priced, choice: ChunkChoice) -> Candidate:
        (stage,) = self.search.prices.stages(1)
        busy, count = (
            priced.seconds.stage(stage, recompute=setting.recompute),
            setting.num_micro_batches,
        )
        exposed = max(0.0, choice.time.seconds - busy)
        return Candidate(
            layout=self.layout,
            setting=setting,
            priced=priced,
            pipeline=one_f_one_b(stage_seconds=[busy], hop_seconds=[], num_micro_batches=count),
            hops=(),
            gradients=NOTHING,
            optimizer=NOTHING._replace(seconds=choice.time.added_seconds(count)),
            memory=choice.memory,
            transfers=choice.trust._replace(seconds=count * exposed),
            chunks=choice,
        )

    def timed(self, setting: Batching) -> Candidate:
        """Return the candidate, with the MoE layer in one chunk where more does not fit."""
        priced = self._priced(setting)
        memory = self.settings.memory(setting, degrees=priced.moe.step.degrees)
        if memory.total_bytes > self.search.limit_bytes and not setting.one_chunk:
            return self.timed(replace(setting, one_chunk=True))
        return self._without_chunks(setting, priced, memory)

    def _without_chunks(self, setting: Batching, priced: Priced, memory: ModelMemory) -> Candidate:
        prices, layout = self.search.prices, self.layout
        tokens = setting.sequences * self.search.batch.length
        hops = tuple(
            prices.send(hop=hop, tensor=self.groups.tensor, tokens=tokens)
            for hop in self.groups.hops
        )
        return Candidate(
            layout=layout,
            setting=setting,
            priced=priced,
            pipeline=one_f_one_b(
                stage_seconds=[
                    priced.seconds.stage(stage, recompute=setting.recompute)
                    for stage in prices.stages(layout.pp)
                ],
                hop_seconds=[hop.seconds for hop in hops],
                num_micro_batches=setting.num_micro_batches,
            ),
            hops=hops,
            gradients=self._gradients(setting, priced),
            optimizer=prices.optimizer(layout=layout, zero=setting.zero),
            accumulation=prices.accumulation(
                layout=layout, num_backward_passes=setting.num_micro_batches
            ),
            memory=memory,
        )

    def _gradients(self, setting: Batching, priced: Priced) -> Estimate:
        """Return what is exposed of the gradients.

        Of whole replicas that exchange tokens all of them: DDP's buckets compete with the exchanges
        for the link. All at the end were 0.92 to 1.09 times as fast ("Withdrawn", b).
        """
        prices, layout = self.search.prices, self.layout
        if _exchanges_whole(layout, prices) and not setting.zero:
            return prices.gradients(
                layout=layout, groups=self.groups, zero=False,
                num_micro_batches=setting.num_micro_batches,
            )  # fmt: skip
        return exposed_gradients(
            prices, priced, layout=layout, groups=self.groups, zero=setting.zero,
            recompute=setting.recompute, num_micro_batches=setting.num_micro_batches,
        )  # fmt: skip

    def timed_again(self, one: Candidate) -> Candidate:
        """Return this layout's candidate with the search's prices and its own decisions.

        Raises:
            ProfileError: an operation was not measured.
        """
        setting, priced = one.setting, self._priced(one.setting)
        if one.chunks is None:
            return self._without_chunks(setting, priced, one.memory)
        time = self.chunker.time(one.chunks, priced=priced, recompute=setting.recompute)
        return self._with_chunks(setting, priced, replace(one.chunks, time=time))

    def _priced(self, setting: Batching) -> Priced:
        return self.search.prices.priced(
            layout=self.layout,
            groups=self.groups,
            sequences=setting.sequences,
            one_chunk=setting.one_chunk,
        )


def _exchanges_whole(layout: Layout, prices: Prices) -> bool:
    """Return whether ranks with whole models exchange tokens, under moetune's layers."""
    return layout.tp == layout.pp == 1 < layout.ep and prices.runtime is MOETUNE


def try_all(search: LayoutSearch, layouts: Sequence[Layout]) -> SearchResult:
    """Return every layout at its best."""
    best: list[Candidate] = []
    unfit: list[Unfit] = []
    unpriced: list[tuple[Layout, ProfileError]] = []
    for layout in layouts:
        trial = search.trial(layout)
        try:
            found = search.ranked(list(trial.candidates()))
        except ProfileError as error:
            unpriced.append((layout, error))
            continue
        if found:
            best.append(found[0])
        else:
            unfit.append(trial.smallest())
    return SearchResult(
        best=tuple(search.ranked(best)),
        unfit=tuple(sorted(unfit, key=lambda one: one.memory.total_bytes)),
        unpriced=tuple(unpriced),
    )
