"""Trained parameters: counts for a pipeline rank, a device, and the whole model.

Adapters of dense matrices are cut over tensor ranks as in Megatron-Bridge, both A and B
(`peft/utils.py`, `ParallelLinearAdapter`). Adapters of each expert are on the expert's rank. Shared
adapters, as large as a single expert's, are on every rank of the experts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from moetune.domain.architecture import Block, Decoder, Part
from moetune.domain.experts import Amounts, DenseFfn, RoutedExperts
from moetune.domain.layer import OPERATIONS_OF_A_MAC
from moetune.domain.once import Tables, once_for
from moetune.domain.optimizers import Optimizer
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.tuning import Adapters, Trained, Tuning, adapted_matrices
from moetune.solve.model.muon import Orthogonal, matrices_of
from moetune.solve.model.pipeline import DecoderStages, Parameters, StageBlocks, counted, summed


@dataclass(frozen=True, slots=True)
class TrainedParameters(Tables):
    """Parameters that have gradients and optimizer states."""

    stages: DecoderStages
    tuning: Tuning
    target: Target

    @once_for("tp", "ep", "etp")
    def of_rank(self, layout: FoldedLayout, rank: StageBlocks) -> Parameters:
        """Return the trained parameters of a pipeline rank on one device."""
        if self.tuning.adapters is None:
            return self.stages.parameters(layout, rank, self.tuning)
        return summed(rank, self.of_blocks(layout))

    @once_for("tp", "ep", "etp")
    def of_blocks(self, layout: FoldedLayout) -> tuple[Parameters, ...]:
        """Return the trained parameters of each kind of block, then of each prediction block."""
        adapters, blocks = self.tuning.adapters, self.stages.decoder.kinds_and_predictions
        if adapters is None:
            return self.stages.parameters_of_blocks(layout, self.tuning)
        return tuple(self._of_adapters(block, adapters, layout) for block in blocks)

    @once_for("tp", "ep", "etp")
    def orthogonal(self, layout: FoldedLayout) -> tuple[tuple[Orthogonal, ...], ...]:
        """Return the matrices of each kind of block that Muon updates on one device."""
        decoder = self.stages.decoder
        return tuple(
            tuple(matrices_of(block, decoder.d_model, layout, self.tuning))
            for block in decoder.kinds_and_predictions
        )

    @once_for("dp", "cp", "tp", "ep", "etp", "zero")
    def muon_bytes(self, layout: FoldedLayout, rank: StageBlocks, optimizer: Optimizer) -> float:
        """Return Muon's bytes beyond its shard: Adam's second moment, and whole matrices."""
        blocks, trained = counted(rank, self.orthogonal(layout)), self.of_rank(layout, rank)
        matrices = [(count, matrix) for count, some in blocks if count for matrix in some]
        of_adam = sum(trained) - sum(n * matrix.num * matrix.parameters for n, matrix in matrices)
        replicas = layout.dp * layout.cp
        if not layout.zero:
            return optimizer.adam_bytes * of_adam
        more = optimizer.adam_bytes * of_adam / replicas
        for is_expert, count in enumerate((trained.dense / replicas, trained.experts / layout.edp)):
            sizes = (matrix.parameters for _, matrix in matrices if matrix.is_expert == is_expert)
            more += optimizer.state_bytes * max(0.0, max(sizes, default=0) - count)
        return more

    def _of_adapters(self, block: Block, adapters: Adapters, layout: FoldedLayout) -> Parameters:
        dense = experts = 0.0
        for part in _adapted(block, adapters):
            if isinstance(part, RoutedExperts):
                num = part.num_experts // layout.ep if adapters.experts == "each" else 1
                experts += num * _parameters_of(part, adapters, self.target, layout.etp)
            else:
                dense += _parameters_of(part, adapters, self.target, layout.tp)
        return Parameters(dense, experts)


def trained_of(job: TrainingJob, target: Target) -> Trained | None:
    """Return the number of trained parameters, without predictions; None if all train."""
    tuning, amounts, stages = job.tuning, job.decoder.parameters, DecoderStages(job.decoder)
    if tuning.trains_all:
        return None
    if tuning.adapters is None:
        left = tuning.trained(amounts).total
        return Trained(parameters=round(left), share=left / amounts.total)
    whole = replace(stages.whole, has_predictions=False)
    trained = sum(TrainedParameters(stages, tuning, target).of_rank(FoldedLayout(), whole))
    return Trained(parameters=round(trained), share=trained / (amounts.total + trained))


def flops_per_token(job: TrainingJob, target: Target) -> float:
    """Return the FLOPs that training needs for a token, without gradients of frozen weights.

    Each weight that a token meets is multiplied in the forward pass, and for the gradients of its
    input and of itself. These are six operations, four for a frozen weight. An adapter has six.
    """
    decoder, adapters = job.decoder, job.tuning.adapters
    total = decoder.flops_per_token(job.attended).total
    if job.tuning.trains_all:
        return total
    macs = _weight_macs(decoder)
    total -= OPERATIONS_OF_A_MAC * (macs.total - job.tuning.trained(macs).total)
    if adapters is not None:
        for part in chain.from_iterable(_adapted(block, adapters) for block in decoder.blocks):
            times = part.mean_top_k if isinstance(part, RoutedExperts) else 1
            total += 6 * times * _parameters_of(part, adapters, target)
    return total


def _weight_macs(decoder: Decoder) -> Amounts:
    """Return a token's MACs with weights, by part; attention's MACs with keys do not count."""
    predicted = (block for prediction in decoder.predictions for block in prediction.blocks)
    blocks: Iterable[Block] = chain(decoder.blocks, predicted)
    head = decoder.vocab_size * decoder.d_model * (1 + len(decoder.predictions))
    projections = sum(prediction.projection for prediction in decoder.predictions)
    return sum(map(_block_macs, blocks), Amounts(head=head, embedding=projections))


@cache
def _block_macs(block: Block) -> Amounts:
    """Return a block's MACs with weights; a mixer's MACs with keys grow with the sequence."""
    amounts = block.forward_macs(1)
    mixers = [part for part in block.parts if not isinstance(part, DenseFfn | RoutedExperts)]
    weights = (
        min(2 * mixer.forward_macs(1) - mixer.forward_macs(2), mixer.parameters) for mixer in mixers
    )
    return replace(amounts, attention=sum(weights))


def _adapted(block: Block, adapters: Adapters) -> Iterator[Part]:
    """Yield the parts of a block that have adapters, including shared experts."""
    for part in block.parts:
        for matrices in (part, part.shared if isinstance(part, RoutedExperts) else None):
            if matrices is not None and adapters.adapts(matrices):
                yield matrices


def _parameters_of(part: object, adapters: Adapters, target: Target, cut: int = 1) -> float:
    """Return the parameters of a part's adapters on one of the ranks that share it."""
    return sum(
        matrix.parameters(adapters.rank) / (cut if matrix.is_cut else 1)
        for matrix in adapted_matrices(part, fuses=target.core is not None)
    )
