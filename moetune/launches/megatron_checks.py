"""Checks for arguments of a launch that Megatron refuses, ignores or runs slowly, with sources.

Rules of layouts are those of plans (`domain/target_rules.py`). These checks are of arguments only,
as Megatron-LM has them from core_v0.16.1 to core_v0.19.0.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from moetune.domain.chips import Generation
from moetune.domain.targets import MegatronCore
from moetune.launches.arguments import Launch
from moetune.launches.megatron import CONNECTIONS, KEYS, SWIFT
from moetune.launches.reading import Problem, Reading, Severity

_NAMES = Path(__file__).with_name("megatron_arguments.txt")
_ARGUMENTS = "megatron/training/arguments.py"
_CONFIG = "megatron/core/transformer/transformer_config.py"
_LAYER = "megatron/core/transformer/moe/moe_layer.py"
_EXPERTS = "megatron/core/transformer/moe/experts.py"
_MEGATRON_PROGRAMS = frozenset({"pretrain_gpt.py", "pretrain_mamba.py", "pretrain_hybrid.py"})
"""Megatron-LM's programs, whose parser refuses unknown arguments."""
_NEAR = 0.85
_KINDS = ("rlhf_type", "task_type")
UNEVEN = "layers that the pipeline ranks do not divide"
_NEWEST_ASKING: tuple[Generation, ...] = ("ampere", "hopper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The launch and the machine that a check looks at.

    Args:
        launch: the command; None if the fields are not arguments of a command.
        generation: generation of the machine's chips; None if it is not known.
    """

    reading: Reading
    launch: Launch | None = None
    generation: str | None = None

    @property
    def values(self) -> Mapping[str, Any]:
        """The arguments' values, by field."""
        return self.reading.values

    def has(self, key: str) -> bool:
        """Return whether a switch is on, or a key has a value."""
        return bool(self.values.get(key))

    @property
    def connections(self) -> str | None:
        """CUDA_DEVICE_MAX_CONNECTIONS as the script sets it; None if it does not."""
        value = self.values.get(CONNECTIONS)
        return None if value is None else str(value)

    @property
    def is_routed(self) -> bool:
        """Whether the model has experts."""
        return self.reading.decoder.num_moe_layers > 0

    @property
    def is_fsdp(self) -> bool:
        """Whether Megatron-FSDP shards."""
        return self.has("use_megatron_fsdp")


@dataclass(frozen=True, slots=True)
class Check:
    """A rule of arguments.

    Args:
        keys: keys with spaces between them; the problem has the line of the first that is given.
        breaks: returns whether a launch has the problem.
    """

    severity: Severity
    keys: str
    what: str
    why: str
    fix: str
    breaks: Callable[[Context], object]

    @property
    def is_of_core(self) -> bool:
        """Whether Megatron-Core itself refuses this, from any program."""
        return self.severity == "stops" and (self.why != _ARGUMENTS or self.breaks is _is_uneven)


def _is_uneven(context: Context) -> bool:
    """Return whether the pipeline ranks do not divide the layers, and no key sets the stages."""
    layout, values = context.reading.layout, context.values
    says = ("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage")  # fmt: skip
    if layout.pp == 1 or any(map(context.has, says)) or context.reading.decoder.has_mamba:
        return False
    ends = ("embedding", "loss")
    more = sum(bool(values.get(f"account_for_{end}_in_pipeline_split")) for end in ends)
    return bool((context.reading.decoder.num_layers + more) % layout.pp)


def _has_piped_stages(context: Context) -> bool:
    """Return whether a hybrid's pattern cuts stages that are uneven, or several for each rank."""
    pattern = str(context.values.get("hybrid_layer_pattern") or "").partition("/")[0]
    sizes = [len(stage) for stage in pattern.split("|")]
    return len(sizes) > 1 and (len(sizes) != context.reading.layout.pp or len({*sizes}) > 1)


def _splits_unevenly(context: Context) -> bool:
    per_stage = context.values.get("num_layers_per_virtual_pipeline_stage")
    layout, decoder = context.reading.layout, context.reading.decoder
    if not isinstance(per_stage, int) or decoder.num_layers % layout.pp:
        return False
    return bool(decoder.num_layers // layout.pp % per_stage)


def _needs_single(context: Context) -> bool:
    """Return whether Megatron asks for a single connection: tp or cp on GPUs before Blackwell."""
    layout = context.reading.layout
    is_asked = layout.tp * layout.cp > 1 and context.generation in _NEWEST_ASKING
    is_swift = context.launch is not None and context.launch.program == SWIFT  # which sets it
    is_asked = is_asked and not is_swift
    return is_asked and not context.is_fsdp and layout.overlap == "none"


_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_layout")  # fmt: skip
_CHECKS = (
    Check("stops", "sequence_parallel", "experts with tensor parallelism and no sequence "
          "parallelism", _LAYER, "--sequence-parallel",
          lambda context: context.is_routed and context.reading.layout.tp > 1
          and not context.has("sequence_parallel")),
    Check("stops", "overlap_param_gather", "--overlap-param-gather without --overlap-grad-reduce",
          _ARGUMENTS, "--overlap-grad-reduce",
          lambda context: context.has("overlap_param_gather")
          and not context.has("overlap_grad_reduce")),
    Check("stops", "overlap_param_gather", "--overlap-param-gather without a distributed optimizer",
          _ARGUMENTS, "--use-distributed-optimizer",
          lambda context: context.has("overlap_param_gather") and not context.is_fsdp
          and not context.has("use_distributed_optimizer")),
    Check("stops", "recompute_granularity",
          "--recompute-granularity full without --recompute-method and --recompute-num-layers",
          _CONFIG, "--recompute-method uniform --recompute-num-layers 1",
          lambda context: context.values.get("recompute_granularity") == "full"
          and not (context.has("recompute_method") and context.has("recompute_num_layers"))),
    Check("stops", "recompute_method recompute_num_layers",
          "selective recomputation with --recompute-method or --recompute-num-layers", _CONFIG,
          "leave them out, or --recompute-granularity full",
          lambda context: context.values.get("recompute_granularity") == "selective"
          and (context.has("recompute_method") or context.has("recompute_num_layers"))),
    Check("stops", "recompute_modules", "recomputation of moe_act without --moe-grouped-gemm",
          _CONFIG, "--moe-grouped-gemm",
          lambda context: "moe_act" in context.reading.layout.recompute
          and not context.has("moe_grouped_gemm")),
    Check("stops", " ".join(_VIRTUAL), "several arguments that say the stages of a pipeline rank",
          _ARGUMENTS, "keep one of them",
          lambda context: sum(map(context.has, _VIRTUAL)) > 1),
    Check("stops", "pipeline_model_parallel_size num_layers",
          UNEVEN, _ARGUMENTS,
          "--pipeline-model-parallel-layout, or a size that divides them", _is_uneven),
    Check("note", "hybrid_layer_pattern",
          "the pattern's pipes cut the pipeline's stages, which are priced as one equal stage for "
          "each rank: time and memory of the fullest rank are higher",
          "core/models/hybrid/hybrid_layer_allocation.py", "", _has_piped_stages),
    Check("stops", "num_layers_per_virtual_pipeline_stage",
          "layers of a pipeline rank that --num-layers-per-virtual-pipeline-stage does not divide",
          _ARGUMENTS, "--num-virtual-stages-per-pipeline-rank, or a divisor", _splits_unevenly),
    Check("stops", "moe_shared_expert_overlap", "--moe-shared-expert-overlap with "
          "--overlap-moe-expert-parallel-comm", _CONFIG, "leave one of them out",
          lambda context: context.has("moe_shared_expert_overlap")
          and context.reading.layout.overlap == "batch"),
    Check("stops", "moe_shared_expert_overlap",
          "--moe-shared-expert-overlap with the dispatcher allgather", _CONFIG,
          "--moe-token-dispatcher-type alltoall",
          lambda context: context.has("moe_shared_expert_overlap")
          and context.reading.layout.dispatcher == "all_gather"),
    Check("stops", "delay_wgrad_compute",
          "--delay-wgrad-compute without --overlap-moe-expert-parallel-comm", _CONFIG,
          "--overlap-moe-expert-parallel-comm, or leave it out",
          lambda context: context.has("delay_wgrad_compute")
          and context.reading.layout.overlap == "none"),
    Check("stops", "tp_comm_overlap", "--tp-comm-overlap without --sequence-parallel", _ARGUMENTS,
          "--sequence-parallel",
          lambda context: context.has("tp_comm_overlap")
          and not (context.has("sequence_parallel") and context.reading.layout.tp > 1)),
    Check("stops", "fp8 fp4", "--fp8-format with --fp4-format", _ARGUMENTS, "keep one of them",
          lambda context: context.has("fp8") and context.has("fp4")),
    Check("stops", "bf16 fp16", "--bf16 with --fp16", _ARGUMENTS, "keep one of them",
          lambda context: context.has("bf16") and context.has("fp16")),
    Check("stops", "use_megatron_fsdp", "Megatron-FSDP without --ckpt-format fsdp_dtensor",
          _ARGUMENTS, "--ckpt-format fsdp_dtensor",
          lambda context: context.is_fsdp and context.values.get("ckpt_format") != "fsdp_dtensor"),
    Check("stops", "use_megatron_fsdp", f"Megatron-FSDP with {CONNECTIONS}=1", _ARGUMENTS,
          f"export {CONNECTIONS}=32",
          lambda context: context.is_fsdp and context.connections == "1"),
    Check("stops", "tensor_model_parallel_size context_parallel_size",
          f"tensor or context parallelism with {CONNECTIONS} other than 1", _ARGUMENTS,
          f"export {CONNECTIONS}=1",
          lambda context: _needs_single(context) and context.connections not in (None, "1")),
    Check("note", "tensor_model_parallel_size context_parallel_size",
          f"tensor or context parallelism asks for {CONNECTIONS}=1, which the script does not set",
          _ARGUMENTS, f"export {CONNECTIONS}=1",
          lambda context: _needs_single(context) and context.connections is None),
    Check("costs", "overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm hides "
          f"nothing with {CONNECTIONS}=1: kernels of both streams wait for each other",
          _ARGUMENTS, f"export {CONNECTIONS}=32",
          lambda context: context.reading.layout.overlap == "batch" and context.connections == "1"),
    Check("costs", "num_moe_experts", "experts run one by one without --moe-grouped-gemm",
          _EXPERTS, "--moe-grouped-gemm",
          lambda context: context.is_routed and not context.has("moe_grouped_gemm")),
    Check("costs", "num_moe_experts", "rows are permuted by several kernels, and priced as by "
          "one kernel", _CONFIG, "--moe-permute-fusion",
          lambda context: context.is_routed and not context.has("moe_permute_fusion")),
    Check("costs", "use_distributed_optimizer", "no computation runs while parameters are gathered",
          _ARGUMENTS, "--overlap-param-gather",
          lambda context: context.reading.layout.zero > 0 and context.reading.layout.dp > 1
          and context.reading.job.optimizer != "muon"  # which gathers after its step
          and not context.has("overlap_param_gather")),
    Check("note", "expert_model_parallel_size num_moe_experts",
          "each expert is cut over the tensor ranks: without --expert-tensor-parallel-size it is "
          "--tensor-model-parallel-size", _ARGUMENTS, "--expert-tensor-parallel-size 1",
          lambda context: context.is_routed and context.reading.layout.tp > 1
          and not context.values.get("expert_tensor_parallel_size")),
    Check("note", "num_moe_experts", "the dispatcher is allgather, the default: every rank gets "
          "the tokens of all", _CONFIG, "--moe-token-dispatcher-type alltoall",
          lambda context: context.is_routed and context.reading.layout.ep > 1
          and "moe_token_dispatcher_type" not in context.values),
    Check("note", "moe_flex_dispatcher_backend", "--moe-flex-dispatcher-backend is ignored without "
          "--moe-token-dispatcher-type flex", _CONFIG, "--moe-token-dispatcher-type flex",
          lambda context: "moe_flex_dispatcher_backend" in context.values
          and context.values.get("moe_token_dispatcher_type") != "flex"),
    Check("note", "recompute_modules", "--recompute-modules is ignored without "
          "--recompute-granularity selective", _CONFIG, "--recompute-granularity selective",
          lambda context: "recompute_modules" in context.reading.given
          and context.values.get("recompute_granularity") != "selective"),
    Check("note", "sequence_parallel", "--sequence-parallel is switched off: tensor parallelism is "
          "1", _ARGUMENTS, "",
          lambda context: "sequence_parallel" in context.reading.given
          and context.reading.layout.tp == 1),
    Check("note", "optimizer", "another optimizer than adam, muon, lion or sgd is priced as Adam",
          "megatron/core/optimizer/__init__.py", "",
          lambda context: not re.search("adam$|^muon$|^dist_muon$|^lion$|^sgd$",
                                        str(context.values.get("optimizer", "adam")))),
    Check("note", "", "float32, without --bf16 or --fp16, is priced as bfloat16", _ARGUMENTS,
          "--bf16", lambda context: not context.has("bf16") and not context.has("fp16")),
    Check("note", "recompute_method", "--recompute-method block recomputes the first "
          "--recompute-num-layers of a stage alone; times and memory here are of all", _CONFIG, "",
          lambda context: context.values.get("recompute_method") == "block"),
)  # fmt: skip


def megatron_problems(context: Context) -> Iterator[Problem]:
    """Yield the problems of a launch's arguments; of the checks, those that stop it come first."""
    if context.launch is not None:
        yield from _unknown_arguments(context.launch, context.reading)
        yield from _of_other_trainings(context.launch)
    for check in _CHECKS:
        if check.breaks(context):
            yield _problem(check, context.reading)


def core_problems(reading: Reading) -> Iterator[Problem]:
    """Yield what Megatron-Core refuses in another program, with fields in place of arguments."""
    for check in _CHECKS:
        if check.is_of_core and check.breaks(Context(reading=reading)):
            problem = _problem(check, reading)
            yield replace(problem, what=_as_fields(problem.what), fix=_as_fields(problem.fix))


def _problem(check: Check, reading: Reading) -> Problem:
    lines = [reading.given[key].shown for key in check.keys.split() if key in reading.given]
    return Problem(
        severity=check.severity, line=lines[0] if lines else None, what=check.what,
        why=f"{reading.target.label}: {check.why}", fix=check.fix,
    )  # fmt: skip


def _as_fields(text: str) -> str:
    """Return a text with fields in place of arguments: "sequence_parallel"."""
    return re.sub(r"--([a-z0-9-]+)", lambda match: match[1].replace("-", "_"), text)


@cache
def known_names(core: MegatronCore) -> frozenset[str]:
    """Return the names of the arguments of a Megatron-LM version, without dashes."""
    names: set[str] = set()
    for line in _NAMES.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        if line.startswith("["):
            if tuple(map(int, line[1:-1].split("."))) > core:
                break
            continue
        words = line.split()
        names |= {word for word in words if not word.startswith("-")}
        names -= {word[1:] for word in words if word.startswith("-")}
    return frozenset(names)


def _of_other_trainings(launch: Launch) -> Iterator[Problem]:
    """Yield a note if a step does more than is priced, as slime's and some of ms-swift's do."""
    if launch.is_slime:
        what = "the actor's update is priced, and no rollout"
        yield Problem(severity="note", line=launch.line, what=what)
    for argument in launch.arguments:
        kind = " ".join(word.text for word in argument.values)
        if argument.name in _KINDS and kind != "causal_lm":
            what = f"--{argument.name} {kind}: a step of supervised training is priced"
            yield Problem(severity="note", line=argument.shown, what=what)


def _unknown_arguments(launch: Launch, reading: Reading) -> Iterator[Problem]:
    """Yield the arguments that Megatron-LM does not have; other programs may have more."""
    if launch.program == SWIFT:
        return
    core = reading.target.core or (0, 16)
    names, is_megatron = known_names(core), launch.program in _MEGATRON_PROGRAMS
    unknown = [argument for argument in launch.arguments
               if argument.name not in names and f"{argument.name}=" not in names]  # fmt: skip
    if launch.is_mindspeed and unknown:
        flags = " ".join(dict.fromkeys(f"--{argument.name}" for argument in unknown))
        what = f"arguments of MindSpeed are neither checked nor priced: {flags}"
        yield Problem(severity="note", line=unknown[0].shown, what=what)
        return
    for argument in unknown:
        near = difflib.get_close_matches(argument.name.replace("_", "-"), names, n=1, cutoff=_NEAR)
        field = near[0].replace("-", "_") if near else ""
        if not is_megatron and field not in KEYS:
            continue
        where = f" {argument.where}" if argument.file else ""
        yield Problem(
            severity="stops" if is_megatron else "note", line=argument.shown,
            what=f"--{argument.name}{where} is unknown",
            why=f"{reading.target.label}: {_ARGUMENTS}",
            fix=f"--{near[0]}" if near else "leave it out",
        )  # fmt: skip
