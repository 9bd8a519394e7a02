"""moetune's own runtime: groups, layers of experts, stages and optimizer, for the user's model."""

from collections.abc import Iterator
from dataclasses import fields, replace

from moetune.domain.pipeline import usual_schedule
from moetune.domain.training import FoldedLayout
from moetune.export.planned import Export, Planned, refuse, remarks

_FILE = "moetune_layout.py"
_WHOLE = (
    "moetune.parallelize(model, plan) does all of this for a decoder of your own.",
    "moetune.adapt(model, plan) runs the experts of a transformers model by the plan.",
)

_TEXT = """\
{remarks}import torch
from torch import nn

from moetune.domain.layer import LayerShape
from moetune.domain.training import {names}
from moetune.runtime.moe.layer import ExpertLayer
from moetune.runtime.parallel.groups import ParallelGroups, join
from moetune.runtime.parallel.optimizer import MasterOptimizer
from moetune.runtime.parallel.stages import LossOf, Shapes, Stages

SEQUENCES = {sequences}  # of a data-parallel rank in a step
LENGTH = {length}
LAYOUT = {layout}
LAYER = LayerShape(
    d_model={layer.d_model},
    d_hidden={layer.d_hidden},
    num_experts={layer.num_experts},
    top_k={layer.top_k},
    activation="{layer.activation}",
)


def make_ranks() -> ParallelGroups:
    \"\"\"Return the groups of the layout, on all ranks, after init_process_group.\"\"\"
    return join(LAYOUT, device_type="cuda")


def make_layer(ranks: ParallelGroups) -> ExpertLayer:
    \"\"\"Return one MoE layer of the model, with this rank's experts.\"\"\"
    return ranks.expert_layer(LAYER, bias={bias}, dtype=torch.{dtype})


def make_stages(
    parts: list[nn.Module], ranks: ParallelGroups, loss_of: LossOf, shapes: Shapes
) -> Stages:
    \"\"\"Return what runs a step: `stages.backward(inputs, targets)`.

    Args:
        parts: this rank's parts of the model, one for each of ranks.stages().
        shapes: of SEQUENCES sequences.
    \"\"\"
    return Stages(parts, ranks, loss_of=loss_of, shapes=shapes)


def make_optimizer(stages: Stages) -> MasterOptimizer:
    \"\"\"Return the optimizer, whose states are sharded with a ZeRO stage.\"\"\"
    return stages.optimizer(lambda parts: torch.optim.AdamW(parts, lr=1e-4))
"""


def layer_export(planned: Planned) -> Export:
    """Return a module that makes the groups, the layers, the stages and the optimizer.

    Raises:
        InfeasiblePlanError: the model has no experts.
    """
    layer, layout, job = planned.decoder.layer, planned.layout, planned.job
    experts = next((block.routed for block in planned.decoder.blocks if block.routed), None)
    if experts is None:
        what = f"{planned.decoder.name}, which has no experts"
        raise refuse(planned, what, "the export is of layers of experts: use another --to")
    missing = tuple(_not_expressed(layout))
    text = _TEXT.format(
        remarks=remarks(planned, missing, *_WHOLE), sequences=job.global_batch // layout.dp,
        names="FoldedLayout" if layout.degree is None else "Degrees, FoldedLayout",
        length=job.length, layout=_expression(layout), layer=layer, bias=experts.biases > 0,
        dtype=job.dtype,
    )  # fmt: skip
    return Export(
        text=text, file_name=_FILE, not_expressed=missing,
        launch=f"{planned.asks_in_line}{planned.torchrun} YOUR_SCRIPT.py",
    )  # fmt: skip


def _expression(layout: FoldedLayout) -> str:
    """Return the layout as an expression, without what is as by default."""
    plain = FoldedLayout()
    if layout.order == usual_schedule(layout.vpp):
        layout = replace(layout, schedule=None)  # plans' documents name it all the same
    values = (
        (item.name, getattr(layout, item.name))
        for item in fields(FoldedLayout)
        if getattr(layout, item.name) != getattr(plain, item.name)
    )
    lines = "".join(f"    {name}={value!r},\n" for name, value in values)
    return f"FoldedLayout(\n{lines})"


def _not_expressed(layout: FoldedLayout) -> Iterator[str]:
    """Yield what the parts of the model, which are the user's, have to do themselves."""
    if layout.recompute:
        yield "recomputation of blocks: call them by torch.utils.checkpoint.checkpoint"
    if layout.tp > 1:
        yield f"tp {layout.tp}: torch's parallelize_module cuts dense parts over ranks.mesh['tp']"
    if layout.pp > 1:
        yield f"pp {layout.pp}: the parts of the stages are the model's own"
    if layout.offload_optimizer:
        yield "states in host memory: moetune.shard(model, optimizer, plan=…) keeps them in chunks"
