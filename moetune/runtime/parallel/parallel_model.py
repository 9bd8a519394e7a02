"""The caller's model under a layout: the object that a training loop calls.

`moetune.parallelize` makes it. The whole model is cut into this rank's stages, which `Stages`
trains.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

from moetune.comm.gloo import communicator_of
from moetune.domain.errors import InputError
from moetune.domain.pipeline import stage_sizes
from moetune.domain.routing_record import ModelRoutingRecord, RoutingRecord
from moetune.domain.training import FoldedLayout
from moetune.runtime.moe.placement import is_dtensor
from moetune.runtime.parallel.chain import Chain, trace_chain
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.parallel.model_stage import ModelStage, StageRange
from moetune.runtime.parallel.stages import LossOf, Shapes, Stages
from moetune.runtime.parallel.whole_model import (
    add_balance,
    check_can_draw,
    check_layers,
    draw_values,
    equal_values,
    give_memory,
    spread_experts,
)
from moetune.runtime.replicas import named_layers


class ParallelModel(Stages):
    """A model's stages on this rank, which train together with all other ranks' stages.

    Attributes:
        parts: this rank's stages.
        ranks: the layout's process groups: `ranks.mesh` is the DeviceMesh, `ranks.replica` the
            part of the global batch that this rank trains on.
    """

    def local_batch(self, batch: torch.Tensor) -> torch.Tensor:
        """Return this rank's sequences (B / dp, …) of a global batch (B, …)."""
        return batch.tensor_split(self.ranks.layout.dp)[self.ranks.replica]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters and buffers under the model's names.

        Tensors have the model's shapes; tensors that are spread over ranks are DTensors. All stages
        together have every name: `torch.distributed.checkpoint` saves the whole model, and loads it
        under any other layout, or into the model on one rank. Only experts that the plan has placed
        are copies: pass them to `load_state_dict` after `torch.distributed.checkpoint.load`. All
        ranks call this together.
        """
        state: dict[str, torch.Tensor] = {}
        for part in self.parts:
            assert isinstance(part, ModelStage)  # noqa: S101 - `parallel_model` makes them
            state |= part.model.state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's part of a whole model's state dict, before you make the optimizer.

        All ranks call this together.

        Args:
            state: has at least this rank's names; values are whole tensors, or DTensors as in
                `state_dict`.

        Raises:
            InputError: a name is missing, or a tensor has another shape.
            CollectiveError: a rank left.
        """
        models = [part.model for part in self.parts if isinstance(part, ModelStage)]
        mine = [
            {
                name: _spread_as(name, value, state.get(name))
                for name, value in model.state_dict().items()
            }
            for model in models
        ]
        for model, values in zip(models, mine, strict=True):
            model.load_state_dict(values)


def _spread_as(name: str, value: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """Return a given tensor, spread over ranks as `value` is; InputError if shapes differ."""
    if given is None or given.shape != value.shape:
        there = "not there" if given is None else f"of shape {tuple(given.shape)}"
        raise InputError(
            f"{name} of shape {tuple(value.shape)} is {there} in the state dict",
            "give the state dict of the whole model",
        )
    if not is_dtensor(value) or is_dtensor(given):
        return given
    mesh, placements = value.device_mesh, value.placements
    return distribute_tensor(given.detach().to(value.dtype), mesh, placements, src_data_rank=None)


def parallel_model(
    model: nn.Module,
    ranks: ParallelGroups,
    *,
    loss_of: LossOf,
    num_sequences: int,
    length: int,
    blocks: nn.ModuleList,
    balance: float = 0.0,
    seed: int = 0,
    placements: Sequence[Sequence[int]] = (),
) -> ParallelModel:
    """Cut a model by a layout; all ranks call this together.

    Args:
        num_sequences: sequences of a data-parallel rank in one step.
        length: tokens of a sequence.
        blocks: name of the model's list of blocks.
        placements: each layer's `placement` as in `MoELayer`; empty for the natural order.

    Raises:
        InputError: the layout cannot run the model.
    """
    layout = ranks.layout
    inputs = torch.empty((layout.micro_batch, length), dtype=torch.int64, device="meta")
    check_layers(model, blocks)
    chain = trace_chain(model, blocks, inputs)
    mine = _stages_here(type(model).__name__, chain, ranks)
    here = [number for stage in mine for number in stage.blocks]
    from_meta = any(parameter.is_meta for parameter in model.parameters())
    if from_meta:
        check_can_draw(model)
    equal_values(model, ranks, communicator_of(None))
    spread_experts(model, ranks, [blocks[number] for number in here], placements)
    if balance:
        num_losses = max(1, len(named_layers(model))) * (num_sequences // layout.micro_batch)
        add_balance([blocks[number] for number in here], balance / (num_losses * layout.dp))
    parts = [_stage(model, chain, stage, ranks) for stage in mine]
    for part in parts:
        if from_meta:
            draw_values(part.model, seed)
        part.stand_in(ranks.mesh.device_type)
    return ParallelModel(
        parts, ranks, loss_of=loss_of, gives_inputs=True,
        shapes=Shapes(
            inputs=_of_batch(inputs, num_sequences),
            between=_of_batch(chain.hidden, num_sequences),
            outputs=_of_batch(chain.outputs, num_sequences),
        ),
    )  # fmt: skip


def _stages_here(name: str, chain: Chain, ranks: ParallelGroups) -> list[StageRange]:
    """Return this rank's stages; InputError if the model cannot be cut into stages."""
    stages = stage_ranges(ranks.layout, len(chain.blocks))
    if len(stages) > 1 and chain.uncuttable:
        raise InputError(
            f"{name} cannot be cut into {len(stages)} stages: {chain.uncuttable}",
            "pass hidden states alone from block to block, or plan with --pp 1",
        )
    return [stages[number] for number in ranks.stages()]


def _of_batch(micro_batch: torch.Tensor, num_sequences: int) -> torch.Tensor:
    shape = num_sequences, *micro_batch.shape[1:]
    return torch.empty(shape, dtype=micro_batch.dtype, device="meta")


def stage_ranges(layout: FoldedLayout, num_blocks: int) -> list[StageRange]:
    """Return the range of blocks of each stage.

    Raises:
        InputError: the plan's stages have another number of blocks than the model.
    """
    if layout.num_stages == 1:
        sizes: Sequence[int] = (num_blocks,)
    elif layout.stages is None:
        sizes = stage_sizes(num_blocks, layout.num_stages)
    else:
        sizes = [word.count("t") for word in layout.stages]
    if sum(sizes) != num_blocks:
        raise InputError(
            f"the plan's stages have {sum(sizes)} blocks, and the model {num_blocks}",
            "plan for this model",
        )
    ends = pairwise(accumulate(sizes, initial=0))
    last = len(sizes) - 1
    return [
        StageRange(blocks=range(*pair), is_first=number == 0, is_last=number == last)
        for number, pair in enumerate(ends)
    ]


def _stage(model: nn.Module, chain: Chain, part: StageRange, ranks: ParallelGroups) -> ModelStage:
    """Return a stage with memory on the rank's device."""
    nothing = frozenset[int]()
    before = nothing if part.is_first else chain.first
    of_others = before | (nothing if part.is_last else chain.last)
    elsewhere: dict[int, Any] = {
        id(parameter): torch.empty_like(parameter, device="meta", requires_grad=False)
        for parameter in model.parameters()
        if id(parameter) in of_others
    }
    recompute = "full" in ranks.layout.recompute
    stage = ModelStage(model, chain.blocks, part, elsewhere, recompute=recompute)
    give_memory(stage, ranks.mesh.device_type)
    return stage.to(ranks.mesh.device_type)


def routing_record(model: nn.Module | ParallelModel) -> ModelRoutingRecord:
    """Return the records of all layers of experts of a model; all ranks call this together.

    Counts that the host reads anyway are summed, and exchanged only here: over the ranks of each
    layer, then over the pipeline's stages. Replicas of the experts have records of different
    tokens; a plan takes the record of a single rank.

    Args:
        model: has layers of experts, or comes from `moetune.parallelize`.

    Returns:
        The records in the order of the layers. Write them on one rank, and plan with them:
        `moetune plan --model … --routing FILE`.

    Raises:
        InputError: there is no layer of experts, or no step was recorded.
        CollectiveError: a rank left.
    """
    if not isinstance(model, ParallelModel):
        return ModelRoutingRecord(layers=_of_layers(model))
    mine = dict[int, tuple[RoutingRecord, ...]]()
    for part in model.parts:
        assert isinstance(part, ModelStage)  # noqa: S101 - `parallel_model` makes them
        mine |= {number: _of_layers(block) for number, block in part.blocks.items()}
    pipeline = communicator_of(model.ranks.mesh.get_group("pp"))
    stages = pipeline.all_gather_object(mine, "the records of all stages' routing")
    by_block = {number: records for stage in stages for number, records in stage.items()}
    return ModelRoutingRecord(
        layers=tuple(record for number in sorted(by_block) for record in by_block[number])
    )


def _of_layers(module: nn.Module) -> tuple[RoutingRecord, ...]:
    return tuple(layer.routing_record() for _, layer in named_layers(module))
