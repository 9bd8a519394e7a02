"""Rules of a training plan's runtimes: what of a layout each cannot run, by name."""

from collections.abc import Iterator

from moetune.domain.layout import BrokenRule, nearest_divisors
from moetune.domain.optimizers import optimizer_of
from moetune.domain.pipeline import SPLITTING
from moetune.domain.targets import Target
from moetune.domain.training import DEFAULT_SMS, FoldedLayout, TrainingJob, ZeroStage

_HIGHEST_WITHOUT_FSDP: ZeroStage = 1
"""Of Megatron-Core: its own distributed optimizer."""


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
    yield from overlap_rules(layout, target)
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


def overlap_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
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
    yield from overlapped_rules(layout, target)


def overlapped_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what of a layout's recomputation does not go with its overlap."""
    for module in ("full", "moe"):
        if layout.overlap == "batch" and module in layout.recompute:
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
