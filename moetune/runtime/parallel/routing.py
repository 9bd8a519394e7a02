"""`moetune.routing_record`: how a model's layers of experts routed their tokens, layer by layer."""

from torch import nn

from moetune.comm.gloo import communicator_of
from moetune.domain.routing_record import ModelRoutingRecord, RoutingRecord
from moetune.runtime.parallel.model_stage import ModelStage
from moetune.runtime.parallel.own_layers import named_layers
from moetune.runtime.parallel.parallel_model import ParallelModel


def routing_record(model: nn.Module | ParallelModel) -> ModelRoutingRecord:
    """Return the records of all layers of experts of a model; all ranks call this together.

    Counts that the host reads anyway are summed, and exchanged here alone: each layer's over its
    ranks, and those of pipeline stages over the pipeline. Replicas of the experts have records of
    their own tokens; a plan takes one rank's.

    Args:
        model: with layers of experts, or of `moetune.parallelize`.

    Returns:
        The records in the order of the layers, to be written by one rank and planned with:
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
    every = {number: records for stage in stages for number, records in stage.items()}
    return ModelRoutingRecord(
        layers=tuple(one for number in sorted(every) for one in every[number])
    )


def _of_layers(module: nn.Module) -> tuple[RoutingRecord, ...]:
    return tuple(layer.routing_record() for _, layer in named_layers(module))
