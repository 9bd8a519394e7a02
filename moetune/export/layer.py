"""moetune's own runtime: its MoE layer with a plan book, in a script of the user's model."""

from collections.abc import Iterator

from moetune.domain.training import FoldedLayout
from moetune.export.planned import Export, Planned, refuse, remarks

_FILE = "moetune_layout.py"


_TEXT = """\
{remarks}# The chunks of a layer are a plan of their own:
#   {plan}
import moetune
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCH = {micro_batch}
MICRO_BATCHES = {num_micro_batches}
SEQUENCE = {length}


def make_mesh() -> DeviceMesh:
    \"\"\"Return the ranks of a stage: replicas of the experts, and those that share them.\"\"\"
    names = ("stages", "replicas", "experts")
    mesh = init_device_mesh("cuda", ({pp}, {replicas}, {ep}), mesh_dim_names=names)
    return mesh["replicas", "experts"]


def make_layer(book: moetune.PlanBook, mesh: DeviceMesh) -> moetune.MoELayer:
    \"\"\"Return one MoE layer of the model; all its layers share book and mesh.\"\"\"
    return moetune.MoELayer(
        d_model={layer.d_model},
        d_hidden={layer.d_hidden},
        num_experts={layer.num_experts},
        top_k={layer.top_k},
        activation="{layer.activation}",
        bias={bias},
        mesh=mesh,
        planbook=book,
        device="cuda",
        dtype=torch.{dtype},
    )


def wrap(model: torch.nn.Module) -> DistributedDataParallel:
    \"\"\"Return the model with dense gradients averaged; experts stay with their rank.\"\"\"
    return DistributedDataParallel(moetune.prepare_ddp(model))


def open_book() -> moetune.PlanBook:
    \"\"\"Return the plans of the layers, equal on all ranks.\"\"\"
    return moetune.open_planbook("layer.json")
"""


def layer_export(planned: Planned) -> Export:
    """Return a module that makes the layers and wraps the model.

    Raises:
        InfeasiblePlanError: the model has no experts, or tensor-parallel groups.
    """
    layer, layout, job = planned.decoder.layer, planned.layout, planned.job
    experts = next((block.routed for block in planned.decoder.blocks if block.routed), None)
    if experts is None or layout.tp > 1:
        what = f"tp {layout.tp}" if experts else f"{planned.decoder.name}, which has no experts"
        raise refuse(planned, what, "the export is of MoELayer: plan with --tp 1, or another --to")
    missing = tuple(_not_expressed(planned))
    plan = (
        f"moetune plan --d-model {layer.d_model} --d-hidden {layer.d_hidden} "
        f"--num-experts {layer.num_experts} --top-k {layer.top_k} --activation {layer.activation} "
        f"--tokens {layout.micro_batch * job.length} --world-size {layout.ep} "
        f"--dtype {job.dtype} {_pinned(layout)}--output layer.json"
    )
    text = _TEXT.format(
        remarks=remarks(planned, missing), plan=plan, micro_batch=layout.micro_batch,
        num_micro_batches=planned.num_micro_batches,
        length=job.length, pp=layout.pp, replicas=layout.dp // layout.ep, ep=layout.ep,
        layer=layer, bias=experts.biases > 0, dtype=job.dtype,
    )  # fmt: skip
    return Export(
        text=text, file_name=_FILE, launch=f"{planned.torchrun} YOUR_SCRIPT.py",
        not_expressed=missing,
    )  # fmt: skip


def _pinned(layout: FoldedLayout) -> str:
    """Return the flags of the chunks that the plan counts on."""
    if layout.degree is None:
        return ""
    return f"--forward-degree {layout.degree.forward} --backward-degree {layout.degree.backward} "


def _not_expressed(planned: Planned) -> Iterator[str]:
    layout = planned.layout
    if layout.recompute:
        yield f"recomputation of {', '.join(layout.recompute)}: wrap the model's blocks"
    if layout.pp > 1:
        yield f"pp {layout.pp}: the stages are the model's own"
    if layout.zero:
        yield f"ZeRO-{layout.zero}: moetune.shard keeps the optimizer's states, for one ep group"
    if layout.dispatcher == "hierarchical":
        yield "the dispatcher: the layer's plan has it"
