"""Parameters of a pipeline rank on one device, and the bytes of their states by the stage of ZeRO.

From stage 1 on a replica has its shard of the states alone, from stage 2 on of the gradients, too,
and under stage 3 of the parameters. Dense parameters have dp·cp replicas, experts edp.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from moetune.domain.architecture import Block, Decoder
from moetune.domain.attention import LatentAttention
from moetune.domain.experts import RoutedExperts
from moetune.domain.once import Tables, once
from moetune.domain.optimizers import Optimizer
from moetune.domain.training import FoldedLayout
from moetune.solve.model.activations import ELEMENT
from moetune.solve.model.stages import StageBlocks, block_counts


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
        for count, block in self.blocks(layout, rank):
            dense, experts = dense + count * block.dense, experts + count * block.experts
        if rank.has_predictions:
            dense += sum(one.projection for one in decoder.predictions) / layout.tp
        return Parameters(dense, experts)

    def blocks(self, layout: FoldedLayout, rank: StageBlocks) -> list[tuple[int, Parameters]]:
        """Return the number and the parameters of each kind of block that a pipeline rank has."""
        every = self.of_kinds(layout)
        counted = zip(block_counts(rank, len(every)), every, strict=True)
        return [(count, one) for count, one in counted if count]

    @once(_sizes)
    def of_kinds(self, layout: FoldedLayout) -> tuple[Parameters, ...]:
        """Return the parameters of each kind of block, then of each of multi-token prediction."""
        found = []
        for whole, shared, experts in map(_amounts, self.decoder.kinds_and_predictions):
            dense = whole + shared / layout.tp
            found.append(Parameters(dense, experts / (layout.ep * layout.etp)))
        return tuple(found)


@cache
def _amounts(block: Block) -> tuple[float, float, float]:
    """Return a block's parameters: on every rank, cut over tensor ranks, and of the experts."""
    amounts = block.parameters
    routed = next((one for one in block.parts if isinstance(one, RoutedExperts)), None)
    experts = 0 if routed is None else routed.num_experts * routed.expert_parameters
    latent = sum(one.latent_parameters for one in block.parts if isinstance(one, LatentAttention))
    whole = amounts.router + amounts.norms + amounts.routed - experts + latent
    return whole, amounts.attention - latent + amounts.dense + amounts.shared, experts


SHARDS_GRADIENTS = 2
"""The ZeRO stage, and those above it."""
WHOLE_BLOCKS = 2
"""Of a sharded model that a device has at once: the one that is computed and the next one.

Megatron-FSDP takes twice a block as the size of its queues (`suggested_communication_unit_size`).
"""


def shard_of(layout: FoldedLayout, dense: float, experts: float) -> float:
    """Return the parameters of one replica's shard."""
    return dense / (layout.dp * layout.cp) + experts / layout.edp


def state_bytes(
    layout: FoldedLayout, optimizer: Optimizer, dense: float, experts: float, *, on_host: float
) -> tuple[float, float, float]:
    """Return the bytes of so many parameters, of their gradients, and of their states.

    FSDP2 shards float32 parameters at every stage. At stage 2 what it gathers stays for the whole
    step, and gradients of micro-batches are added up whole
    (`torch/distributed/fsdp/_fully_shard/_fsdp_param.py`, `unsharded_accumulated_grad`).

    Args:
        on_host: share of the optimizer that the host keeps.
    """
    count, shard, zero = dense + experts, shard_of(layout, dense, experts), layout.zero
    is_whole = zero <= SHARDS_GRADIENTS
    parameters = optimizer.parameter_bytes * (count if is_whole else shard)
    gradients = optimizer.gradient_bytes * (shard if zero >= SHARDS_GRADIENTS else count)
    if optimizer.updates_parameters and is_whole:
        parameters = optimizer.parameter_bytes * shard + ELEMENT * count
        gradients += optimizer.gradient_bytes * count * (layout.pp > 1)
    return (
        parameters,
        gradients,
        (1 - on_host) * optimizer.state_bytes * (shard if zero else count),
    )
