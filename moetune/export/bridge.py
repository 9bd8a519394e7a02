"""Megatron-Bridge 0.3.1: a function that edits a recipe's configuration."""

from collections.abc import Iterator
from types import MappingProxyType

from moetune.export.megatron_values import MegatronValues, Value, megatron_values, stage_letters
from moetune.export.planned import Export, Planned, remarks

_FILE = "bridge_layout.py"
_OVERLAP = (
    "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "overlap_grad_reduce",
    "overlap_param_gather",
)  # fmt: skip
"""Fields that `CommOverlapConfig` writes over those of the model and of the gradients."""
_PRECISION = ("fp8", "fp8_recipe", "fp4", "fp4_recipe")
_DTYPES = MappingProxyType({"fp32": "torch.float32", "bf16": "torch.bfloat16"})
_RESET = (
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
    "mtp_num_layers", "cuda_graph_impl", "cuda_graph_scope",
)  # fmt: skip
"""Fields that a recipe may have set and that the layout may not need."""
_USE = (
    "Call apply_layout(cfg) on a recipe's configuration before pretrain(cfg, forward_step). On "
    "GPUs that a flex dispatcher is not for, Megatron-Bridge skips it with a warning only."
)


def bridge_export(planned: Planned) -> Export:
    """Return the function's module."""
    values = megatron_values(planned)
    body = "".join(f"    {line}\n" for line in _statements(planned))
    text = (
        f"{remarks(planned, (), _USE)}"
        "import torch\n"
        "from megatron.bridge.training.comm_overlap import CommOverlapConfig\n"
        "from megatron.bridge.training.config import ConfigContainer\n"
        "from megatron.bridge.training.flex_dispatcher_backend import "
        "apply_flex_dispatcher_backend\n"
        "from megatron.bridge.training.mixed_precision import get_mixed_precision_config\n\n\n"
        "def apply_layout(cfg: ConfigContainer) -> None:\n"
        '    """Give a recipe the planned layout."""\n'
        f"{body}"
    )
    launch = (
        f"CUDA_DEVICE_MAX_CONNECTIONS={values.max_connections} {planned.torchrun} "
        "YOUR_RECIPE_SCRIPT.py"
    )
    return Export(text=text, file_name=_FILE, launch=launch)


def _statements(planned: Planned) -> Iterator[str]:
    values, layout, job = megatron_values(planned), planned.layout, planned.job
    unset: dict[str, Value] = {**dict.fromkeys(_RESET), "cpu_offloading": False}
    for name, value in (unset | values.model).items():
        if name not in (*_PRECISION, *_OVERLAP):
            yield f"cfg.model.{name} = {_literal(value)}"
    virtual = layout.vpp if layout.vpp > 1 else None
    yield f"cfg.model.virtual_pipeline_model_parallel_size = {virtual}"
    stages = stage_letters(planned) if layout.pp > 1 else None
    yield f"cfg.model.pipeline_model_parallel_layout = {stages!r}"
    yield "cfg.model.pipeline_dtype = torch.bfloat16"
    yield f"cfg.model.seq_length = {job.length}"
    yield f"cfg.dataset.sequence_length = {job.length}"
    yield f"cfg.train.micro_batch_size = {layout.micro_batch}"
    yield f"cfg.train.global_batch_size = {job.global_batch}"
    for name, value in values.ddp.items():
        yield f"cfg.ddp.{name} = {_literal(value)}"
    if "use_megatron_fsdp" in values.ddp:
        yield 'cfg.checkpoint.ckpt_format = "fsdp_dtensor"'
        yield "cfg.model.gradient_accumulation_fusion = False"
    yield "cfg.comm_overlap = CommOverlapConfig("
    yield "    tp_comm_overlap=False,"
    both = values.model | values.ddp
    yield from (f"    {name}={_literal(both.get(name, False))}," for name in _OVERLAP)
    yield ")"
    yield "cfg.model.moe_shared_expert_overlap = False"
    yield "cfg.model.cross_entropy_loss_fusion = True"
    yield "cfg.model.cross_entropy_fusion_impl = 'te'"
    yield 'cfg.mixed_precision = get_mixed_precision_config("bf16_mixed")'
    for name in _PRECISION:
        if name in values.model:
            yield f"cfg.mixed_precision.{name} = {_literal(values.model[name])}"
    yield from _optimizer(values)
    if backend := values.model.get("moe_flex_dispatcher_backend"):
        yield f"apply_flex_dispatcher_backend(cfg.model, {backend!r})"


def _optimizer(values: MegatronValues) -> Iterator[str]:
    """Yield the lines of the optimizer; a recipe may have set another one."""
    given = values.optimizer
    yield f"cfg.optimizer.use_precision_aware_optimizer = {bool(given)}"
    yield f"cfg.optimizer.optimizer_cpu_offload = {'optimizer_cpu_offload' in given}"
    for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
        if name in given:
            yield f"cfg.optimizer.{name} = {given[name]}"
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        yield f"cfg.optimizer.{name} = {_DTYPES[str(given.get(name, 'fp32'))]}"
    if "main_grads_dtype" in given:  # of a training without fp8 it decides on the master copy alone
        recipe = "delayed" if values.keeps_remainders else "tensorwise"
        yield f"cfg.mixed_precision.fp8_recipe = {recipe!r}"
    for part in ("ddp", "mixed_precision"):
        yield f"cfg.{part}.grad_reduce_in_fp32 = {values.reduces_in_fp32}"


def _literal(value: Value) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)
