"""moetune's own runtime: its MoE layer with a plan book, in a script of the user's model."""

from collections.abc import Iterator

from moetune.export.planned import Export, Planned, refuse, remarks

_FILE = "moetune_layout.py"


def layer_export(planned: Planned) -> Export:
    """Return a module that makes the layers and wraps the model.

    Raises:
        InfeasiblePlanError: the model has no experts, or tensor-parallel groups.
    """
    layer, layout, job = planned.decoder.layer, planned.layout, planned.job
    experts = next((block.routed for block in planned.decoder.blocks if block.routed), None)
    if experts is None or layout.tp > 1:
        what = f"{planned.decoder.name}: it has no experts" if experts is None else f"tp {layout.tp}"
        raise refuse(planned, f"{what}: the export is of MoELayer", "plan with --tp 1, or use another --to")
    missing = tuple(_not_expressed(planned))
    tokens = layout.micro_batch * job.length
    layer_plan = (
        f"moetune plan --d-model {layer.d_model} --d-hidden {layer.d_hidden} "
        f"--num-experts {layer.num_experts} --top-k {layer.top_k} "
        f"--activation {layer.activation} --tokens {tokens} --world-size {layout.ep} "
        f"--dtype {job.dtype} --output layer.json"
    )
    text = (
        f"{remarks(planned, missing, 'The chunks of a layer are a plan of their own:')}"
        f"#   {layer_plan}\n"
        "import moetune\n"
        "import torch\n"
        "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh\n"
        "from torch.nn.parallel import DistributedDataParallel\n\n"
        f"MICRO_BATCH = {layout.micro_batch}\n"
        f"MICRO_BATCHES = {planned.num_micro_batches}\n"
        f"SEQUENCE = {job.length}\n\n\n"
        "def make_mesh() -> DeviceMesh:\n"
        '    """Return the ranks of a stage: replicas of the experts, and those that share them."""\n'
        f"    shape = ({layout.pp}, {layout.dp // layout.ep}, {layout.ep})\n"
        '    names = ("stages", "replicas", "experts")\n'
        '    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)\n'
        '    return mesh["replicas", "experts"]\n\n\n'
        "def make_layer(book: moetune.PlanBook, mesh: DeviceMesh) -> moetune.MoELayer:\n"
        '    """Return one MoE layer of the model; all its layers share book and mesh."""\n'
        "    return moetune.MoELayer(\n"
        f"        d_model={layer.d_model},\n"
        f"        d_hidden={layer.d_hidden},\n"
        f"        num_experts={layer.num_experts},\n"
        f"        top_k={layer.top_k},\n"
        f'        activation="{layer.activation}",\n'
        f"        bias={experts.biases > 0},\n"
        "        mesh=mesh,\n"
        "        planbook=book,\n"
        '        device="cuda",\n'
        f"        dtype=torch.{job.dtype},\n"
        "    )\n\n\n"
        "def wrap(model: torch.nn.Module) -> DistributedDataParallel:\n"
        '    """Return the model with its dense gradients averaged; experts stay with their rank."""\n'
        "    return DistributedDataParallel(moetune.prepare_ddp(model))\n\n\n"
        "def open_book() -> moetune.PlanBook:\n"
        '    """Return the plans of the layers, equal on all ranks."""\n'
        '    return moetune.open_planbook("layer.json")\n'
    )
    return Export(
        text=text, file_name=_FILE, launch=f"{planned.torchrun} YOUR_SCRIPT.py",
        not_expressed=missing,
    )  # fmt: skip


def _not_expressed(planned: Planned) -> Iterator[str]:
    layout = planned.layout
    yield from planned.modules()[1]
    if layout.recompute:
        yield f"recomputation of {', '.join(layout.recompute)}: wrap the model's blocks"
    if layout.pp > 1:
        yield f"pp {layout.pp}: the stages are the model's own"
    if layout.zero:
        yield f"ZeRO-{layout.zero}: moetune.shard keeps the optimizer's states, for one ep group"
    if layout.dispatcher == "hierarchical":
        yield "the dispatcher: the layer's plan has it"
