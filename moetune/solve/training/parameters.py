"""Parameters of a pipeline rank on one device."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from moetune.domain.architecture import Block, Decoder
from moetune.domain.attention import LatentAttention
from moetune.domain.experts import RoutedExperts
from moetune.domain.once import Tables, once
from moetune.domain.training import FoldedLayout
from moetune.solve.training.stages import StageBlocks


class Parameters(NamedTuple):
    """Parameters on one device: all but the experts, and the experts."""

    dense: float
    experts: float


def _sizes(layout: FoldedLayout) -> tuple[int, int, int]:
    """Return what a block's parameters depend on."""
    return layout.tp, layout.ep, layout.etp


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParameters(Tables):
    """Parameters of a decoder's pipeline ranks on one device."""

    decoder: Decoder

    @once(lambda layout, rank: (_sizes(layout), rank))
    def of(self, layout: FoldedLayout, rank: StageBlocks) -> Parameters:
        """Return a pipeline rank's parameters."""
        decoder = self.decoder
        table = decoder.vocab_size * decoder.d_model / layout.tp
        tables = rank.has_embedding + (rank.has_head or rank.has_predictions)
        dense, experts = table * tables, 0.0
        for count, kind in zip(rank.counts, self._of_kinds(layout), strict=True):
            if count:
                dense, experts = dense + count * kind.dense, experts + count * kind.experts
        for one in decoder.predictions if rank.has_predictions else ():
            dense += one.projection / layout.tp
            for block in one.blocks:
                own = block_parameters(block, layout)
                dense, experts = dense + own.dense, experts + own.experts
        return Parameters(dense, experts)

    @once(_sizes)
    def _of_kinds(self, layout: FoldedLayout) -> tuple[Parameters, ...]:
        return tuple(block_parameters(kind, layout) for kind in self.decoder.kinds)


def largest_sharded_block(
    decoder: Decoder, layout: FoldedLayout, rank: StageBlocks, shards: tuple[bool, bool]
) -> float:
    """Return the parameters on one device of the pipeline rank's block that has most to shard.

    Args:
        shards: whether all but the experts is sharded, and whether experts are.
    """
    shards_dense, shards_experts = shards
    own = [kind for count, kind in zip(rank.counts, decoder.kinds, strict=True) if count]
    if rank.has_predictions:
        own += [block for one in decoder.predictions for block in one.blocks]
    return max(
        (
            shards_dense * dense + shards_experts * experts
            for dense, experts in (block_parameters(one, layout) for one in own)
        ),
        default=0.0,
    )


@cache
def _amounts(block: Block) -> tuple[float, float, float]:
    """Return a block's parameters: on every rank, cut over tensor ranks, and of the experts."""
    amounts = block.parameters
    routed = next((one for one in block.parts if isinstance(one, RoutedExperts)), None)
    experts = 0 if routed is None else routed.num_experts * routed.expert_parameters
    latent = sum(one.latent_parameters for one in block.parts if isinstance(one, LatentAttention))
    whole = amounts.router + amounts.norms + amounts.routed - experts + latent
    return whole, amounts.attention - latent + amounts.dense + amounts.shared, experts


def block_parameters(block: Block, layout: FoldedLayout) -> Parameters:
    """Return a block's parameters on one device."""
    whole, shared, experts = _amounts(block)
    return Parameters(whole + shared / layout.tp, experts / (layout.ep * layout.etp))
