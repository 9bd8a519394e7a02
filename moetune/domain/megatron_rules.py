"""Rules of Megatron-Core and Megatron-Bridge: what of a layout they refuse at start.

Read in Megatron-LM at the tags that `targets.py` names. Files that a message names are those of
`megatron/core`.
"""

from collections.abc import Iterator

from moetune.domain.architecture import Decoder
from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.layout import BrokenRule, nearest_divisors
from moetune.domain.megatron_models import hybrid_symbols
from moetune.domain.optimizers import optimizer_of
from moetune.domain.recurrent import StateSpace
from moetune.domain.site import Site
from moetune.domain.targets import MegatronCore, Target
from moetune.domain.training import HALF_PRECISION, FoldedLayout, TrainingJob, ZeroStage

_HIGHEST_WITHOUT_FSDP: ZeroStage = 1
"""ZeRO stage of Megatron-Core's own distributed optimizer."""
_CONFIG = "transformer/transformer_config.py"
_SHARDS_ALL = 3
"""ZeRO stage."""
_MAMBA = "ssm/mamba_mixer.py, mamba_context_parallel.py"
_STASH_CORE: MegatronCore = (0, 18)
"""First core with `moe_paged_stash` and `cuda_graph_impl="full_iteration"`."""
_GEMMA_CORE: MegatronCore = (0, 19)
"""First core whose Bridge checks what Gemma 4's forward pass of experts leaves out."""
_GEMMA = "megatron/bridge/models/gemma/gemma4_provider.py"
_FSDP_HOOKS_CORE: MegatronCore = (0, 18)
"""First core whose overlap of exchanges fires the hooks of Megatron-FSDP."""


def megatron_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob, site: Site | None
) -> Iterator[BrokenRule]:
    """Yield what of a layout of a job Megatron refuses, beyond `layout_rules`."""
    del site
    yield from _head_rules(layout, target, job.decoder)
    yield from _delta_rules(layout, target, job.decoder)
    if job.decoder.has_mamba:
        yield from _mamba_rules(layout, target, job.decoder)
        yield from _hybrid_rules(layout, target, job.decoder)
    if layout.overlap == "batch":
        yield from _prediction_rules(layout, target, job.decoder)
    if layout.cuda_graphs == "partial":
        yield from _partial_rules(layout, target, job.decoder)
    if layout.cuda_graphs == "full" and job.decoder.num_moe_layers:
        yield from _full_rules(layout, target, job.decoder)
    if target.name == "bridge" and _core(target) >= _GEMMA_CORE:
        yield from _gemma_rules(layout, target, job.decoder)
    yield from _bias_rules(layout, target, job.decoder)
    yield from host_optimizer_rules(layout, target, job)
    yield from _optimizer_rules(layout, target, job)


def _core(target: Target) -> MegatronCore:
    return target.core or (0, 16)


def _divisor_words(count: int, near: int) -> str:
    return " or ".join(map(str, nearest_divisors(count, near)))


def _head_rules(layout: FoldedLayout, target: Target, decoder: Decoder) -> Iterator[BrokenRule]:
    """Yield what of attention's heads is not shared among ranks."""
    for count in decoder.kv_head_counts:
        if layout.tp % count and count % layout.tp:
            yield target.refusal(
                f"tp {layout.tp} with {count} key-value heads, of which neither divides the other",
                f"--tp {_divisor_words(count, layout.tp)}", _CONFIG,
            )  # fmt: skip
    if layout.cp == 1:
        return
    for mixer in decoder.mixers:
        match mixer:
            case LatentAttention() if _core(target) < (0, 19) and mixer.indexer is not None:
                yield target.refusal(
                    f"cp {layout.cp} with an indexer of keys (DSA)", "--cp 1", _CONFIG
                )
            case GroupedQueryAttention() if mixer.window is not None or mixer.num_sinks:
                yield from _exchanged_head_rules(layout, target, mixer)


def _exchanged_head_rules(
    layout: FoldedLayout, target: Target, mixer: GroupedQueryAttention
) -> Iterator[BrokenRule]:
    """Yield what windows and sinks ask of cp: heads exchanged among its ranks, "a2a".

    Transformer Engine's `attn_forward_func_with_cp` (`context_parallel.py`) has no windows and no
    sinks in the ring of keys.
    """
    sharers = layout.cp * layout.tp
    for count in (mixer.num_heads, mixer.num_kv_heads):
        if count % sharers:
            yield target.refusal(
                f"cp {layout.cp} and tp {layout.tp} with windows or sinks and {count} heads",
                "--cp 1", "Transformer Engine, context_parallel.py",
            )  # fmt: skip
            return


def _delta_rules(layout: FoldedLayout, target: Target, decoder: Decoder) -> Iterator[BrokenRule]:
    """Yield what of gated delta nets is not shared among ranks."""
    if not decoder.delta_heads:
        return
    has_cp = _core(target) >= (0, 18)
    if layout.cp > 1 and not has_cp:
        yield target.refusal(f"cp {layout.cp} with gated delta nets", "--cp 1", _CONFIG)
        return
    sharers = layout.tp * layout.cp
    for counts in decoder.delta_heads:
        for count in counts:
            if count % sharers:
                yield target.refusal(
                    f"tp·cp {sharers} with {count} heads of gated delta nets",
                    f"tp·cp {_divisor_words(count, sharers)}", _CONFIG,
                )  # fmt: skip


def _mamba_rules(layout: FoldedLayout, target: Target, decoder: Decoder) -> Iterator[BrokenRule]:
    """Yield what of Mamba's groups and heads is not shared among ranks."""
    for groups in decoder.mamba_groups:
        if groups % layout.tp:
            yield target.refusal(
                f"tp {layout.tp} with {groups} Mamba groups",
                f"--tp {_divisor_words(groups, layout.tp)}", _MAMBA,
            )  # fmt: skip
            return
        ranked = groups // layout.tp
        if ranked % layout.cp and layout.cp % ranked:
            what = f"cp {layout.cp} with {ranked} Mamba groups a rank"
            yield target.refusal(what, "--cp 1", _MAMBA)
    for mixer in decoder.mixers:
        if isinstance(mixer, StateSpace) and mixer.num_heads % (layout.tp * layout.cp):
            what = f"tp·cp {layout.tp * layout.cp} with {mixer.num_heads} Mamba heads"
            yield target.refusal(what, "--cp 1", _MAMBA)


def _hybrid_rules(layout: FoldedLayout, target: Target, decoder: Decoder) -> Iterator[BrokenRule]:
    """Yield what hybrids with Mamba do not have (`ssm/mamba_block.py`, `models/hybrid`).

    Their stages have as many layers each, but for the first and the last.
    """
    if layout.vpp > 1:
        yield target.refusal("virtual stages of a Mamba hybrid", "--vpp 1", "ssm/mamba_block.py")
    if layout.overlap == "batch":
        yield target.refusal(
            "overlap batch of a Mamba hybrid, which has no schedule plan", "--overlap none",
            "models/mamba/mamba_model.py",
        )  # fmt: skip
    if layout.offload_activations:
        yield target.refusal(
            "offloaded activations of a Mamba hybrid", "--offload-activations 0",
            "ssm/mamba_block.py",
        )  # fmt: skip
    if layout.pp > 1 and layout.vpp == 1:
        sizes = hybrid_stages(layout, decoder)
        if len({*sizes[1:-1]}) > 1 or 0 in sizes:
            yield target.refusal(
                f"stages of {', '.join(map(str, sizes))} layers of a Mamba hybrid",
                "--stages with as many in each but the first and the last", "ssm/mamba_block.py",
            )  # fmt: skip


def hybrid_stages(layout: FoldedLayout, decoder: Decoder) -> list[int]:
    """Return the layers of each stage of a hybrid, as Megatron counts them: one for each part."""
    layers = [len(hybrid_symbols(block)) for block in decoder.blocks]
    sizes, first = [], 0
    for word in layout.stages_of(decoder):
        blocks = word.count("t")
        sizes.append(sum(layers[first : first + blocks]))
        first += blocks
    return sizes


def _prediction_rules(
    layout: FoldedLayout, target: Target, decoder: Decoder
) -> Iterator[BrokenRule]:
    """Yield what of multi-token prediction does not go with overlap of exchanges."""
    steps = len(decoder.predictions)
    if steps > 1:
        yield target.refusal(
            f"overlap batch with {steps} steps of multi-token prediction", "--overlap none",
            _CONFIG,
        )  # fmt: skip
    elif steps and layout.pp == 1 and _core(target) < (0, 18):
        yield target.refusal(
            "overlap batch with multi-token prediction and pp 1", "--pp above 1", _CONFIG
        )


def _partial_rules(layout: FoldedLayout, target: Target, decoder: Decoder) -> Iterator[BrokenRule]:
    """Yield what does not go with graphs of parts of a block, whose weight gradients wait."""
    if layout.overlap != "batch":
        return
    if layout.zero > _HIGHEST_WITHOUT_FSDP:
        what = "partial CUDA graphs with overlap batch and Megatron-FSDP"
        yield target.refusal(what, "--cuda-graphs none", "distributed/fsdp/mcore_fsdp_adapter.py")
    biased = (mixer for mixer in decoder.mixers if getattr(mixer, "qkv_biases", 0))
    if _core(target) >= (0, 17) and next(biased, None) is not None:
        yield target.refusal(
            "partial CUDA graphs with overlap batch and biases of attention",
            "--cuda-graphs none", "../training/arguments.py",
        )  # fmt: skip


def _full_rules(layout: FoldedLayout, target: Target, decoder: Decoder) -> Iterator[BrokenRule]:
    """Yield what graphs of a whole step ask of experts: as many rows whatever the routing.

    `moe_expert_rank_capacity_factor` bounds a rank's rows, and `moe_paged_stash` keeps them; both
    need HybridEP and the fused experts of `transformer/moe/experts.py`.
    """
    instead = "--cuda-graphs partial or none"
    if _core(target) < _STASH_CORE:
        what = "full CUDA graphs of a model with experts, whose rows no paged stash keeps"
        yield target.refusal(what, "a version with core 0.18 or later, or --cuda-graphs partial",
                             _CONFIG)  # fmt: skip
        return
    if layout.ep == 1:
        what = "full CUDA graphs of experts with ep 1"
        yield target.refusal(what, f"--ep above 1, or {instead}", _CONFIG)
    if layout.etp > 1:
        yield target.refusal(
            f"full CUDA graphs of experts with etp {layout.etp}", f"--etp 1, or {instead}",
            "transformer/moe/experts.py",
        )  # fmt: skip
    for module in ("moe", "moe_act"):
        if module in layout.recompute:
            yield target.refusal(
                f"full CUDA graphs of experts with recomputation of {module}, whose results the "
                "paged stash keeps", "--recompute norm", "transformer/moe/paged_stash.py",
            )  # fmt: skip
    functions = {part.function for part in decoder.routed_kinds if part is not None}
    if not functions <= {"silu", "relu2"}:
        what = f"full CUDA graphs of experts with {' and '.join(sorted(functions))}"
        yield target.refusal(what, instead, "transformer/moe/experts.py")


def _gemma_rules(layout: FoldedLayout, target: Target, decoder: Decoder) -> Iterator[BrokenRule]:
    """Yield what Gemma 4's experts, whose router and experts have other inputs, do not go with."""
    if decoder.family != "gemma4_text" or not decoder.num_moe_layers:
        return
    if "norm" in layout.recompute:
        what = "recomputation of norms in Gemma 4's blocks with experts"
        yield target.refusal(what, "--recompute none or moe_act", _GEMMA)
    if layout.cuda_graphs != "none":
        what = "CUDA graphs of Gemma 4's blocks with experts"
        yield target.refusal(what, "--cuda-graphs none", _GEMMA)


def _bias_rules(layout: FoldedLayout, target: Target, decoder: Decoder) -> Iterator[BrokenRule]:
    """Yield what of experts' biases cannot be cut."""
    if layout.etp > 1 and any(part is not None and part.biases for part in decoder.routed_kinds):
        yield target.refusal(f"etp {layout.etp} with experts that add biases", "--etp 1", _CONFIG)


def batch_overlap_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what Megatron-Core refuses with its overlap (`transformer_config.py`).

    The overlap calls a block's parts and not the block, so that hooks of Megatron-FSDP never fire
    before core 0.18 (`distributed/fsdp/mcore_fsdp_adapter.py`, NVIDIA/Megatron-LM #3797).
    """
    if layout.pp > 1 and layout.vpp == 1:
        yield target.refusal(
            "overlap batch with pp and no virtual stages", "--vpp above 1", _CONFIG
        )
    if layout.zero > _HIGHEST_WITHOUT_FSDP and _core(target) < _FSDP_HOOKS_CORE:
        yield target.refusal(
            f"overlap batch with ZeRO-{layout.zero}, which is Megatron-FSDP",
            f"--zero {_HIGHEST_WITHOUT_FSDP} or --overlap none",
            "pipeline_parallel/combined_1f1b.py",
        )  # fmt: skip
    yield from overlapped_rules(layout, target)


def overlapped_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what of a layout's recomputation does not go with its overlap."""
    for module in ("full", "moe"):
        if layout.overlap == "batch" and module in layout.recompute:
            yield target.refusal(
                f"overlap batch with recomputation of {module}", "--recompute moe_act,norm", _CONFIG
            )


def graph_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what of a layout does not go with its CUDA graphs."""
    for module in ("full", "moe"):
        if layout.cuda_graphs == "partial" and module in layout.recompute:
            yield target.refusal(
                f"partial CUDA graphs with recomputation of {module}",
                "--cuda-graphs none, or --recompute moe_act,norm", _CONFIG,
            )  # fmt: skip


def offload_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what Megatron-Core refuses with activations or an optimizer in host memory.

    `transformer_config.py` refuses pipelines, recomputation and CUDA graphs of parts of a block;
    the pass that hides exchanges goes block by block past the offload's contexts.
    """
    if layout.offload_optimizer and target.offloads_states:
        yield from _host_state_rules(layout, target)
    elif layout.offload_optimizer and not target.offloads_optimizer:
        yield target.refusal("an offloaded optimizer", "--offload-optimizer 0")
    elif layout.offload_optimizer and layout.zero != 1:
        what = f"an offloaded optimizer with ZeRO stage {layout.zero}"
        yield target.refusal(what, "--zero 1")
    if layout.offload_activations:
        yield from _waiting_rules(layout, target)


def _host_state_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what of a layout does not go with all states in host memory, which are in chunks."""
    if layout.zero != _SHARDS_ALL:
        what = f"states in host memory with ZeRO stage {layout.zero}"
        yield target.refusal(what, f"--zero {_SHARDS_ALL}")
    if layout.offload_optimizer != 1:
        what = f"a share of {layout.offload_optimizer:g} of the states in host memory"
        yield target.refusal(what, "--offload-optimizer 1 or 0")
    for name in ("tp", "cp", "pp"):
        if (size := getattr(layout, name)) > 1:
            yield target.refusal(f"states in host memory with {name} {size}", f"--{name} 1")


def _waiting_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    what = "offloaded activations"
    if not target.offloads_activations:
        yield target.refusal(what, "--offload-activations 0")
        return
    if layout.pp > 1:
        yield target.refusal(
            f"{what} with pp {layout.pp}", "--pp 1 or --offload-activations 0", _CONFIG
        )
    if layout.recompute:
        yield target.refusal(f"{what} with recomputation", "--recompute none", _CONFIG)
    if layout.overlap != "none":
        yield target.refusal(f"{what} with overlap {layout.overlap}", "--overlap none", _CONFIG)
    if layout.cuda_graphs != "none":
        yield target.refusal(f"{what} with CUDA graphs", "--cuda-graphs none", _CONFIG)


def host_optimizer_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob
) -> Iterator[BrokenRule]:
    """Yield what a host's share is not for: it is computed in float32, by Adam."""
    if layout.offload_optimizer and (job.optimizer != "adam" or job.dtype not in HALF_PRECISION):
        what = f"an offloaded optimizer with the optimizer {job.optimizer} and {job.dtype}"
        yield target.refusal(what, "--optimizer adam --dtype bfloat16")


def _optimizer_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob
) -> Iterator[BrokenRule]:
    """Yield what the precision-aware optimizer is not for (`optimizer/optimizer_config.py`).

    With 8-bit GEMMs it keeps another master copy, whose bytes are not known here.
    """
    if not optimizer_of(job.optimizer).is_precision_aware:
        return
    what = f"the optimizer {job.optimizer} with"
    if layout.zero == 0:
        yield target.refusal(f"{what} ZeRO stage 0", "--zero 1 or --optimizer adam")
    if job.dtype != "bfloat16":
        yield target.refusal(f"{what} the dtype {job.dtype}", "--optimizer adam")
