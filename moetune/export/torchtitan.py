"""torchtitan 0.3.0: a function for `--config` that changes a recipe of the model's family."""

import json
from collections.abc import Iterator
from types import MappingProxyType

from moetune.domain.pipeline import SPLITTING, Schedule
from moetune.domain.torch_rules import Recipe, recipe_of
from moetune.domain.training import TokenDispatcher
from moetune.export.keys import Setting, Value, size, write_keys
from moetune.export.planned import Export, Planned, remarks

_FILE = "torchtitan_layout.py"
_BACKENDS: MappingProxyType[TokenDispatcher, str] = MappingProxyType(
    {"all_to_all": "standard", "deepep": "deepep", "hybrid_ep": "hybridep"}
)
_SCHEDULES: MappingProxyType[Schedule, str] = MappingProxyType(
    {
        "1f1b": "1F1B",
        "interleaved": "Interleaved1F1B",
        "zero_bubble": "InterleavedZeroBubble",
        "zero_bubble_v": "ZBVZeroBubble",
        "dualpipe_v": "DualPipeV",
    }
)
_SPLIT = (
    "The schedule splits backward passes: with FlexAttention's masks between stages it needs "
    "torch 2.13 or newer, and stages without torch.compile."
)
_ASSETS = (
    "HF_ASSETS is the folder of the model's tokenizer; the optimizer's rates and the data are "
    "those of the recipe that this changes."
)
_TORCH = (
    "It needs torch 2.15 or newer; older versions shard with --parallelism.spmd_backend "
    "partial_dtensor alone."
)
_TOWER = "The recipe has a vision encoder, whose memory and time the plan does not count."
_RESHARD = {2: "never", 3: "always"}
_USUAL_LOCAL, _USUAL_LENGTH = 8, 2048


def _write_schedule(planned: Planned) -> tuple[Value, ...]:
    layout = planned.layout
    return (_SCHEDULES[layout.order], layout.micro_batch) if layout.pp > 1 else (None, None)


def _read_schedule(name: str, micro_batch: int) -> tuple[Schedule | None, int]:
    return next((key for key, value in _SCHEDULES.items() if value == name), None), micro_batch


PARALLELISM = (
    Setting(
        name="copies", keys={"data_parallel_replicate_degree": 1}, write=lambda _: (1,),
        read=lambda copies: copies,
    ),
    size("dp", "data_parallel_shard_degree", -1),  # all remaining ranks
    Setting(
        name="zero", keys={"fsdp_reshard_after_forward": "default"},
        write=lambda planned: (_RESHARD[planned.layout.zero],),
        read={policy: stage for stage, policy in _RESHARD.items()}.get,
    ),
    size("tp", "tensor_parallel_degree"),
    size("cp", "context_parallel_degree"),
    size("ep", "expert_parallel_degree"),
    size("pp", "pipeline_parallel_degree"),
    Setting(
        name="schedule", write=_write_schedule, read=_read_schedule,
        keys={"pipeline_parallel_schedule": "1F1B", "pipeline_parallel_microbatch_size": 1},
    ),
)  # fmt: skip
"""Settings of `ParallelismConfig`."""
TRAINING = (
    Setting(
        name="local", keys={"local_batch_size": _USUAL_LOCAL}, read=lambda local: local,
        write=lambda planned: (_local(planned),),
    ),
    size("global_batch", "global_batch_size", -1),  # a local batch on each replica
    size("length", "seq_len", _USUAL_LENGTH),
)  # fmt: skip
"""Settings of `TrainingConfig`."""
BACKEND = Setting(
    name="dispatcher", keys={"moe_comm_backend": "standard"},
    write=lambda planned: (
        _BACKENDS[planned.layout.dispatcher if planned.layout.ep > 1 else "all_to_all"],
    ),
    read=lambda backend: next((key for key, value in _BACKENDS.items() if value == backend), None),
)  # fmt: skip


_POLICIES = {"full": "FullAC", "selective": "SelectiveAC"}
_NARROW = """\
from torchtitan.components.quantization import (
    MXFP8GroupedExpertsConverter,
    MXFP8LinearConverter,
)
"""
_TEXT = """\
{remarks}from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
{narrow}from torchtitan.config import ParallelismConfig
{policy}from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{recipe.family} import model_registry
from torchtitan.models.{recipe.base}.config_registry import {recipe.function}
from torchtitan.trainer import Trainer


def planned() -> Trainer.Config:
    \"\"\"Return the planned configuration.\"\"\"
{body}"""


def torchtitan_export(planned: Planned) -> Export:
    """Return the module with the function `planned`."""
    recipe = recipe_of(planned.decoder)
    assert recipe is not None  # noqa: S101 - `model_rules` refuses other models
    missing = tuple(_not_expressed(planned))
    text = _TEXT.format(
        remarks=remarks(planned, missing, *_notes(planned, recipe)),
        recipe=recipe,
        policy="".join(
            f"from torchtitan.distributed.activation_checkpoint import {_POLICIES[module]}\n"
            for module in planned.layout.recompute
        ),
        narrow=_NARROW if planned.job.dtype == "mxfp8" else "",
        body="".join(f"    {line}\n" for line in _statements(planned, recipe)),
    )
    assets = "${HF_ASSETS:?set it to the folder of the model's tokenizer}"
    launch = (
        f'{planned.asks_in_line}PYTHONPATH="$PWD" {planned.torchrun} -m torchtitan.train '
        f'--module {_FILE.removesuffix(".py")} --config planned --hf_assets_path "{assets}"'
    )
    return Export(text=text, file_name=_FILE, launch=launch, not_expressed=missing)


def _notes(planned: Planned, recipe: Recipe) -> Iterator[str]:
    yield planned.where_to_start
    yield _ASSETS
    yield _TORCH
    if recipe.tower == "kept":
        yield _TOWER
    if planned.layout.order in SPLITTING:
        yield _SPLIT
    if planned.job.dtype == "mxfp8":
        yield "mxfp8 needs torchao."


def _not_expressed(planned: Planned) -> Iterator[str]:
    if planned.decoder.predictions:
        yield (
            "multi-token prediction, which torchtitan trains with neither a pipeline nor its "
            "chunked loss"
        )


def _statements(planned: Planned, recipe: Recipe) -> Iterator[str]:
    layout = planned.layout
    yield f"config = {recipe.function}()"
    yield from _model_lines(planned, recipe)
    yield "config.loss = ChunkedLossWrapper.Config("
    yield "    loss_fn=CrossEntropyLoss.Config("
    yield "        global_vocab_size=decoder_vocab_size(config.model_spec)"
    yield "    )"
    yield ")"
    for key, value in write_keys(TRAINING, planned).items():
        yield f"config.training.{key} = {value}"
    yield "config.training.disable_cuda_graphs = True"
    if planned.job.optimizer != "adam":
        yield 'config.optimizer.implementation = "fused_opt_states_bf16"'
    yield from _parallelism(planned, recipe)
    policy = next((_POLICIES[module] for module in layout.recompute), None)
    yield f"config.activation_checkpoint = {f'{policy}.Config()' if policy else None}"
    yield "return config"


def _local(planned: Planned) -> int:
    """Return the local batch: a pipeline splits it into micro-batches; else it is a micro-batch."""
    layout = planned.layout
    return planned.job.global_batch // layout.dp if layout.pp > 1 else layout.micro_batch


def _model_lines(planned: Planned, recipe: Recipe) -> Iterator[str]:
    """Yield the lines that choose the flavor, its expert exchange and its number format."""
    yield "config.model_spec = model_registry("
    yield f'    "{recipe.flavor}",'
    yield '    attn_backend="flex",'
    if planned.decoder.num_moe_layers:
        (backend,) = BACKEND.write(planned)
        yield f'    moe_comm_backend="{backend}",'
    if planned.job.dtype == "mxfp8":
        yield "    converters=["
        yield "        MXFP8LinearConverter.Config("
        yield "            model_compile_enabled=False,"
        yield '            fqns=["attention", "shared_experts", "feed_forward"],'
        yield "        ),"
        yield "        MXFP8GroupedExpertsConverter.Config("
        yield "            model_compile_enabled=False, pad_multiple=128"
        yield "        ),"
        yield "    ],"
    yield ")"
    if recipe.tower == "dropped":
        yield "config.model_spec.model.vision_encoder = None"


def _parallelism(planned: Planned, recipe: Recipe) -> Iterator[str]:
    layout = planned.layout
    yield "config.parallelism = ParallelismConfig("
    for key, value in write_keys(PARALLELISM, planned).items():
        yield f"    {key}={json.dumps(value)},"
    if layout.pp > 1:
        yield "    module_fqns_per_model_part=["
        stages = stage_modules(planned, has_tower=recipe.tower == "kept")
        yield from (f"        [{', '.join(map(repr, stage))}]," for stage in stages)
        yield "    ],"
    yield ")"


def stage_modules(planned: Planned, *, has_tower: bool) -> list[list[str]]:
    """Return the module names of each pipeline stage.

    Args:
        has_tower: whether the model has a vision encoder before the embedding.
    """
    stages = [[f"layers.{block}" for block in blocks] for blocks in planned.stages]
    stages[0].insert(0, "tok_embeddings")
    if has_tower:
        stages[0].insert(0, "vision_encoder")
    stages[-1] += ["norm", "lm_head"]
    return stages
