"""Parameters that train: counts of a pipeline rank, of a device, and of the whole model.

Adapters of dense matrices are cut over tensor ranks as Megatron-Bridge cuts them, both A and B
(`peft/utils.py`, `ParallelLinearAdapter`). Those of each expert are where the expert is; shared
ones are a single expert's on every rank of the experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from moetune.domain.architecture import Block, Decoder
from moetune.domain.experts import Amounts, DenseFfn, RoutedExperts
from moetune.domain.layer import OPERATIONS_OF_A_MAC
from moetune.domain.once import Tables, once
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.tuning import Adapters, Trained, Tuning, adapted_matrices
from moetune.solve.model.muon import Orthogonal, matrices_of
from moetune.solve.model.pipeline import (
    DecoderStages,
    Parameters,
    StageBlocks,
    amounts_of,
    counted,
    sizes_of,
)


@dataclass(frozen=True, slots=True)
class TrainedParameters(Tables):
    """Parameters that have gradients and states of the optimizer."""

    stages: DecoderStages
    tuning: Tuning
    target: Target

    @once(lambda layout, rank: (sizes_of(layout), rank))
    def of_rank(self, layout: FoldedLayout, rank: StageBlocks) -> Parameters:
        """Return those of a pipeline rank on one device."""
        tuning, decoder = self.tuning, self.stages.decoder
        if tuning.trains_all:
            return self.stages.parameters(layout, rank)
        table = decoder.vocab_size * decoder.d_model / layout.tp
        heads = rank.has_head or rank.has_predictions
        tables = rank.has_embedding * tuning.trains("embedding") + heads * tuning.trains("head")
        dense, experts = table * tables, 0.0
        for count, block in counted(rank, self.of_blocks(layout)):
            dense, experts = dense + count * block.dense, experts + count * block.experts
        return Parameters(dense, experts)

    @once(sizes_of)
    def of_blocks(self, layout: FoldedLayout) -> tuple[Parameters, ...]:
        """Return those of each kind of block, then of each of multi-token prediction."""
        tuning, blocks = self.tuning, self.stages.decoder.kinds_and_predictions
        if tuning.adapters is not None:
            return tuple(self._of_adapters(block, tuning.adapters, layout) for block in blocks)
        if tuning.trains_all:
            return self.stages.parameters_of_blocks(layout)
        tp, experts_cut = layout.tp, layout.ep * layout.etp
        amounts = (amounts_of(block, tuning) for block in blocks)
        return tuple(
            Parameters(whole + shared / tp, experts / experts_cut)
            for whole, shared, experts in amounts
        )

    @once(lambda layout, rank: (sizes_of(layout), rank))
    def of_adam(self, layout: FoldedLayout, rank: StageBlocks) -> float:
        """Return those of a pipeline rank's device that are no matrices of blocks."""
        return sum(self.of_rank(layout, rank)) - sum(
            count * sum(matrix.num * matrix.parameters for matrix in matrices)
            for count, matrices in counted(rank, self.orthogonal(layout))
        )

    @once(sizes_of)
    def orthogonal(self, layout: FoldedLayout) -> tuple[tuple[Orthogonal, ...], ...]:
        """Return the matrices of each kind of block that Muon updates on one device."""
        decoder = self.stages.decoder
        return tuple(
            tuple(matrices_of(block, decoder.d_model, layout, self.tuning))
            for block in decoder.kinds_and_predictions
        )

    def _of_adapters(self, block: Block, adapters: Adapters, layout: FoldedLayout) -> Parameters:
        dense = experts = 0.0
        for part in block.parts:
            if isinstance(part, RoutedExperts):
                if adapters.adapts(part):
                    num = part.num_experts // layout.ep if adapters.experts == "each" else 1
                    experts += num * _parameters_of(part, adapters, self.target, layout.etp)
                if part.shared is not None and adapters.adapts(part.shared):
                    dense += _parameters_of(part.shared, adapters, self.target, layout.tp)
            elif adapters.adapts(part):
                dense += _parameters_of(part, adapters, self.target, layout.tp)
        return Parameters(dense, experts)


def trained_count(job: TrainingJob, target: Target) -> float:
    """Return the parameters of the whole model that train, without multi-token prediction."""
    stages, alone = DecoderStages(job.decoder), FoldedLayout()
    if job.tuning.adapters is None:
        return job.tuning.trained(job.decoder.parameters).total
    whole = replace(stages.whole, has_predictions=False)
    return sum(TrainedParameters(stages, job.tuning, target).of_rank(alone, whole))


def trained_of(job: TrainingJob, target: Target) -> Trained | None:
    """Return how many parameters train, adapters among them; None where all do."""
    if job.tuning.trains_all:
        return None
    trained, total = trained_count(job, target), job.decoder.parameters.total
    whole = total if job.tuning.adapters is None else total + trained
    return Trained(parameters=round(trained), share=trained / whole)


def flops_per_token(job: TrainingJob, target: Target) -> float:
    """Return the FLOPs of a token that a training needs: none of gradients of frozen weights.

    Each weight that a token meets is multiplied in the forward pass, for the gradient of its input
    and for its own: six operations, four of a frozen one. An adapter has six.
    """
    total = job.decoder.flops_per_token(job.attended).total
    if job.tuning.trains_all:
        return total
    macs = _weight_macs(job.decoder)
    frozen = macs.total - job.tuning.trained(macs).total
    return total - OPERATIONS_OF_A_MAC * frozen + 6 * _adapter_macs(job, target)


def _weight_macs(decoder: Decoder) -> Amounts:
    """Return the MACs of a token with weights, by part: all but attention's with keys."""
    blocks: Iterable[Block] = decoder.blocks
    predicted = (block for prediction in decoder.predictions for block in prediction.blocks)
    macs = sum((_block_macs(block) for block in chain(blocks, predicted)), Amounts())
    head = decoder.vocab_size * decoder.d_model * (1 + len(decoder.predictions))
    projections = sum(prediction.projection for prediction in decoder.predictions)
    return macs + Amounts(head=head, embedding=projections)


@cache
def _block_macs(block: Block) -> Amounts:
    """Return those of a block; a mixer's grow with the sequence by what it multiplies with keys."""
    amounts = block.forward_macs(1)
    mixers = [part for part in block.parts if not isinstance(part, DenseFfn | RoutedExperts)]
    weights = (
        min(2 * mixer.forward_macs(1) - mixer.forward_macs(2), mixer.parameters) for mixer in mixers
    )
    return replace(amounts, attention=sum(weights))


def _adapter_macs(job: TrainingJob, target: Target) -> float:
    """Return the MACs of a token with adapters."""
    adapters = job.tuning.adapters
    if adapters is None:
        return 0.0
    total = 0.0
    for block in job.decoder.blocks:
        for part in block.parts:
            if not adapters.adapts(part):
                continue
            times = part.mean_top_k if isinstance(part, RoutedExperts) else 1
            total += times * _parameters_of(part, adapters, target)
            if isinstance(part, RoutedExperts) and adapters.adapts(part.shared):
                total += _parameters_of(part.shared, adapters, target)
    return total


def _parameters_of(part: object, adapters: Adapters, target: Target, cut: int = 1) -> float:
    """Return the parameters of a part's adapters on one of the ranks that share it."""
    return sum(
        matrix.parameters(adapters.rank) / (cut if matrix.is_cut else 1)
        for matrix in adapted_matrices(part, fuses=target.core is not None)
    )
