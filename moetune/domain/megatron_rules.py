"""Rules of Megatron-Core and Megatron-Bridge: layouts that they refuse at start.

The rules were read in Megatron-LM at the tags that `targets.py` names. Messages name files in
`megatron/core`.
"""

from collections.abc import Iterator

from moetune.domain.architecture import Decoder
from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.megatron_models import hybrid_symbols
from moetune.domain.recurrent import StateSpace
from moetune.domain.rules import Asked, Rule, indivisible
from moetune.domain.training import DEDUPLICATING, HALF_PRECISION, FoldedLayout

_ARGUMENTS = "../training/arguments.py"
_CONFIG = "transformer/transformer_config.py"
_MAMBA = "ssm/mamba_mixer.py, mamba_context_parallel.py"
_GEMMA = "megatron/bridge/models/gemma/gemma4_provider.py"
_EXPERTS = "transformer/moe/experts.py"
_STASHED = ("moe", "moe_act")
_WHOLE = ("full", "moe")


def _first_recomputed(asked: Asked, modules: tuple[str, ...]) -> str | None:
    return next((module for module in modules if module in asked.layout.recompute), None)


def _key_heads(asked: Asked) -> tuple[int, str] | None:
    """Return a number of key-value heads that neither divides tp nor is a multiple of tp."""
    counts = asked.decoder.kv_head_counts
    return indivisible((count for count in counts if asked.layout.tp % count), asked.layout.tp)


def _exchanged_heads(asked: Asked) -> tuple[int, str] | None:
    """Return heads that cp·tp does not divide, though windows or sinks need cp to exchange heads.

    Transformer Engine's `attn_forward_func_with_cp` (`context_parallel.py`) has windows and sinks
    only with that exchange, "a2a", and not in the ring of keys.
    """
    mixers = (mixer for mixer in asked.decoder.mixers if isinstance(mixer, GroupedQueryAttention))
    bound = (mixer for mixer in mixers if mixer.window is not None or mixer.num_sinks)
    counts = (count for mixer in bound for count in (mixer.num_heads, mixer.num_kv_heads))
    return indivisible(counts, asked.layout.cp * asked.layout.tp)


def _shared_heads(asked: Asked, counts: Iterator[int]) -> tuple[int, int, str] | None:
    """Return tp·cp, a number of heads that it does not divide, and the nearest sizes that do."""
    sharers = asked.layout.tp * asked.layout.cp
    heads = indivisible(counts, sharers)
    return None if heads is None else (sharers, *heads)


def _uneven_groups(asked: Asked) -> int | None:
    """Return Mamba groups of a tp rank whose number neither divides cp nor is a multiple of cp."""
    tp, cp = asked.layout.tp, asked.layout.cp
    counts = (groups // tp for groups in asked.decoder.mamba_groups if not groups % tp)
    return next((count for count in counts if count % cp and cp % count), None)


def _mamba_heads(asked: Asked) -> tuple[int, int, str] | None:
    mixers = (mixer for mixer in asked.decoder.mixers if isinstance(mixer, StateSpace))
    return _shared_heads(asked, (mixer.num_heads for mixer in mixers))


def _uneven_stages(asked: Asked) -> str:
    """Return the layers of a hybrid's stages if inner stages differ or any is empty; else ""."""
    if asked.layout.pp == 1 or asked.layout.vpp > 1 or not asked.decoder.has_mamba:
        return ""
    sizes = hybrid_stages(asked.layout, asked.decoder)
    is_uneven = len({*sizes[1:-1]}) > 1 or 0 in sizes
    return ", ".join(map(str, sizes)) if is_uneven else ""


def hybrid_stages(layout: FoldedLayout, decoder: Decoder) -> list[int]:
    """Return the layers of each stage of a hybrid; Megatron counts each part as a layer."""
    layers = [len(hybrid_symbols(block)) for block in decoder.blocks]
    sizes, first = [], 0
    for word in layout.stages_of(decoder):
        blocks = word.count("t")
        sizes.append(sum(layers[first : first + blocks]))
        first += blocks
    return sizes


def _bound_stage(asked: Asked) -> str:
    """Return the first block of a stage that reads keys which an earlier stage selected."""
    layout, decoder, first = asked.layout, asked.decoder, 0
    is_bound = layout.pp > 1 and len(decoder.stage_starts) < decoder.num_layers
    for word in layout.stages_of(decoder) if is_bound else ():
        if "t" in word and first not in decoder.stage_starts:
            return str(first + 1)
        first += word.count("t")
    return ""


def _unfused_functions(asked: Asked) -> str:
    functions = {part.function for part in asked.decoder.routed_kinds if part is not None}
    return "" if functions <= {"silu", "relu2"} else " and ".join(sorted(functions))


def _is_narrow_host(asked: Asked) -> bool:
    job = asked.job
    return job is not None and (job.optimizer != "adam" or job.dtype not in HALF_PRECISION)


def _is_whole(asked: Asked) -> bool:
    """Return whether graphs are of whole steps with experts."""
    return asked.layout.cuda_graphs == "full" and asked.decoder.num_moe_layers > 0


def _is_precision_aware(asked: Asked) -> bool:
    return asked.job is not None and asked.target.optimizer(asked.job).is_precision_aware


def _is_muon(asked: Asked) -> bool:
    return asked.job is not None and asked.job.optimizer == "muon"


def _is_half(asked: Asked) -> bool:
    return asked.job is not None and asked.job.dtype == "float16"


def _is_gemma(asked: Asked) -> bool:
    """Return whether experts are Gemma 4's, whose router and experts have other inputs."""
    return asked.decoder.family == "gemma4_text" and asked.decoder.num_moe_layers > 0


RECOMPUTED = (
    Rule("overlap batch with recomputation of {cause}", "--recompute moe_act,norm", _CONFIG,
         lambda asked: asked.layout.overlap == "batch" and _first_recomputed(asked, _WHOLE)),
)  # fmt: skip
"""Recomputation that excludes the layout's overlap."""
# The overlap calls a block's parts and not the block, so that hooks of Megatron-FSDP never fire
# before core 0.18 (`distributed/fsdp/mcore_fsdp_adapter.py`, NVIDIA/Megatron-LM #3797).
BATCH_OVERLAP = (
    Rule("overlap batch with pp and no virtual stages", "--vpp above 1", _CONFIG,
         lambda asked: asked.target.core and asked.layout.overlap == "batch"
         and asked.layout.pp > 1 and asked.layout.vpp == 1),
    Rule("overlap batch with ZeRO-{layout.zero}, which is Megatron-FSDP",
         "--zero 1 or --overlap none", "pipeline_parallel/combined_1f1b.py",
         lambda asked: asked.target.core and asked.layout.overlap == "batch"
         and asked.layout.zero > 1, before=(0, 18)),
    *RECOMPUTED,
)  # fmt: skip
GRAPHS = (
    Rule("partial CUDA graphs with recomputation of {cause}",
         "--cuda-graphs none, or --recompute moe_act,norm", _CONFIG,
         lambda asked: asked.layout.cuda_graphs == "partial" and _first_recomputed(asked, _WHOLE)),
)  # fmt: skip
HOST_OPTIMIZER = (
    Rule("an offloaded optimizer with the optimizer {job.optimizer} and {job.dtype}",
         "--optimizer adam --dtype bfloat16", "",
         lambda asked: asked.layout.offload_optimizer and _is_narrow_host(asked)),
)  # fmt: skip
"""The host updates its share in float32, with Adam."""
MEGATRON = (
    Rule("tp {layout.tp} with {cause[0]} key-value heads, of which neither divides the other",
         "--tp {cause[1]}", _CONFIG, _key_heads),
    Rule("cp {layout.cp} with an indexer of keys (DSA)", "--cp 1", _CONFIG,
         lambda asked: asked.layout.cp > 1 and any(
             isinstance(mixer, LatentAttention) and mixer.indexer is not None
             for mixer in asked.decoder.mixers), before=(0, 19)),
    Rule("a stage from block {cause} on, which reads keys that the stage before it selects (DSA)",
         "--pp 1, or --stages that begin with blocks that select keys",
         "models/gpt/experimental_attention_variant_module_specs.py", _bound_stage),
    Rule("cp {layout.cp} and tp {layout.tp} with windows or sinks and {cause[0]} heads", "--cp 1",
         "Transformer Engine, context_parallel.py",
         lambda asked: asked.layout.cp > 1 and _exchanged_heads(asked)),
    Rule("cp {layout.cp} with gated delta nets", "--cp 1", _CONFIG,
         lambda asked: asked.layout.cp > 1 and asked.decoder.delta_heads, before=(0, 18)),
    Rule("tp·cp {cause[0]} with {cause[1]} heads of gated delta nets", "tp·cp {cause[2]}", _CONFIG,
         lambda asked: (asked.layout.cp == 1 or asked.core >= (0, 18)) and _shared_heads(
             asked, (count for counts in asked.decoder.delta_heads for count in counts))),
    Rule("tp {layout.tp} with {cause[0]} Mamba groups", "--tp {cause[1]}", _MAMBA,
         lambda asked: indivisible(asked.decoder.mamba_groups, asked.layout.tp)),
    Rule("cp {layout.cp} with {cause} Mamba groups a rank", "--cp 1", _MAMBA, _uneven_groups),
    Rule("tp·cp {cause[0]} with {cause[1]} Mamba heads", "--cp 1", _MAMBA, _mamba_heads),
    # Stages of hybrids have equal numbers of layers, except the first and the last.
    Rule("virtual stages of a Mamba hybrid", "--vpp 1", "ssm/mamba_block.py",
         lambda asked: asked.layout.vpp > 1 and asked.decoder.has_mamba),
    Rule("overlap batch of a Mamba hybrid, which has no schedule plan", "--overlap none",
         "models/mamba/mamba_model.py",
         lambda asked: asked.layout.overlap == "batch" and asked.decoder.has_mamba),
    Rule("offloaded activations of a Mamba hybrid", "--offload-activations 0", "ssm/mamba_block.py",
         lambda asked: asked.layout.offload_activations and asked.decoder.has_mamba),
    Rule("stages of {cause} layers of a Mamba hybrid",
         "--stages with as many in each but the first and the last", "ssm/mamba_block.py",
         _uneven_stages),
    Rule("overlap batch with {cause} steps of multi-token prediction", "--overlap none", _CONFIG,
         lambda asked: asked.layout.overlap == "batch"
         and (steps := len(asked.decoder.predictions)) > 1 and steps),
    Rule("overlap batch with multi-token prediction and pp 1", "--pp above 1", _CONFIG,
         lambda asked: asked.layout.overlap == "batch" and asked.layout.pp == 1
         and len(asked.decoder.predictions) == 1, before=(0, 18)),
    # Overlap delays weight gradients of the parts of a block that graphs replay.
    Rule("partial CUDA graphs with overlap batch and Megatron-FSDP", "--cuda-graphs none",
         "distributed/fsdp/mcore_fsdp_adapter.py",
         lambda asked: asked.layout.cuda_graphs == "partial"
         and asked.layout.overlap == "batch" and asked.layout.zero > 1),
    Rule("partial CUDA graphs with overlap batch and biases of attention", "--cuda-graphs none",
         _ARGUMENTS,
         lambda asked: asked.layout.cuda_graphs == "partial" and asked.layout.overlap == "batch"
         and any(getattr(mixer, "qkv_biases", 0) for mixer in asked.decoder.mixers),
         since=(0, 17)),
    # Graphs of a whole step need a fixed number of experts' rows, for any routing:
    # `moe_expert_rank_capacity_factor` bounds a rank's rows, and `moe_paged_stash` keeps them; both
    # need HybridEP and the fused experts of `transformer/moe/experts.py`.
    Rule("full CUDA graphs of a model with experts, whose rows no paged stash keeps",
         "a version with core 0.18 or later, or --cuda-graphs partial", _CONFIG, _is_whole,
         before=(0, 18)),
    Rule("full CUDA graphs of experts with ep 1", "--ep above 1, or --cuda-graphs partial or none",
         _CONFIG, lambda asked: _is_whole(asked) and asked.layout.ep == 1, since=(0, 18)),
    Rule("full CUDA graphs of experts with etp {layout.etp}",
         "--etp 1, or --cuda-graphs partial or none", _EXPERTS,
         lambda asked: _is_whole(asked) and asked.layout.etp > 1, since=(0, 18)),
    Rule("full CUDA graphs of experts with recomputation of {cause}, whose results the paged stash "
         "keeps", "--recompute norm", "transformer/moe/paged_stash.py",
         lambda asked: _is_whole(asked) and _first_recomputed(asked, _STASHED), since=(0, 18)),
    Rule("full CUDA graphs of experts with {cause}", "--cuda-graphs partial or none", _EXPERTS,
         lambda asked: _is_whole(asked) and _unfused_functions(asked), since=(0, 18)),
    Rule("recomputation of norms in Gemma 4's blocks with experts", "--recompute none or moe_act",
         _GEMMA, lambda asked: "norm" in asked.layout.recompute and _is_gemma(asked),
         since=(0, 19), target="bridge"),
    Rule("CUDA graphs of Gemma 4's blocks with experts", "--cuda-graphs none", _GEMMA,
         lambda asked: asked.layout.cuda_graphs != "none" and _is_gemma(asked),
         since=(0, 19), target="bridge"),
    Rule("etp {layout.etp} with experts that add biases", "--etp 1", _CONFIG,
         lambda asked: asked.layout.etp > 1 and any(
             part is not None and part.biases for part in asked.decoder.routed_kinds)),
    *HOST_OPTIMIZER,
    # Muon's replicas share matrices whole, without the distributed optimizer's shards; before core
    # 0.18 its reduction of gradients is not hidden, or the optimizer has another name.
    Rule("the optimizer muon", "a version with core 0.18 or later, or --optimizer adam",
         _ARGUMENTS, _is_muon, before=(0, 18)),
    Rule("the optimizer muon with ZeRO-{layout.zero}, which is Megatron-FSDP", "--zero 1",
         _ARGUMENTS, lambda asked: _is_muon(asked) and asked.layout.zero > 1),
    Rule("the optimizer muon with the dtype float16", "--optimizer adam", "optimizer/__init__.py",
         lambda asked: _is_muon(asked) and _is_half(asked)),
    Rule("the dispatcher {layout.dispatcher} with the dtype float16", "--dispatcher all_to_all",
         "deepseek-ai/DeepEP, which combines bfloat16",
         lambda asked: asked.layout.dispatcher in DEDUPLICATING and _is_half(asked)),
    Rule("the optimizer muon with a share in host memory", "--offload-optimizer 0", _ARGUMENTS,
         lambda asked: _is_muon(asked) and asked.layout.offload_optimizer),
    Rule("the optimizer muon with adapters", "--optimizer adam", _ARGUMENTS,
         lambda asked: _is_muon(asked) and asked.job is not None and asked.job.tuning.adapters),
    Rule("the optimizer {job.optimizer} with ZeRO stage 0", "--zero 1 or --optimizer adam", "",
         lambda asked: asked.layout.zero == 0 and _is_precision_aware(asked)),
    Rule("the optimizer {job.optimizer} with the dtype float16", "--optimizer adam", "",
         lambda asked: _is_half(asked) and asked.job is not None and asked.job.optimizer != "adam"
         and _is_precision_aware(asked)),
    Rule("the optimizer adam-bf16-moments with the dtype {job.dtype}", "--optimizer adam-bf16", "",
         lambda asked: asked.job is not None and asked.job.optimizer == "adam-bf16-moments"
         and asked.job.dtype != "bfloat16"),
)  # fmt: skip
