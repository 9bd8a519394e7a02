"""Chunked model states of a layout: sharded over replicas, offloaded where copies were measured.

Only layouts whose replicas are single ranks have them: tp and pp are 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moetune.domain.chunks import pack
from moetune.domain.costs import Costs
from moetune.domain.layout import Layout
from moetune.domain.model_plan import Chunks, ModelMemory
from moetune.domain.units import dtype_bytes
from moetune.solve.chunks.cache import fewest_places
from moetune.solve.chunks.choose import (
    ChunkBudget,
    ChunkChoice,
    Packed,
    choose_chunks,
    pack_modules,
    time_chunks,
)
from moetune.solve.chunks.time import ChunkPrices, ChunkTime
from moetune.solve.chunks.uses import Module, modules_of, timed, uses_of
from moetune.solve.model.groups import Groups
from moetune.solve.model.prices import Priced, Prices


def can_chunk(layout: Layout, prices: Prices) -> bool:
    """Return whether moetune's runtime can keep the states of this layout in chunks."""
    return layout.tp == layout.pp == 1 and prices.runtime.shards_in_chunks


def can_offload(costs: Costs) -> bool:
    """Return whether copies to the host and back were measured."""
    return costs.copy_mode is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunker:
    """Planner of one layout's states in chunks.

    Args:
        limit_bytes: of the device.
        host_bytes: of the host, for one rank; None where unknown.
    """

    prices: Prices
    layout: Layout
    groups: Groups
    limit_bytes: int
    host_bytes: int | None

    def choose(
        self, *, priced: Priced, others: ModelMemory, offload: bool, recompute: bool
    ) -> ChunkChoice | None:
        """Return the best chunks and cache; None where they do not fit.

        Args:
            others: activations and buffers of the same setting; its states are ignored.

        Raises:
            ProfileError: a copy or a collective was not measured.
        """
        budget, prices = self._budget(others), self._prices(offload=offload)
        modules = self._modules()
        packed = pack_modules(modules, prices=prices, each=self.prices.state_bytes, budget=budget)
        return choose_chunks(
            timed(modules, model=self.prices.model, priced=priced),
            packed,
            prices=prices,
            budget=budget,
            recompute=recompute,
        )

    def time(self, choice: ChunkChoice, *, priced: Priced, recompute: bool) -> ChunkTime:
        """Return the time with the chunks and the cache of a choice.

        Raises:
            ProfileError: a copy or a collective was not measured.
        """
        modules, size = self._modules(), choice.chunks.chunk_bytes
        offload = choice.chunks.offload
        parameters = [parameter for module in modules for parameter in module.parameters]
        packed = Packed(
            chunks=self.prices.structure.once(
                ("packed", self.layout.dp, self.layout.ep, size),
                lambda: pack(parameters, chunk_bytes=size),
            ),
            chunk_bytes=size,
            each=self.prices.state_bytes,
            offload=offload,
            pins_host=self._prices(offload=offload).pins_host,
        )
        return time_chunks(
            timed(modules, model=self.prices.model, priced=priced),
            packed,
            prices=self._prices(offload=offload),
            num_places=choice.num_places,
            recompute=recompute,
        )

    def least(self, *, others: ModelMemory, offload: bool) -> tuple[ModelMemory, int]:
        """Return the least memory on the device, and the bytes on the host."""
        modules = self._modules()
        parameters = [parameter for module in modules for parameter in module.parameters]
        largest = max(one.num_elements for one in parameters) * dtype_bytes(self.prices.dtype)
        packed = Packed(
            chunks=pack(parameters, chunk_bytes=largest),
            chunk_bytes=largest,
            each=self.prices.state_bytes,
            offload=offload,
            pins_host=self._prices(offload=offload).pins_host,
        )
        fewest = fewest_places(uses_of(modules, packed.moving, recompute=False))
        return packed.memory(fewest, self._budget(others)), packed.host_bytes

    def replicated(self) -> Chunks:
        """Return the chunks in which gradients travel where every rank has all states."""
        prices = replace(self._prices(offload=False), scatter=False)
        packed = pack_modules(
            self._modules(), prices=prices, each=self.prices.state_bytes, budget=None
        )
        return Chunks(
            chunk_bytes=packed.chunk_bytes,
            cache_bytes=max(len(packed.moving), fewest_places(())) * packed.chunk_bytes,
            scatter=False,
            offload=False,
        )

    def _modules(self) -> Sequence[Module]:
        return self.prices.structure.once(
            ("modules", self.layout.dp, self.layout.ep),
            lambda: modules_of(self.prices.model, layout=self.layout, dtype=self.prices.dtype),
        )

    def _prices(self, *, offload: bool) -> ChunkPrices:
        return ChunkPrices(
            costs=self.prices.costs, groups=self.groups, dtype=self.prices.dtype, offload=offload
        )

    def _budget(self, others: ModelMemory) -> ChunkBudget:
        taken = others.activation_bytes + others.buffer_bytes
        return ChunkBudget(
            device_bytes=self.limit_bytes - taken,
            host_bytes=self.host_bytes,
            activation_bytes=others.activation_bytes,
            buffer_bytes=others.buffer_bytes,
        )
