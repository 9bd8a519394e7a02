"""Runtimes that a training plan is made for: what each can do, and what changes its times.

One row of facts for each, read in the named version's source; `--target` picks the row. A layout
that the runtime cannot run is refused by the name of what is missing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

from moetune.domain.errors import InputError
from moetune.domain.layout import BrokenRule, nearest_divisors
from moetune.domain.optimizers import OPTIMIZERS, OptimizerName, optimizer_of
from moetune.domain.pipeline import SCHEDULES, SPLITTING, Schedule
from moetune.domain.training import (
    DEFAULT_SMS,
    CudaGraphs,
    FoldedLayout,
    Overlap,
    Recompute,
    TokenDispatcher,
    TrainingDtype,
    TrainingJob,
    ZeroStage,
)

TargetName = Literal["moetune", "megatron", "bridge", "torchtitan", "transformers", "deepspeed"]
TARGETS: tuple[TargetName, ...] = get_args(TargetName)
_HIGHEST_WITHOUT_FSDP: ZeroStage = 1
"""Of Megatron-Core: its own distributed optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptByExperts:
    """What routed experts keep for their backward pass, beside their rows and up-projections.

    Args:
        activations: whether the activation's results are kept unless "moe_act" is recomputed;
            otherwise they are computed again in any case.
        results: whether a token's results are kept, one for each of its experts, for the gradients
            of the combine weights, and one of each shard where these are experts of their own;
            otherwise these are factors of the activation.
        gradients_wait: whether those of the up-projections are kept beside them under a schedule
            that splits the backward pass.
        router_copies: of the router's scores in float32; three are the logits, the probabilities
            and the map of the chosen ones.
    """

    activations: bool = True
    results: bool = False
    gradients_wait: bool = False
    router_copies: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A runtime, with what it can do.

    Args:
        version: that the facts were read in.
        source: where.
        tp_divides_ep: whether ep above 1 is a multiple of tp, and equal to it with all_gather,
            which works on tokens that the ranks already share.
        largest: of sizes that it bounds: {"vpp": 1} has no interleaved stages.
        zero_with_pp: highest ZeRO stage beside pipeline stages.
        zero_with_tp: highest ZeRO stage beside tensor parallelism.
        zero_with_split: highest ZeRO stage beside schedules that split the backward pass.
        schedules: of pipelines; where there are none, pp is 1.
        splits_recomputed: whether schedules that split the backward pass go with recomputation.
        predicts_apart: whether multi-token prediction may be on an earlier stage than the head.
        overlap_hidden: share of the shorter of computation and exchanges that overlap hides.
        hides_gradients: whether collectives of gradients and parameters run beside computation.
        launches: factor on the host's time to launch a block's kernels in Megatron-Core.
        optimizers: that it has, the one of its own default recipe first.
        logit_bytes: of one logit at the loss; 6 are one in bfloat16 and a copy in float32 that its
            gradient takes the place of, 2 a fused loss that writes the gradient over the logit.
        offloads_optimizer: whether the host can keep and compute a share of the optimizer, with
            ZeRO stage 1.
        sets_sms: whether the dispatcher's multiprocessors can be chosen.
        cuda_graphs: partial ones are of attention, the router and the order of rows.
        offloads_activations: whether activations of whole blocks can wait in host memory, without
            a pipeline, recomputation, overlap of exchanges and CUDA graphs.
        kernels_per_expert: that both passes launch for each expert of a rank one by one, in
            bfloat16 and in 8 bits: two layers of three GEMMs; rounding of inputs and gradients
            and the order of scales for each of them. 0 where grouped kernels do all at once.
        kept_by_experts: for the backward pass.
        shards_are_experts: whether the shards of an expert's width, over etp ranks, are experts of
            their own: each row travels to all of them in the one exchange over ep·etp ranks.
            Otherwise rows are exchanged over ep ranks, and gathered over the etp ones.
    """

    name: TargetName
    version: str
    source: str
    dispatchers: tuple[TokenDispatcher, ...]
    recompute: tuple[Recompute, ...]
    overlaps: tuple[Overlap, ...]
    zero: tuple[ZeroStage, ...]
    dtypes: tuple[TrainingDtype, ...]
    largest: MappingProxyType[str, int]
    zero_with_pp: ZeroStage
    zero_with_tp: ZeroStage = 3
    zero_with_split: ZeroStage = 3
    schedules: tuple[Schedule, ...] = ("1f1b",)
    splits_recomputed: bool = True
    predicts_apart: bool = False
    tp_divides_ep: bool = False
    overlap_hidden: float = 0.0
    hides_gradients: bool = True
    launches: float = 1.0
    optimizers: tuple[OptimizerName, ...] = ("adam",)
    logit_bytes: int = 6
    offloads_activations: bool = False
    offloads_optimizer: bool = False
    kernels_per_expert: tuple[int, int] = (0, 0)
    kept_by_experts: KeptByExperts = KeptByExperts()
    sets_sms: bool = False
    cuda_graphs: tuple[CudaGraphs, ...] = ("none",)
    shards_are_experts: bool = False

    def exchange_ranks(self, layout: FoldedLayout) -> int:
        """Return the ranks among which a layer's tokens are exchanged."""
        return layout.ep * layout.etp if self.shards_are_experts else layout.ep


def _sizes(**largest: int) -> MappingProxyType[str, int]:
    return MappingProxyType(largest)


_MEGATRON_RECOMPUTE: tuple[Recompute, ...] = (
    "core_attn", "moe_act", "norm", "mla_up_proj", "mlp", "shared_experts", "moe", "full",
)  # fmt: skip
_MEGATRON = Target(
    name="megatron", version="megatron-core 0.16.1",
    source="megatron/core/transformer/transformer_config.py, model_parallel_config.py",
    dispatchers=("all_to_all", "all_gather", "deepep", "hybrid_ep"),
    recompute=_MEGATRON_RECOMPUTE, overlaps=("none", "batch"), zero=(0, 1, 2, 3),
    dtypes=("bfloat16", "fp8", "mxfp8", "nvfp4"), largest=_sizes(), zero_with_pp=1,
    overlap_hidden=0.6,
    optimizers=("adam", "adam-bf16-grads", "adam-remainders", "adam-bf16"),
    kernels_per_expert=(6, 24), cuda_graphs=("none", "partial"),
    schedules=("1f1b", "interleaved"),  # core/pipeline_parallel/schedules.py has no other
    predicts_apart=True,
    sets_sms=True,  # moe_deepep_num_sms, moe_hybridep_num_sms
    offloads_activations=True,  # cpu_offloading_num_layers of Transformer Engine
    offloads_optimizer=True,  # HybridDeviceOptimizer
)  # fmt: skip
_KNOWN: dict[TargetName, Target] = {
    "moetune": Target(
        name="moetune", version="this one", source="moetune.runtime",
        dispatchers=("all_to_all", "hierarchical"),
        recompute=("core_attn", "norm", "mlp", "moe", "full"),
        overlaps=("none", "chunks"), zero=(0, 1, 3), dtypes=("bfloat16",),
        largest=_sizes(), zero_with_pp=3, zero_with_tp=1, zero_with_split=1,
        schedules=SCHEDULES, hides_gradients=False,
        kept_by_experts=KeptByExperts(
            activations=False, results=True, gradients_wait=True, router_copies=1
        ),
        splits_recomputed=False, shards_are_experts=True,
    ),
    "megatron": _MEGATRON,
    "bridge": replace(
        _MEGATRON, name="bridge", version="megatron-bridge 0.3.1",
        source="megatron/bridge/training/comm_overlap.py, flex_dispatcher_backend.py",
        logit_bytes=2, optimizers=OPTIMIZERS,
    ),
    "torchtitan": Target(
        name="torchtitan", version="0.3.0",
        source="torchtitan/config/configs.py, torchtitan/distributed/parallel_dims.py",
        dispatchers=("all_to_all", "deepep", "hybrid_ep"), recompute=("full",),
        overlaps=("none",), zero=(2, 3), dtypes=("bfloat16", "mxfp8"), largest=_sizes(etp=1),
        zero_with_pp=2, schedules=SCHEDULES,  # get_schedule_class of torch.distributed.pipelining
    ),
    "transformers": Target(
        name="transformers", version="5.23.0",
        source="transformers/distributed/configuration_utils.py",
        dispatchers=("all_to_all", "all_gather"), recompute=("full",), overlaps=("none",),
        zero=(3,), dtypes=("bfloat16",), tp_divides_ep=True,
        largest=_sizes(pp=1, vpp=1, cp=1, etp=1), zero_with_pp=0,
    ),
    "deepspeed": Target(
        name="deepspeed", version="0.19.8",
        source="deepspeed/module_inject/auto_ep_config.py, runtime/zero",
        dispatchers=("all_to_all",), recompute=("full",), overlaps=("none",), zero=(0, 1, 2, 3),
        dtypes=("bfloat16",), largest=_sizes(pp=1, vpp=1, cp=1, etp=1), zero_with_pp=1,
    ),
}  # fmt: skip


def find_target(name: str) -> Target:
    """Return a target's facts.

    Raises:
        InputError: there is no such target.
    """
    for known, target in _KNOWN.items():
        if known == name:
            return target
    raise InputError(f"target {name!r} is unknown", f"use one of {', '.join(TARGETS)}")


def target_rules(layout: FoldedLayout, target: Target, job: TrainingJob) -> Iterator[BrokenRule]:
    """Yield what of a layout of a job the runtime cannot run."""
    yield from layout_rules(layout, target)
    for what, flag, value, known in (
        ("the dtype", "dtype", job.dtype, target.dtypes),
        ("the optimizer", "optimizer", job.optimizer, target.optimizers),
    ):
        if value not in known:
            yield _cannot(target, f"{what} {value}", f"--{flag} {' or '.join(known)}")
    yield from _host_optimizer_rules(layout, target, job)
    yield from _optimizer_rules(layout, target, job)
    yield from _bias_rules(layout, target, job)


def host_rules(layout: FoldedLayout, target: Target, job: TrainingJob) -> Iterator[BrokenRule]:
    """Yield what of a layout's shares in host memory the runtime cannot run."""
    yield from _offload_rules(layout, target)
    yield from _host_optimizer_rules(layout, target, job)


def layout_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what of a layout the runtime cannot run, whatever the job."""
    for name, most in target.largest.items():
        size = getattr(layout, name)
        if size > most:
            yield _cannot(target, f"{name} {size}", f"--{name} {most}")
    for what, flag, value, known in (
        ("the dispatcher", "dispatcher", layout.dispatcher, target.dispatchers),
        *(("recomputation of", "recompute", one, target.recompute) for one in layout.recompute),
        ("overlap", "overlap", layout.overlap, target.overlaps),
        ("ZeRO stage", "zero", layout.zero, target.zero),
        ("CUDA graphs", "cuda-graphs", layout.cuda_graphs, target.cuda_graphs),
        ("schedule", "schedule", layout.order, target.schedules),
    ):
        if value not in known:
            yield _cannot(target, f"{what} {value}", f"--{flag} {' or '.join(map(str, known))}")
    yield from dispatcher_rules(layout, target)
    yield from _combinations(layout, target)
    yield from _overlap_rules(layout, target)
    yield from _offload_rules(layout, target)
    for module in ("full", "moe"):
        if layout.cuda_graphs == "partial" and module in layout.recompute:
            yield _cannot(target, f"partial CUDA graphs with recomputation of {module}",
                          "--cuda-graphs none, or --recompute moe_act,norm")  # fmt: skip


def dispatcher_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield the rules that a layout's dispatcher breaks."""
    if not layout.has_usual_sms and not target.sets_sms:
        yield _cannot(target, f"{layout.dispatcher} with {layout.sms} multiprocessors",
                      f"--dispatcher-sms {DEFAULT_SMS[layout.dispatcher]}")  # fmt: skip
    if layout.dispatcher != "all_gather":
        return
    if target.tp_divides_ep and layout.ep not in (1, layout.tp):
        yield _cannot(target, f"all_gather with ep {layout.ep} and tp {layout.tp}",
                      "--dispatcher all_to_all")  # fmt: skip
    if layout.overlap == "batch":
        yield _cannot(target, "overlap batch with all_gather", "--dispatcher all_to_all")


def _combinations(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what the runtime cannot run together."""
    if "m" in "".join((layout.stages or ())[:-1]) and not target.predicts_apart:
        yield _cannot(target, "multi-token prediction on an earlier stage than the head",
                      "--stages with m and L in the last one")  # fmt: skip
    if layout.pp > 1 and layout.zero > max(target.zero_with_pp, target.zero[0]):
        yield _cannot(target, f"ZeRO-{layout.zero} with pp {layout.pp}",
                      f"--zero {target.zero_with_pp}, or --pp 1")  # fmt: skip
    if layout.tp > 1 and layout.zero > target.zero_with_tp:
        yield _cannot(target, f"ZeRO-{layout.zero} with tp {layout.tp}",
                      f"--zero {target.zero_with_tp}, or --tp 1")  # fmt: skip
    if layout.order in SPLITTING:
        yield from _splitting_rules(layout, target)
    if target.tp_divides_ep and layout.ep > 1 and layout.ep % layout.tp:
        yield _cannot(target, f"ep {layout.ep} with tp {layout.tp}", "an ep that tp divides")


def _splitting_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what does not go with a backward pass whose weights wait."""
    if not target.splits_recomputed and layout.recompute:
        yield _cannot(target, f"recomputation with {layout.order}, whose weights wait with all "
                      "that was computed again", "--recompute none")  # fmt: skip
    if layout.zero > target.zero_with_split:
        yield _cannot(target, f"ZeRO-{layout.zero} with {layout.order}, whose weights' gradients "
                      "come when their blocks are sharded again",
                      f"--zero {target.zero_with_split}, or another --schedule")  # fmt: skip


def _overlap_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what Megatron-Core refuses beside its overlap (`transformer_config.py`).

    The overlap calls a block's parts and not the block, so that the hooks of Megatron-FSDP never
    fire: core 0.18 is the first that has hooks for it (`fsdp/mcore_fsdp_adapter.py`,
    `pipeline_parallel/combined_1f1b.py`, NVIDIA/Megatron-LM #3797). With ep 1 there is nothing to
    hide, whatever the runtime.
    """
    if layout.overlap != "none" and target.exchange_ranks(layout) == 1:
        what = f"overlap {layout.overlap} with ep 1"
        yield _cannot(target, what, "--ep above 1, or --overlap none")
    if layout.overlap != "batch":
        return
    if layout.pp > 1 and layout.vpp == 1:
        yield _cannot(target, "overlap batch with pp and no virtual stages", "--vpp above 1")
    if layout.zero > _HIGHEST_WITHOUT_FSDP:
        yield _cannot(target, f"overlap batch with ZeRO-{layout.zero}, which is Megatron-FSDP",
                      f"--zero {_HIGHEST_WITHOUT_FSDP} or --overlap none")  # fmt: skip
    for module in ("full", "moe"):
        if module in layout.recompute:
            yield _cannot(target, f"overlap batch with recomputation of {module}",
                          "--recompute moe_act,norm")  # fmt: skip


def _offload_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what Megatron-Core refuses beside activations in host memory.

    `transformer_config.py` refuses pipelines, recomputation and CUDA graphs of parts of a block;
    the pass that hides exchanges goes block by block past the offload's contexts.
    """
    if layout.offload_optimizer and not target.offloads_optimizer:
        yield _cannot(target, "an offloaded optimizer", "--offload-optimizer 0")
    elif layout.offload_optimizer and layout.zero != 1:
        what = f"an offloaded optimizer with ZeRO stage {layout.zero}"
        yield _cannot(target, what, "--zero 1")
    if not layout.offload_activations:
        return
    what = "offloaded activations"
    if not target.offloads_activations:
        yield _cannot(target, what, "--offload-activations 0")
        return
    if layout.pp > 1:
        yield _cannot(target, f"{what} with pp {layout.pp}", "--pp 1 or --offload-activations 0")
    if layout.recompute:
        yield _cannot(target, f"{what} with recomputation", "--recompute none")
    if layout.overlap != "none":
        yield _cannot(target, f"{what} with overlap {layout.overlap}", "--overlap none")
    if layout.cuda_graphs != "none":
        yield _cannot(target, f"{what} with CUDA graphs", "--cuda-graphs none")


def _host_optimizer_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob
) -> Iterator[BrokenRule]:
    """Yield what a host's share is not for: it is computed in float32, by Adam."""
    if layout.offload_optimizer and (job.optimizer != "adam" or job.dtype != "bfloat16"):
        what = f"an offloaded optimizer with the optimizer {job.optimizer} and {job.dtype}"
        yield _cannot(target, what, "--optimizer adam --dtype bfloat16")


def _optimizer_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob
) -> Iterator[BrokenRule]:
    """Yield what Megatron-Core's precision-aware optimizer is not for (`optimizer_config.py`).

    Beside 8-bit GEMMs it keeps another master copy, whose bytes are not known here.
    """
    if not optimizer_of(job.optimizer).is_precision_aware:
        return
    what = f"the optimizer {job.optimizer} with"
    if layout.zero == 0:
        yield _cannot(target, f"{what} ZeRO stage 0", "--zero 1 or --optimizer adam")
    if job.dtype != "bfloat16":
        yield _cannot(target, f"{what} the dtype {job.dtype}", "--optimizer adam")


def _bias_rules(layout: FoldedLayout, target: Target, job: TrainingJob) -> Iterator[BrokenRule]:
    """Yield what of experts' biases cannot be cut: that of a down-projection by its own width."""
    if not target.shards_are_experts or layout.etp == 1:
        return
    for part in {block.routed for block in job.decoder.kinds if block.routed is not None}:
        if part.biases and part.d_expert % layout.etp:
            near = " or ".join(map(str, nearest_divisors(part.d_expert, layout.etp)))
            what = f"etp {layout.etp} with experts that add biases of width {part.d_expert}"
            yield _cannot(target, what, f"--etp {near}")


def _cannot(target: Target, what: str, instead: str) -> BrokenRule:
    return BrokenRule(
        f"{target.name} ({target.version}) cannot run {what}",
        f"use {instead}, or another --target",
    )
