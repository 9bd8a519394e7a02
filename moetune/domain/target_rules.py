"""Rules of a training plan's runtimes: layouts that a runtime cannot run, by name.

This module checks rows of facts (`targets.py`), and a table for each runtime of rules that a row
cannot state. Planning and export check the same rules: `export` refuses nothing that is planned.

Rules of dispatchers are equal in all runtimes with these dispatchers. DeepEP 1.2.1
(`csrc/deep_ep.cpp`, `csrc/kernels/launch.cuh`) has kernels for 2, 4 and 8 ranks that NVLink joins
in a node, and for 2, 4, 8, 16, 18 or 20 nodes of 8 such ranks. HybridEP's ranks of a domain share
memory by NVLink.
"""

from collections.abc import Iterator
from types import MappingProxyType

from moetune.domain.architecture import Decoder
from moetune.domain.layout import BrokenRule
from moetune.domain.megatron_models import BRIDGE_MODELS, MEGATRON_MODELS
from moetune.domain.megatron_rules import BATCH_OVERLAP, GRAPHS, HOST_OPTIMIZER, MEGATRON
from moetune.domain.rules import Asked, Rule, refused
from moetune.domain.site import Site
from moetune.domain.targets import Target, TargetName
from moetune.domain.torch_rules import (
    DEEPSPEED,
    TORCHTITAN,
    TORCHTITAN_MODELS,
    TRANSFORMERS,
    TRANSFORMERS_MODELS,
)
from moetune.domain.training import DEDUPLICATING, FoldedLayout, TrainingJob, ZeroStage
from moetune.domain.tuning import TRAINS_ALL
from moetune.domain.tuning_rules import TUNING

_RULES: MappingProxyType[TargetName, tuple[Rule, ...]] = MappingProxyType({
    "moetune": (), "megatron": MEGATRON, "bridge": MEGATRON, "torchtitan": TORCHTITAN,
    "transformers": TRANSFORMERS, "deepspeed": DEEPSPEED,
})  # fmt: skip
_MODELS: MappingProxyType[TargetName, tuple[Rule, ...]] = MappingProxyType({
    "moetune": (), "megatron": MEGATRON_MODELS, "bridge": BRIDGE_MODELS,
    "torchtitan": TORCHTITAN_MODELS, "transformers": TRANSFORMERS_MODELS,
    "deepspeed": TRANSFORMERS_MODELS,
})  # fmt: skip
_IN_NODE, _NODES = (2, 4, 8), (2, 4, 8, 16, 18, 20)
"""`SWITCH_RANKS` and `SWITCH_RDMA_RANKS` of DeepEP's `launch.cuh`."""
_RANKS_OF_NODE = 8
"""`NUM_MAX_NVL_PEERS` of DeepEP."""
_KERNELS = "DeepEP 1.2.1, csrc/kernels/launch.cuh"
_INSTEAD = "--dispatcher all_to_all"
_README = "DeepEP, README.md"
_SHARDS_ALL = 3
"""ZeRO stage."""


def _kernel_ranks(asked: Asked) -> int:
    """Return the ranks of a dispatcher's group: Megatron's `tp_ep_group` of ep·etp ranks."""
    return asked.layout.ep * asked.layout.etp


def _deduplicates(asked: Asked) -> bool:
    return asked.layout.dispatcher in DEDUPLICATING


def _link_problem(asked: Asked) -> str:
    """Return the property of a machine that excludes a dispatcher's kernels; "" for none."""
    site = asked.site
    if site is None or not _deduplicates(asked) or _kernel_ranks(asked) == 1:
        return ""
    if site.vendor != "nvidia":
        return "without NVIDIA GPUs"
    if asked.layout.dispatcher == "deepep" and site.chip in asked.target.without_deepep:
        return f"on {site.chip}"
    return "" if (site.nvlink_peers or 0) > 1 else "without NVLink between GPUs"


def _node_problem(asked: Asked) -> str:
    """Return the ranks for which DeepEP has no kernels or nodes do not fit; "" for none."""
    ranks, site = _kernel_ranks(asked), asked.site
    if asked.layout.dispatcher != "deepep" or ranks == 1:
        return ""
    nodes, rest = divmod(ranks, _RANKS_OF_NODE)
    if ranks not in _IN_NODE and (rest or nodes not in _NODES):
        return f"{ranks}"
    if site is None or _link_problem(asked):
        return ""
    width = min(site.devices_per_node, site.nvlink_peers or 0)
    if ranks > _RANKS_OF_NODE and width != _RANKS_OF_NODE:
        return f"{ranks} over nodes of {width} GPUs that NVLink joins"
    is_cut = ranks <= _RANKS_OF_NODE and width % ranks
    return f"{ranks} across nodes of {width} GPUs that NVLink joins" if is_cut else ""


def _cut_dispatcher(asked: Asked) -> str:
    """Return the hint instead of a dispatcher that tp excludes; "" if tp does not exclude it."""
    able = asked.target.tp_dispatchers
    if asked.layout.tp == 1 or asked.layout.dispatcher in able:
        return ""
    names = [name for name in able if name in asked.target.dispatchers]
    return f"--dispatcher {' or '.join(names)}, or "


DISPATCHERS = (
    Rule("all_gather with ep {layout.ep} and tp {layout.tp}", _INSTEAD, "",
         lambda asked: asked.layout.dispatcher == "all_gather" and asked.target.gathers_over_tp
         and asked.layout.ep not in (1, asked.layout.tp)),
    Rule("overlap batch with all_gather", _INSTEAD, "",
         lambda asked: asked.layout.dispatcher == "all_gather" and asked.layout.overlap == "batch"),
    Rule("full CUDA graphs of experts with {layout.dispatcher}", "--dispatcher hybrid_ep",
         "transformer/transformer_config.py",
         lambda asked: asked.layout.cuda_graphs == "full" and asked.layout.ep > 1
         and asked.layout.dispatcher != "hybrid_ep"),
    Rule("{layout.dispatcher} with ep 1, which exchanges nothing", f"--ep above 1, or {_INSTEAD}",
         "", lambda asked: _deduplicates(asked) and _kernel_ranks(asked) == 1),
    Rule("deepep with ep·etp {cause}", _INSTEAD, _KERNELS, _node_problem),
    Rule("{layout.dispatcher} {cause}", "--dispatcher hybrid_ep or all_to_all",
         "flex_dispatcher_backend.py",
         lambda asked: (cause := _link_problem(asked)).startswith("on ") and cause),
    Rule("{layout.dispatcher} {cause}", _INSTEAD, _README,
         lambda asked: (cause := _link_problem(asked)).startswith("without ") and cause),
)  # fmt: skip
"""Rules of a layout's dispatcher."""
FAMILIES = (
    Rule("all_gather with experts of the family {decoder.family}", _INSTEAD,
         "moetune.TensorExpertLayer",
         lambda asked: asked.layout.dispatcher == "all_gather" and asked.layout.ep > 1
         and asked.target.gather_family not in ("", asked.decoder.family)),
)  # fmt: skip
"""Models that a runtime's dispatcher excludes."""
_COMBINED = (
    Rule("multi-token prediction on an earlier stage than the head",
         "--stages with m and L in the last stage", "",
         lambda asked: not asked.target.predicts_apart
         and "m" in "".join((asked.layout.stages or ())[:-1])),
    Rule("ZeRO-{layout.zero} with pp {layout.pp}", "--zero {target.zero_with_pp}, or --pp 1", "",
         lambda asked: asked.layout.pp > 1
         and asked.layout.zero > max(asked.target.zero_with_pp, asked.target.zero[0])),
    Rule("ZeRO-{layout.zero} with tp {layout.tp}", "--zero {target.zero_with_tp}, or --tp 1", "",
         lambda asked: asked.layout.tp > 1 and asked.layout.zero > asked.target.zero_with_tp),
    Rule("tp {layout.tp} with dispatcher {layout.dispatcher}", "{cause}--tp 1", "",
         _cut_dispatcher),
    Rule("ep {layout.ep} with tp {layout.tp}", "an ep that tp divides", "",
         lambda asked: asked.target.tp_divides_ep and asked.layout.ep > 1
         and asked.layout.ep % asked.layout.tp),
)  # fmt: skip
OVERLAP = (
    Rule("overlap {layout.overlap} with ep 1", "--ep above 1, or --overlap none", "",
         lambda asked: asked.layout.overlap != "none" and asked.layout.ep == 1),
    *BATCH_OVERLAP,
)  # fmt: skip
"""Rules of a layout's overlap; with ep 1 there is nothing to hide in any runtime."""


def _shared_size(asked: Asked) -> tuple[str, int] | None:
    if not _has_states_on_host(asked):
        return None
    sizes = ((name, getattr(asked.layout, name)) for name in ("tp", "cp", "pp"))
    return next((size for size in sizes if size[1] > 1), None)


def _has_states_on_host(asked: Asked) -> bool:
    return asked.layout.offload_optimizer > 0 and asked.target.offloads_states


def _keeps_activations(asked: Asked) -> bool:
    return asked.layout.offload_activations > 0 and asked.target.offloads_activations


_CONFIG = "transformer/transformer_config.py"
# `transformer_config.py` refuses pipelines, recomputation and CUDA graphs of parts of a block with
# offloaded activations; batch overlap runs block by block, outside of their contexts.
_HOST = (
    Rule("states in host memory with ZeRO stage {layout.zero}", "--zero 3", "",
         lambda asked: _has_states_on_host(asked) and asked.layout.zero != _SHARDS_ALL),
    Rule("a share of {layout.offload_optimizer:g} of the states in host memory",
         "--offload-optimizer 1 or 0", "",
         lambda asked: _has_states_on_host(asked) and asked.layout.offload_optimizer != 1),
    Rule("states in host memory with {cause[0]} {cause[1]}", "--{cause[0]} 1", "", _shared_size),
    Rule("an offloaded optimizer", "--offload-optimizer 0", "",
         lambda asked: asked.layout.offload_optimizer
         and not asked.target.offloads_states and not asked.target.offloads_optimizer),
    Rule("an offloaded optimizer with ZeRO stage {layout.zero}", "--zero 1", "",
         lambda asked: asked.layout.offload_optimizer and asked.target.offloads_optimizer
         and not asked.target.offloads_states and asked.layout.zero != 1),
    Rule("offloaded activations", "--offload-activations 0", "",
         lambda asked: asked.layout.offload_activations and not asked.target.offloads_activations),
    Rule("offloaded activations with pp {layout.pp}", "--pp 1 or --offload-activations 0", _CONFIG,
         lambda asked: _keeps_activations(asked) and asked.layout.pp > 1),
    Rule("offloaded activations with recomputation", "--recompute none", _CONFIG,
         lambda asked: _keeps_activations(asked) and asked.layout.recompute),
    Rule("offloaded activations with overlap {layout.overlap}", "--overlap none", _CONFIG,
         lambda asked: _keeps_activations(asked) and asked.layout.overlap != "none"),
    Rule("offloaded activations with CUDA graphs", "--cuda-graphs none", _CONFIG,
         lambda asked: _keeps_activations(asked) and asked.layout.cuda_graphs != "none"),
)  # fmt: skip
HOST = (*_HOST, *HOST_OPTIMIZER)
"""Rules of a layout's shares in host memory."""
_LAYOUT = (*DISPATCHERS, *_COMBINED, *OVERLAP, *_HOST, *GRAPHS)


def model_rules(decoder: Decoder, target: Target) -> Iterator[BrokenRule]:
    """Yield the rules that a model breaks in a runtime with any layout."""
    job = TrainingJob(decoder=decoder, world_size=1, global_batch=1, length=1)
    yield from refused(_MODELS[target.name], Asked(target=target, layout=FoldedLayout(), job=job))


def target_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob, site: Site | None = None
) -> Iterator[BrokenRule]:
    """Yield the rules of a runtime that a layout breaks for a job."""
    yield from layout_rules(layout, target, site, zero=target.zeros(job.tuning))
    asked = Asked(target=target, layout=layout, job=job, site=site)
    yield from refused(FAMILIES, asked)
    if job.tuning != TRAINS_ALL:  # else no rule breaks, and a search checks thousands of layouts
        yield from refused(TUNING, asked)
    for what, flag, value, able in (
        ("the dtype", "dtype", job.dtype, target.dtypes),
        ("the optimizer", "optimizer", job.optimizer, target.optimizers),
    ):
        if value not in able:
            yield target.refusal(f"{what} {value}", f"--{flag} {' or '.join(able)}")
    if site is not None and site.multiplies(job.dtype) is False:
        what = f"the dtype {job.dtype} on {site.chip or site.vendor}, whose units do not have it"
        yield target.refusal(what, "--dtype bfloat16")
    yield from refused(_RULES[target.name], asked)


def layout_rules(
    layout: FoldedLayout,
    target: Target,
    site: Site | None = None,
    *,
    zero: tuple[ZeroStage, ...] | None = None,
) -> Iterator[BrokenRule]:
    """Yield the rules of a runtime that a layout breaks; `zero` has the stages for a tuning."""
    for name, most in target.largest.items():
        size = getattr(layout, name)
        if size > most:
            yield target.refusal(f"{name} {size}", f"--{name} {most}")
    for what, flag, value, able in (
        ("the dispatcher", "dispatcher", layout.dispatcher, target.dispatchers),
        *(("recomputation of", "recompute", name, target.recompute) for name in layout.recompute),
        ("overlap", "overlap", layout.overlap, target.overlaps),
        ("ZeRO stage", "zero", layout.zero, target.zero if zero is None else zero),
        ("CUDA graphs", "cuda-graphs", layout.cuda_graphs, target.cuda_graphs),
        ("schedule", "schedule", layout.order, target.schedules),
    ):
        if value not in able:
            yield target.refusal(f"{what} {value}", f"--{flag} {' or '.join(map(str, able))}")
    yield from refused(_LAYOUT, Asked(target=target, layout=layout, site=site))
