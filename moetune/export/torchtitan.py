"""torchtitan 0.3.0: a function for `--config`, which changes a recipe of the model's family."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

from moetune.domain.pipeline import SPLITTING, Schedule
from moetune.domain.training import TokenDispatcher
from moetune.export.planned import Export, Planned, refuse, remarks

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
_RESHARD = {2: "never", 3: "always"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """A model as torchtitan knows it.

    Args:
        family: module of `torchtitan.models`.
        function: of its `config_registry`, the nearest in size.
        flavor: of its `model_registry`.
    """

    family: str
    function: str
    flavor: str


_RECIPES: MappingProxyType[str, _Recipe] = MappingProxyType(
    {
        "deepseek-v3": _Recipe(family="deepseek_v3", function="deepseek_v3_671b", flavor="671B"),
        "qwen3-30b-a3b": _Recipe(family="qwen3", function="qwen3_30b_a3b", flavor="30B-A3B"),
        "qwen3-235b-a22b": _Recipe(family="qwen3", function="qwen3_30b_a3b", flavor="235B-A22B"),
    }
)


_POLICIES = {"full": "FullAC", "selective": "SelectiveAC"}
_TEXT = """\
{remarks}from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import ParallelismConfig
{policy}from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{recipe.family} import model_registry
from torchtitan.models.{recipe.family}.config_registry import {recipe.function}
from torchtitan.trainer import Trainer


def planned() -> Trainer.Config:
    \"\"\"Return the planned configuration.\"\"\"
{body}"""


def torchtitan_export(planned: Planned) -> Export:
    """Return the module with the function `planned`.

    Raises:
        InfeasiblePlanError: torchtitan has no such model, or there are fewer micro-batches than
            stages of 1F1B.
    """
    recipe = _RECIPES.get(planned.decoder.name)
    if recipe is None:
        raise refuse(
            planned, f"{planned.decoder.name}: it has no recipe for it",
            f"use one of {', '.join(_RECIPES)}, or another --to",
        )  # fmt: skip
    if planned.layout.order == "1f1b" and planned.num_micro_batches < planned.layout.pp:
        raise refuse(
            planned, f"{planned.num_micro_batches} micro-batches in {planned.layout.pp} stages",
            "torch's Schedule1F1B needs as many: plan with a larger --global-batch, or a smaller "
            "--pp or --micro-batch",
        )  # fmt: skip
    missing = tuple(_not_expressed(planned))
    text = _TEXT.format(
        remarks=remarks(
            planned,
            missing,
            "Set hf_assets_path, the optimizer and the data for your run.",
            *((_SPLIT,) if planned.layout.order in SPLITTING else ()),
        ),
        recipe=recipe,
        policy="".join(
            f"from torchtitan.distributed.activation_checkpoint import {_POLICIES[one]}\n"
            for one in planned.layout.recompute
        ),
        body="".join(f"    {line}\n" for line in _statements(planned, recipe)),
    )
    launch = (
        f'PYTHONPATH="$PWD" {planned.torchrun} -m torchtitan.train '
        f"--module {_FILE.removesuffix('.py')} --config planned"
    )
    return Export(text=text, file_name=_FILE, launch=launch, not_expressed=missing)


def _not_expressed(planned: Planned) -> Iterator[str]:
    if planned.decoder.predictions:
        yield "multi-token prediction, which torchtitan trains without a pipeline only"
    if planned.job.dtype == "mxfp8":
        yield "mxfp8 of the model's GEMMs: add its converters to model_registry"


def _statements(planned: Planned, recipe: _Recipe) -> Iterator[str]:
    layout, job = planned.layout, planned.job
    backend = _BACKENDS[layout.dispatcher if layout.ep > 1 else "all_to_all"]
    # A pipeline splits the local batch itself; without one it is a micro-batch, and accumulated.
    local = job.global_batch // layout.dp if layout.pp > 1 else layout.micro_batch
    yield f"config = {recipe.function}()"
    yield "config.model_spec = model_registry("
    yield f'    "{recipe.flavor}", attn_backend="flex", moe_comm_backend="{backend}"'
    yield ")"
    yield "config.loss = ChunkedLossWrapper.Config("
    yield "    loss_fn=CrossEntropyLoss.Config("
    yield "        global_vocab_size=decoder_vocab_size(config.model_spec)"
    yield "    )"
    yield ")"
    yield f"config.training.local_batch_size = {local}"
    yield f"config.training.global_batch_size = {job.global_batch}"
    yield f"config.training.seq_len = {job.length}"
    yield "config.training.disable_cuda_graphs = True"
    yield from _parallelism(planned)
    policy = next((_POLICIES[one] for one in layout.recompute), None)
    yield f"config.activation_checkpoint = {f'{policy}.Config()' if policy else None}"
    yield "return config"


def _parallelism(planned: Planned) -> Iterator[str]:
    layout = planned.layout
    yield "config.parallelism = ParallelismConfig("
    yield "    data_parallel_replicate_degree=1,"
    yield f"    data_parallel_shard_degree={layout.dp},"
    yield f'    fsdp_reshard_after_forward="{_RESHARD[layout.zero]}",'
    yield f"    tensor_parallel_degree={layout.tp},"
    yield f"    context_parallel_degree={layout.cp},"
    yield f"    expert_parallel_degree={layout.ep},"
    yield f"    pipeline_parallel_degree={layout.pp},"
    if layout.pp > 1:
        yield f'    pipeline_parallel_schedule="{_SCHEDULES[layout.order]}",'
        yield f"    pipeline_parallel_microbatch_size={layout.micro_batch},"
        yield "    module_fqns_per_model_part=["
        yield from (f"        [{', '.join(map(repr, stage))}]," for stage in _stages(planned))
        yield "    ],"
    yield ")"


def _stages(planned: Planned) -> list[list[str]]:
    stages = [[f"layers.{block}" for block in blocks] for blocks in planned.stages]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return stages
