"""moetune's runtime: process groups, MoE layers, stages and optimizer for the user's model."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from moetune.domain.experts import RoutedExperts
from moetune.domain.pipeline import usual_schedule
from moetune.domain.training import FoldedLayout
from moetune.export.planned import Export, Planned, refuse, remarks

_FILE = "moetune_layout.py"
_WHOLE = (
    "moetune.parallelize(model, plan) does all of this for your decoder.",
    "moetune.adapt(model, plan) runs the experts of a transformers model by the plan.",
)

_GATES, _FUNCTIONS = ("silu", "swish"), ("relu", "gelu", "gelu_new", "silu")
_SCORES = ("softmax", "softmax_of_top_k")
"""Activations and scores that `ExpertLayer` has."""

_TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")


def layer_export(planned: Planned) -> Export:
    """Return a Python module that makes the process groups, MoE layers, stages and optimizer.

    Raises:
        InfeasiblePlanError: the model has no experts.
    """
    layer, layout, job = planned.decoder.layer, planned.layout, planned.job
    experts = next((block.routed for block in planned.decoder.blocks if block.routed), None)
    if experts is None:
        what = f"{planned.decoder.name}, which has no experts"
        raise refuse(planned, what, "the export is of layers of experts: use another --to")
    missing = (*_not_expressed(layout), *_odd_experts(experts, planned.decoder.family))
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
    """Return the layout as a Python expression, without fields that have their default."""
    plain = FoldedLayout()
    if layout.order == usual_schedule(layout.vpp):
        layout = replace(layout, schedule=None)  # plans' documents name the usual schedule, too
    values = (
        (item.name, getattr(layout, item.name))
        for item in fields(FoldedLayout)
        if getattr(layout, item.name) != getattr(plain, item.name)
    )
    lines = "".join(f"    {name}={value!r},\n" for name, value in values)
    return f"FoldedLayout(\n{lines})"


def _odd_experts(experts: RoutedExperts, family: str) -> Iterator[str]:
    """Yield what the model's experts and router have, and those of the layer have not."""
    function = "clamped silu" if family == "gpt_oss" else experts.function
    supported = _GATES if experts.is_gated else _FUNCTIONS
    if function not in supported:
        yield f"experts of {function}: those of make_layer have {experts.layer.activation}"
    if experts.router.score not in _SCORES or experts.router.num_groups > 1:
        groups = f" in {experts.router.num_groups} groups" if experts.router.num_groups > 1 else ""
        yield f"{experts.router.score} scores{groups}: the gate of make_layer has softmax"


def _not_expressed(layout: FoldedLayout) -> Iterator[str]:
    """Yield the parts of the layout that the user's model must implement itself."""
    if layout.recompute:
        yield "recomputation of blocks: call them by torch.utils.checkpoint.checkpoint"
    if layout.tp > 1:
        yield f"tp {layout.tp}: torch's parallelize_module cuts dense parts over ranks.mesh['tp']"
    if layout.pp > 1:
        yield f"pp {layout.pp}: the model must implement the parts of the stages"
    if layout.offload_optimizer:
        yield "states in host memory: moetune.shard(model, optimizer, plan=…) keeps them in chunks"
