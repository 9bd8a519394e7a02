"""Settings that a layout is tried with: micro-batches, ZeRO and recomputation, and their memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from moetune.domain.constraints import LayoutPins
from moetune.domain.layer import Workload
from moetune.domain.layout import Layout
from moetune.domain.model_plan import ModelMemory
from moetune.solve.layer.memory import layer_memory
from moetune.solve.layout.candidates import Batching
from moetune.solve.layout.chunked import can_chunk
from moetune.solve.layout.space import Batch
from moetune.solve.model.costs import layer_of
from moetune.solve.model.memory import footprint_of, stage_memory
from moetune.solve.model.prices import Prices
from moetune.solve.model.stages import in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """The settings of one layout that the pins allow.

    Args:
        limit_bytes: of a device.
    """

    layout: Layout
    prices: Prices
    batch: Batch
    pins: LayoutPins
    limit_bytes: int

    def memory(self, setting: Batching, *, degrees: tuple[int, int]) -> ModelMemory:
        """Return the bytes on the rank that needs the most.

        Args:
            degrees: of the MoE layer.
        """
        prices, layout = self.prices, self.layout
        footprint = footprint_of(
            model=prices.model,
            tp=layout.tp,
            tokens=setting.sequences * self.batch.length,
            dtype=prices.dtype,
            moe=layer_memory(
                workload=self.workload(setting),
                forward_degree=degrees[0],
                backward_degree=degrees[1],
            ),
            runtime=prices.runtime,
        )
        found = (
            stage_memory(
                stage=stage,
                share=share,
                each=prices.state_bytes,
                footprint=footprint,
                num_in_flight=in_flight(
                    stage=index, num_stages=layout.pp, num_micro_batches=setting.num_micro_batches
                ),
                sharers=(layout.dp, layout.dp // layout.ep) if setting.zero else (1, 1),
                recompute=setting.recompute,
                shards_gradients=prices.runtime.shards_gradients,
            )
            for index, stage, share in prices.shares(layout)
        )
        return max(found, key=lambda memory: memory.total_bytes)

    def workload(self, setting: Batching) -> Workload:
        """Return one MoE layer's work with one micro-batch."""
        prices = self.prices
        return Workload(
            layer=layer_of(prices.model, self.layout.expert_parallel, self.layout.tp),
            world_size=self.layout.expert_ranks,
            tokens_per_rank=setting.sequences * self.batch.length,
            dtype=prices.dtype,
            expert_parallel=self.layout.expert_parallel,
        )

    def first_that_fits(self, sequences: int, *, zero: bool) -> Batching | None:
        """Return what fits in the fewest chunks, if anything; recomputed only where it must be."""
        for recompute in (False, True):
            setting = self.of(sequences, zero=zero, recompute=recompute)
            needed = self.memory(setting, degrees=self.prices.fewest_chunks).total_bytes
            if needed <= self.limit_bytes:
                return setting
        return None

    def of(self, sequences: int, *, zero: bool, recompute: bool) -> Batching:
        """Return the setting with micro-batches of so many sequences."""
        share = self.batch.num_sequences // self.layout.dp
        return Batching(
            sequences=sequences,
            num_micro_batches=share // sequences,
            zero=zero,
            recompute=recompute,
        )

    def sizes(self) -> Sequence[int]:
        """Return the sequences of a micro-batch to try."""
        pins, layout = self.pins, self.layout
        sizes = self.batch.micro_batches(dp=layout.dp, pp=layout.pp)
        return sizes if pins.micro_batch is None else (pins.micro_batch,)

    def zeros(self) -> Sequence[bool]:
        """Return the values of `zero` to try without chunks."""
        pinned = self.pins.zero
        if self.pins.offload:
            return ()
        if self.layout.dp == 1:
            return (False,)
        if can_chunk(self.layout, self.prices):
            return () if pinned else (False,)  # sharded states are chunks there
        return (False, True) if pinned is None else (pinned,)
