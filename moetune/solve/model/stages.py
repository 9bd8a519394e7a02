"""Stages of a pipeline: the blocks, ends and parameters that each stage and each rank has."""

import heapq
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from moetune.domain.architecture import Block, Decoder
from moetune.domain.attention import LatentAttention
from moetune.domain.experts import RoutedExperts
from moetune.domain.once import Tables, once
from moetune.domain.pipeline import StageLetters, rank_of_stage, stages_of_sizes
from moetune.domain.training import FoldedLayout

_ALONE = FoldedLayout()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """Blocks of the model, embedding and head in a stage, or in all stages of a rank.

    Args:
        counts: number of blocks of each of `Decoder.kinds`.
        has_embedding, has_head: whether they are in it.
        has_predictions: whether the blocks of multi-token prediction are.
    """

    counts: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    has_predictions: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBlocks(StageBlocks):
    """Blocks of pipeline ranks that have the same.

    Args:
        ranks: the pipeline ranks, ascending.
    """

    ranks: tuple[int, ...]


class Cut(NamedTuple):
    """Stages of a pipeline.

    Args:
        distinct: the stages, of equal ones the first.
        which: the index of each stage in `distinct`.
    """

    distinct: tuple[StageBlocks, ...]
    which: tuple[int, ...]


class Parameters(NamedTuple):
    """Parameters on one device: all but the experts, and the experts."""

    dense: float
    experts: float


def _sizes(layout: FoldedLayout) -> tuple[int, int, int]:
    """Return what a block's parameters depend on."""
    return layout.tp, layout.ep, layout.etp


@dataclass(frozen=True, slots=True)
class DecoderStages(Tables):
    """A decoder's stages."""

    decoder: Decoder

    @property
    def whole(self) -> RankBlocks:
        """The blocks of all, as one rank."""
        [whole] = self.ranks(_ALONE)
        return whole

    @once(lambda layout: (layout.num_stages, layout.stages))
    def cut(self, layout: FoldedLayout) -> Cut:
        """Return the blocks of each stage."""
        stages = self._stages(layout.stages_of(self.decoder))
        distinct: dict[StageBlocks, int] = {}
        which = tuple(distinct.setdefault(one, len(distinct)) for one in stages)
        return Cut(tuple(distinct), which)

    @once(lambda layout: (layout.pp, layout.vpp, layout.order, layout.stages))
    def ranks(self, layout: FoldedLayout) -> tuple[RankBlocks, ...]:
        """Return the blocks of the pipeline ranks; ranks with the same are one."""
        return _by_rank(self.cut(layout), layout)

    @once(lambda layout, rank: (_sizes(layout), rank))
    def parameters(self, layout: FoldedLayout, rank: StageBlocks) -> Parameters:
        """Return a pipeline rank's parameters on one device."""
        decoder = self.decoder
        table = decoder.vocab_size * decoder.d_model / layout.tp
        tables = rank.has_embedding + (rank.has_head or rank.has_predictions)
        dense, experts = table * tables, 0.0
        blocks = self.parameters_of_blocks(layout)
        for count, block in zip(block_counts(rank, len(blocks)), blocks, strict=True):
            dense, experts = dense + count * block.dense, experts + count * block.experts
        if rank.has_predictions:
            dense += sum(one.projection for one in decoder.predictions) / layout.tp
        return Parameters(dense, experts)

    @once(_sizes)
    def parameters_of_blocks(self, layout: FoldedLayout) -> tuple[Parameters, ...]:
        """Return the parameters of each kind of block, then of each of multi-token prediction."""
        tp, experts_cut = layout.tp, layout.ep * layout.etp
        amounts = map(_amounts, self.decoder.kinds_and_predictions)
        return tuple(
            Parameters(whole + shared / tp, experts / experts_cut)
            for whole, shared, experts in amounts
        )

    def _stages(self, letters: StageLetters) -> list[StageBlocks]:
        order, kinds = self.decoder.kind_of_block, range(len(self.decoder.kinds))
        found, first = [], 0
        for word in letters:
            size = word.count("t")
            counts = Counter(order[first : first + size])
            first += size
            found.append(
                StageBlocks(
                    counts=tuple(counts[kind] for kind in kinds),
                    has_embedding="E" in word, has_head="L" in word, has_predictions="m" in word,
                )
            )  # fmt: skip
        return found


def block_counts(stage: StageBlocks, num: int) -> tuple[int, ...]:
    """Return the number of each kind of block, and then of each block of predictions, `num` in all.

    Every one of predictions is on the stage that has them.
    """
    predictions = (int(stage.has_predictions),) * (num - len(stage.counts))
    return *stage.counts, *predictions


@cache
def _amounts(block: Block) -> tuple[float, float, float]:
    """Return a block's parameters: on every rank, cut over tensor ranks, and of the experts."""
    amounts = block.parameters
    routed = next((one for one in block.parts if isinstance(one, RoutedExperts)), None)
    experts = 0 if routed is None else routed.num_experts * routed.expert_parameters
    latent = sum(one.latent_parameters for one in block.parts if isinstance(one, LatentAttention))
    whole = amounts.router + amounts.norms + amounts.routed - experts + latent
    return whole, amounts.attention - latent + amounts.dense + amounts.shared, experts


def _by_rank(cut: Cut, layout: FoldedLayout) -> tuple[RankBlocks, ...]:
    own: list[list[StageBlocks]] = [[] for _ in range(layout.pp)]
    for stage, which in enumerate(cut.which):
        own[rank_of_stage(stage, layout.pp, layout.order)].append(cut.distinct[which])
    same: dict[tuple[tuple[int, ...], bool, bool, bool], list[int]] = {}
    for rank, parts in enumerate(own):
        counts = tuple(map(sum, zip(*(part.counts for part in parts), strict=True)))
        ends = (
            any(part.has_embedding for part in parts), any(part.has_head for part in parts),
            any(part.has_predictions for part in parts),
        )  # fmt: skip
        same.setdefault((counts, *ends), []).append(rank)
    return tuple(
        RankBlocks(
            counts=counts, has_embedding=begins, has_head=ends, has_predictions=predicts,
            ranks=tuple(ranks),
        )
        for (counts, begins, ends, predicts), ranks in same.items()
    )  # fmt: skip


def balanced_stages(
    decoder: Decoder,
    layout: FoldedLayout,
    *,
    block_seconds: float,
    embedding_seconds: float,
    head_seconds: float,
) -> StageLetters:
    """Return stages whose ranks take as equally long as whole blocks allow.

    Blocks go, one by one, to the rank that has least to do, and on a rank to the stage that has
    fewest; the first and the last stage may have none, all others have one at least.

    Args:
        block_seconds: of a block, the mean of all.
        head_seconds: of the head with the predictions.
    """
    num, blocks = layout.num_stages, decoder.num_layers
    sizes = [0, *[1] * (num - 2), 0]
    seconds = [size * block_seconds for size in sizes]
    seconds[0] += embedding_seconds
    seconds[-1] += head_seconds
    own: list[list[int]] = [[] for _ in range(layout.pp)]
    for stage in range(num):
        own[rank_of_stage(stage, layout.pp, layout.order)].append(stage)
    ranks = [(sum(seconds[one] for one in mine), rank) for rank, mine in enumerate(own)]
    heapq.heapify(ranks)
    for _ in range(blocks - sum(sizes)):
        busy, rank = ranks[0]
        mine = own[rank]
        stage = mine[0] if len(mine) == 1 else min(mine, key=seconds.__getitem__)
        sizes[stage] += 1
        seconds[stage] += block_seconds
        heapq.heapreplace(ranks, (busy + block_seconds, rank))
    return stages_of_sizes(sizes, len(decoder.predictions))
