"""Rules of Megatron-Core and Megatron-Bridge: what of a layout they refuse at start.

Read in Megatron-LM at the tags that `targets.py` names; files are those below `megatron/`.
"""

from collections.abc import Iterator

from moetune.domain.layout import BrokenRule
from moetune.domain.optimizers import optimizer_of
from moetune.domain.site import Site
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob, ZeroStage

_HIGHEST_WITHOUT_FSDP: ZeroStage = 1
"""ZeRO stage of Megatron-Core's own distributed optimizer."""


def megatron_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob, site: Site | None
) -> Iterator[BrokenRule]:
    """Yield what of a layout of a job Megatron refuses, beyond `layout_rules`."""
    del site
    yield from host_optimizer_rules(layout, target, job)
    yield from _optimizer_rules(layout, target, job)


def batch_overlap_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what Megatron-Core refuses with its overlap (`core/transformer/transformer_config.py`).

    The overlap calls a block's parts and not the block, so that the hooks of Megatron-FSDP never
    fire: core 0.18 is the first that has hooks for it (`fsdp/mcore_fsdp_adapter.py`,
    `pipeline_parallel/combined_1f1b.py`, NVIDIA/Megatron-LM #3797).
    """
    if layout.pp > 1 and layout.vpp == 1:
        yield target.refusal("overlap batch with pp and no virtual stages", "--vpp above 1")
    if layout.zero > _HIGHEST_WITHOUT_FSDP:
        yield target.refusal(
            f"overlap batch with ZeRO-{layout.zero}, which is Megatron-FSDP",
            f"--zero {_HIGHEST_WITHOUT_FSDP} or --overlap none",
        )
    yield from overlapped_rules(layout, target)


def overlapped_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what of a layout's recomputation does not go with its overlap."""
    for module in ("full", "moe"):
        if layout.overlap == "batch" and module in layout.recompute:
            yield target.refusal(
                f"overlap batch with recomputation of {module}", "--recompute moe_act,norm"
            )


def graph_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what of a layout does not go with its CUDA graphs."""
    for module in ("full", "moe"):
        if layout.cuda_graphs == "partial" and module in layout.recompute:
            yield target.refusal(
                f"partial CUDA graphs with recomputation of {module}",
                "--cuda-graphs none, or --recompute moe_act,norm",
            )


def offload_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what Megatron-Core refuses with activations or an optimizer in host memory.

    `transformer_config.py` refuses pipelines, recomputation and CUDA graphs of parts of a block;
    the pass that hides exchanges goes block by block past the offload's contexts.
    """
    if layout.offload_optimizer and not target.offloads_optimizer:
        yield target.refusal("an offloaded optimizer", "--offload-optimizer 0")
    elif layout.offload_optimizer and layout.zero != 1:
        what = f"an offloaded optimizer with ZeRO stage {layout.zero}"
        yield target.refusal(what, "--zero 1")
    if layout.offload_activations:
        yield from _waiting_rules(layout, target)


def _waiting_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    what = "offloaded activations"
    if not target.offloads_activations:
        yield target.refusal(what, "--offload-activations 0")
        return
    if layout.pp > 1:
        yield target.refusal(f"{what} with pp {layout.pp}", "--pp 1 or --offload-activations 0")
    if layout.recompute:
        yield target.refusal(f"{what} with recomputation", "--recompute none")
    if layout.overlap != "none":
        yield target.refusal(f"{what} with overlap {layout.overlap}", "--overlap none")
    if layout.cuda_graphs != "none":
        yield target.refusal(f"{what} with CUDA graphs", "--cuda-graphs none")


def host_optimizer_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob
) -> Iterator[BrokenRule]:
    """Yield what a host's share is not for: it is computed in float32, by Adam."""
    if layout.offload_optimizer and (job.optimizer != "adam" or job.dtype != "bfloat16"):
        what = f"an offloaded optimizer with the optimizer {job.optimizer} and {job.dtype}"
        yield target.refusal(what, "--optimizer adam --dtype bfloat16")


def _optimizer_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob
) -> Iterator[BrokenRule]:
    """Yield what the precision-aware optimizer is not for (`core/optimizer/optimizer_config.py`).

    With 8-bit GEMMs it keeps another master copy, whose bytes are not known here.
    """
    if not optimizer_of(job.optimizer).is_precision_aware:
        return
    what = f"the optimizer {job.optimizer} with"
    if layout.zero == 0:
        yield target.refusal(f"{what} ZeRO stage 0", "--zero 1 or --optimizer adam")
    if job.dtype != "bfloat16":
        yield target.refusal(f"{what} the dtype {job.dtype}", "--optimizer adam")
