"""Megatron-Bridge: a program that takes a recipe's configuration, gives it the layout, and trains.

The program is for the version in the plan's target row. The launch oracle passes the result of
`configuration()` to that version's `validate()`.
"""

from collections.abc import Iterator
from types import MappingProxyType

from moetune.domain.architecture import Decoder
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.megatron_models import TEXT_CLASSES, recipe_of
from moetune.domain.targets import MegatronCore
from moetune.domain.torch_rules import ABSENT
from moetune.export.keys import Value
from moetune.export.megatron_tuning import FROZEN_NAMES, attention_modules, ffn_modules
from moetune.export.megatron_values import (
    GRAPHS_BY_MODULE,
    MegatronValues,
    megatron_values,
    stage_letters,
)
from moetune.export.planned import Export, Planned, remarks

_FILE = "bridge_layout.py"
_OVERLAP = (
    "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "overlap_grad_reduce",
    "overlap_param_gather",
)  # fmt: skip
"""Fields of `CommOverlapConfig`, which overwrites them in the model's and the DDP configuration."""
_PRECISION = ("fp8", "fp8_recipe", "fp4", "fp4_recipe")
_DTYPES = MappingProxyType({"fp32": "torch.float32", "bf16": "torch.bfloat16"})
_RESET: MappingProxyType[str, Value] = MappingProxyType({
    "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None,
    "recompute_modules": None, "mtp_num_layers": None, "cuda_graph_impl": "none",
    "cpu_offloading": False, "fine_grained_activation_offloading": False,
    "num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False,
    "moe_shared_expert_overlap": False, "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False, "microbatch_group_size_per_vp_stage": None,
})  # fmt: skip
"""Values that unset fields which a recipe may set and the layout may not need."""
_ASYNCHRONOUS: MegatronCore = (0, 18)
"""First core whose Bridge can save the shards of Megatron-FSDP asynchronously."""
_GRAPHED_FSDP: MegatronCore = (0, 18)
"""First core whose Megatron-FSDP has a mode for CUDA graphs."""
_SEQUENCE_LENGTH: MegatronCore = (0, 17)
"""First core whose Bridge names a data set's sequence length `seq_length`."""
_USE = (
    "configuration() returns the recipe's configuration in the planned layout; set its data, its "
    "tokenizer and its checkpoints there. The program trains on mock data as it is."
)
_TEXT = """\
{remarks}{standard}import torch
{imports}from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.bridge.training.{program} import {program}


def configuration() -> ConfigContainer:
    \"\"\"Return the recipe's configuration in the planned layout.\"\"\"
{recipe}    apply_layout(cfg)
    return cfg


def apply_layout(cfg: ConfigContainer) -> None:
    \"\"\"Give a recipe the planned layout.\"\"\"
{body}

{more}if __name__ == "__main__":
    {program}(config=configuration(), forward_step_func=forward_step)
"""
_FREEZE = """
FROZEN = r"{names}"


def freeze(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    \"\"\"Freeze the planned parts.\"\"\"
    for model in models:
        for name, parameter in model.named_parameters():
            if re.search(FROZEN, name):
                parameter.requires_grad_(False)
    return models


"""
_CHECKPOINT = "It adapts the model in CHECKPOINT, a Megatron checkpoint or a Hugging Face folder."
_TRUST = (
    "The model's class is code in its repository on the Hugging Face Hub, which the program runs "
    "(trust_remote_code): read it first."
)
_CODE_ON_THE_HUB = ABSENT | {"nemotron_h"}
"""Families whose class is code on the Hub: transformers 4.57, which Bridge 0.3 pins, lacks it."""
_WHOLE_MODEL = "    bridge = AutoBridge.from_hf_pretrained({name!r}{trust})\n"
_TEXT_ALONE = """\
    text = AutoConfig.from_pretrained({name!r}{trust}).text_config
    text.architectures = [{architecture!r}]
    bridge = AutoBridge.from_hf_config(text)
"""
_WITHOUT_TOWERS = "It trains the language model alone, without its {towers}."
_FROM_CONFIGURATION = """\
    cfg = _pretrain_common()
{bridge}    cfg.model = bridge.to_megatron_provider(load_weights=False)
    cfg.tokenizer.tokenizer_model = {name!r}
"""


def bridge_export(planned: Planned) -> Export:
    """Return the program, its file name and the command that starts it."""
    values = megatron_values(planned)
    imports, recipe = _recipe(planned)
    said = [_TRUST] if "trust_remote_code" in recipe else []
    if planned.decoder.uncounted:
        said.append(_WITHOUT_TOWERS.format(towers=" and ".join(planned.decoder.uncounted)))
    tuning = planned.job.tuning
    standard = f"import {'re' if tuning.frozen else 'os'}\n\n" if not tuning.trains_all else ""
    names = "|".join(map(FROZEN_NAMES.__getitem__, tuning.frozen))
    if tuning.adapters is not None:
        imports += "from megatron.bridge.peft.lora import LoRA\n"
        said.append(_CHECKPOINT)
    text = _TEXT.format(
        remarks=remarks(planned, (), planned.where_to_start, _USE, *said), imports=imports,
        recipe=recipe, standard=standard, program="finetune" if tuning.adapters else "pretrain",
        body="".join(f"    {line}\n" for line in _statements(planned)),
        more=_FREEZE.format(names=names) if names else "",
    )  # fmt: skip
    connections = f"CUDA_DEVICE_MAX_CONNECTIONS={values.max_connections}"
    if tuning.adapters is not None:
        connections = f'CHECKPOINT="${{CHECKPOINT:?set it to the model}}" {connections}'
    launch = f"{planned.asks_in_line}{connections} {planned.torchrun} {_FILE}"
    return Export(text=text, file_name=_FILE, launch=launch)


def _recipe(planned: Planned) -> tuple[str, str]:
    """Return the imports and the statements that make the model's configuration.

    A model without a recipe is made from its configuration on the Hugging Face Hub, or in a folder.
    """
    recipe = recipe_of(planned.decoder, planned.target) if planned.hub_name else None
    if recipe is None:
        imports = (
            "from megatron.bridge import AutoBridge\n"
            "from megatron.bridge.recipes.common import _pretrain_common\n"
        )
        family, made = planned.decoder.family, _WHOLE_MODEL
        if planned.decoder.uncounted:
            imports, made = f"from transformers import AutoConfig\n\n{imports}", _TEXT_ALONE
        name = planned.hub_name or "PATH_OF_THE_MODEL"
        bridge = made.format(
            name=name, architecture=TEXT_CLASSES.get(family),
            trust=", trust_remote_code=True" if family in _CODE_ON_THE_HUB else "",
        )  # fmt: skip
        return imports, _FROM_CONFIGURATION.format(bridge=bridge, name=name)
    imports = f"from megatron.bridge.recipes.{recipe.package} import {recipe.function}\n"
    return imports, f"    cfg = {recipe.function}()\n"


def _statements(planned: Planned) -> Iterator[str]:
    values, layout, job = megatron_values(planned), planned.layout, planned.job
    yield from _model(planned, values)
    yield f"cfg.model.seq_length = {job.length}"
    length = "seq_length" if planned.core >= _SEQUENCE_LENGTH else "sequence_length"
    yield f"cfg.dataset.{length} = {job.length}"
    yield f"cfg.train.micro_batch_size = {layout.micro_batch}"
    yield f"cfg.train.global_batch_size = {job.global_batch}"
    is_muon = values.optimizer.get("optimizer") == "muon"
    for name, value in values.ddp.items():
        is_shared = is_muon and name == "use_distributed_optimizer"  # Muon updates whole matrices
        yield f"cfg.ddp.{name} = {_literal(False if is_shared else value)}"
    if "use_megatron_fsdp" in values.ddp:
        yield 'cfg.checkpoint.ckpt_format = "fsdp_dtensor"'
        if planned.core < _ASYNCHRONOUS:
            yield "cfg.checkpoint.async_save = False"
        yield "cfg.model.gradient_accumulation_fusion = False"
        yield from _graphed_fsdp(planned)
    else:
        yield "cfg.ddp.use_megatron_fsdp = False"
        if layout.cuda_graphs == "partial" and layout.overlap == "batch":
            # Graphs write the delayed weight gradients, and need a fixed address for them.
            yield "cfg.model.gradient_accumulation_fusion = True"
    if layout.cuda_graphs == "full":
        yield "cfg.rerun_state_machine.check_for_nan_in_loss = False"
        yield "cfg.ddp.check_for_nan_in_grad = False"
        yield "cfg.model.offload_modules = []"
    if layout.cuda_graphs != "none":
        yield "cfg.rng.te_rng_tracker = True"
        yield "cfg.model.use_te_rng_tracker = True"
    yield "cfg.comm_overlap = CommOverlapConfig("
    yield "    tp_comm_overlap=False,"
    both = values.model | values.ddp
    yield from (f"    {name}={_literal(both.get(name, False))}," for name in _OVERLAP)
    yield ")"
    yield "cfg.model.cross_entropy_loss_fusion = True"
    yield "cfg.model.cross_entropy_fusion_impl = 'te'"
    yield 'cfg.mixed_precision = get_mixed_precision_config("bf16_mixed")'
    for name in _PRECISION:
        if name in values.model:
            yield f"cfg.mixed_precision.{name} = {_literal(values.model[name])}"
    yield from _optimizer(values)
    yield from _tuning(planned)


def _tuning(planned: Planned) -> Iterator[str]:
    """Yield the lines of adapters, or of the hook that freezes parts."""
    tuning, decoder = planned.job.tuning, planned.decoder
    if tuning.frozen:
        yield "cfg.model.register_pre_wrap_hook(freeze)"
    if (adapters := tuning.adapters) is None:
        return
    modules = (
        *(attention_modules(decoder) if adapters.targets != "experts" else ()),
        *ffn_modules(decoder, adapters.targets),
    )
    yield "cfg.peft = LoRA("
    yield f"    target_modules={[*modules]},"
    yield f"    dim={adapters.rank},"
    yield f"    alpha={2 * adapters.rank},"
    if "each" in planned.target.adapters:
        yield f"    share_expert_adapters={adapters.experts == 'shared'},"
    yield ")"
    yield 'cfg.checkpoint.pretrained_checkpoint = os.environ["CHECKPOINT"]'


def _graphed_fsdp(planned: Planned) -> Iterator[str]:
    """Yield what Megatron-FSDP needs for CUDA graphs, as Megatron-LM's `training.py` sets it.

    Without it `zero_grad` dereferences sharded gradients that a replayed graph has written
    (`megatron_fsdp/param_and_grad_buffer.py`).
    """
    graphs = planned.layout.cuda_graphs
    if graphs == "none" or planned.core < _GRAPHED_FSDP:
        return
    yield "cfg.ddp.megatron_fsdp_cuda_graph_mode = True"
    if graphs == "full":
        yield "cfg.ddp.fsdp_all_gather_in_start_param_sync = False"


def _model(planned: Planned, values: MegatronValues) -> Iterator[str]:
    """Yield the lines that set the fields of `cfg.model`."""
    layout, decoder = planned.layout, planned.decoder
    unset = dict(_RESET)
    if planned.core >= GRAPHS_BY_MODULE:
        unset |= {"cuda_graph_scope": None, "cuda_graph_modules": ()}
    else:
        unset["cuda_graph_scope"] = ()
    if decoder.predictions:
        unset["mtp_num_layers"] = len(decoder.predictions)
    for name, value in (unset | values.model).items():
        if name not in (*_PRECISION, *_OVERLAP):
            yield f"cfg.model.{name} = {_literal(value)}"
    if decoder.family == "ernie4_5_moe" and all(
        part is None or part.shared is None for part in decoder.routed_kinds
    ):  # else Bridge's provider makes shared experts of width 0 (`ernie_45_bridge.py`)
        yield "cfg.model.moe_shared_expert_intermediate_size = None"
    virtual = layout.vpp if layout.vpp > 1 else None
    yield f"cfg.model.virtual_pipeline_model_parallel_size = {virtual}"
    stages = stage_letters(planned) if layout.pp > 1 and not decoder.has_mamba else None
    yield f"cfg.model.pipeline_model_parallel_layout = {stages!r}"
    yield "cfg.model.pipeline_dtype = torch.bfloat16"
    if all(_is_swiglu(part) and not part.biases for part in _ffns(decoder)):
        # The plan's memory assumes this fusion, which Bridge's provider of Qwen leaves off.
        yield "cfg.model.bias_activation_fusion = True"


def _ffns(decoder: Decoder) -> Iterator[DenseFfn | RoutedExperts]:
    for block in decoder.kinds:
        yield from (part for part in block.parts if isinstance(part, DenseFfn | RoutedExperts))


def _is_swiglu(part: DenseFfn | RoutedExperts) -> bool:
    return part.is_gated and part.function == "silu"


def _optimizer(values: MegatronValues) -> Iterator[str]:
    """Yield the lines of the optimizer, as the recipe may have set another."""
    given, is_shared = values.optimizer, values.ddp["use_distributed_optimizer"]
    name = "adam"
    if given.get("optimizer") == "muon":
        name, is_shared = "dist_muon" if is_shared else "muon", False
        yield 'cfg.optimizer.muon_tp_mode = "blockwise"'
    yield f'cfg.optimizer.optimizer = "{name}"'
    yield f"cfg.optimizer.use_distributed_optimizer = {is_shared}"
    for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        yield f"cfg.optimizer.{name} = {name in given}"
    for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
        if name in given:
            yield f"cfg.optimizer.{name} = {given[name]}"
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        yield f"cfg.optimizer.{name} = {_DTYPES[str(given.get(name, 'fp32'))]}"
    is_aware = "main_grads_dtype" in given
    if is_aware and "fp8" not in values.model:  # the recipe decides on the master copy only
        recipe = "delayed" if values.keeps_remainders else "tensorwise"
        yield f"cfg.mixed_precision.fp8_recipe = {recipe!r}"
    for part in ("ddp", "mixed_precision"):
        yield f"cfg.{part}.grad_reduce_in_fp32 = {values.reduces_in_fp32}"


def _literal(value: Value) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)
