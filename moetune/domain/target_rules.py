"""Rules of a training plan's runtimes: what of a layout each cannot run, by name.

Rows of facts (`targets.py`) are asked here; rules that a row cannot say are in a module for each
runtime. Planning and export ask the same rules, so that nothing is planned that `export` refuses.

Rules of dispatchers are the same in all runtimes that have them. DeepEP 1.2.1 (`csrc/deep_ep.cpp`,
`csrc/kernels/launch.cuh`) has kernels for 2, 4 and 8 ranks that NVLink joins in a node, and for 2,
4, 8, 16, 18 or 20 nodes of 8 such ranks. HybridEP's ranks of a domain share memory by NVLink.
"""

from collections.abc import Callable, Iterator
from types import MappingProxyType

from moetune.domain.architecture import Decoder
from moetune.domain.layout import BrokenRule
from moetune.domain.megatron_models import bridge_models, megatron_models
from moetune.domain.megatron_rules import (
    batch_overlap_rules,
    graph_rules,
    host_optimizer_rules,
    megatron_rules,
    offload_rules,
)
from moetune.domain.pipeline import SPLITTING
from moetune.domain.site import Site
from moetune.domain.targets import Target, TargetName
from moetune.domain.torchtitan_rules import torchtitan_models, torchtitan_rules
from moetune.domain.training import DEDUPLICATING, FoldedLayout, TrainingJob
from moetune.domain.transformers_rules import (
    deepspeed_rules,
    transformers_models,
    transformers_rules,
)

_RULES: MappingProxyType[
    TargetName, Callable[[FoldedLayout, Target, TrainingJob, Site | None], Iterator[BrokenRule]]
] = MappingProxyType(
    {
        "megatron": megatron_rules,
        "bridge": megatron_rules,
        "torchtitan": torchtitan_rules,
        "transformers": transformers_rules,
        "deepspeed": deepspeed_rules,
    }
)

_MODELS: MappingProxyType[TargetName, Callable[[Decoder, Target], Iterator[BrokenRule]]] = (
    MappingProxyType(
        {
            "megatron": megatron_models,
            "bridge": bridge_models,
            "torchtitan": torchtitan_models,
            "transformers": transformers_models,
            "deepspeed": transformers_models,
        }
    )
)


def model_rules(decoder: Decoder, target: Target) -> Iterator[BrokenRule]:
    """Yield what of a model the runtime does not have, whatever the layout."""
    if target.name in _MODELS:
        yield from _MODELS[target.name](decoder, target)


def target_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob, site: Site | None = None
) -> Iterator[BrokenRule]:
    """Yield what of a layout of a job the runtime cannot run.

    Args:
        site: the machine; None where it is not known, and rules that need it are not asked.
    """
    yield from layout_rules(layout, target, site)
    yield from family_rules(layout, target, job.decoder)
    for what, flag, value, known in (
        ("the dtype", "dtype", job.dtype, target.dtypes),
        ("the optimizer", "optimizer", job.optimizer, target.optimizers),
    ):
        if value not in known:
            yield target.refusal(f"{what} {value}", f"--{flag} {' or '.join(known)}")
    if site is not None and site.multiplies(job.dtype) is False:
        what = f"the dtype {job.dtype} on {site.chip or site.vendor}, whose units do not have it"
        yield target.refusal(what, "--dtype bfloat16")
    if target.name in _RULES:
        yield from _RULES[target.name](layout, target, job, site)


def host_rules(layout: FoldedLayout, target: Target, job: TrainingJob) -> Iterator[BrokenRule]:
    """Yield what of a layout's shares in host memory the runtime cannot run."""
    yield from offload_rules(layout, target)
    yield from host_optimizer_rules(layout, target, job)


def layout_rules(
    layout: FoldedLayout, target: Target, site: Site | None = None
) -> Iterator[BrokenRule]:
    """Yield what of a layout the runtime cannot run, whatever the job."""
    for name, most in target.largest.items():
        size = getattr(layout, name)
        if size > most:
            yield target.refusal(f"{name} {size}", f"--{name} {most}")
    for what, flag, value, known in (
        ("the dispatcher", "dispatcher", layout.dispatcher, target.dispatchers),
        *(("recomputation of", "recompute", name, target.recompute) for name in layout.recompute),
        ("overlap", "overlap", layout.overlap, target.overlaps),
        ("ZeRO stage", "zero", layout.zero, target.zero),
        ("CUDA graphs", "cuda-graphs", layout.cuda_graphs, target.cuda_graphs),
        ("schedule", "schedule", layout.order, target.schedules),
    ):
        if value not in known:
            yield target.refusal(f"{what} {value}", f"--{flag} {' or '.join(map(str, known))}")
    yield from dispatcher_rules(layout, target, site)
    yield from _combinations(layout, target)
    yield from overlap_rules(layout, target)
    yield from offload_rules(layout, target)
    yield from graph_rules(layout, target)


def overlap_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what of a layout does not go with its overlap.

    With ep 1 there is nothing to hide, whatever the runtime.
    """
    if layout.overlap != "none" and layout.ep == 1:
        what = f"overlap {layout.overlap} with ep 1"
        yield target.refusal(what, "--ep above 1, or --overlap none")
    if layout.overlap == "batch":
        yield from batch_overlap_rules(layout, target)


def _combinations(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what the runtime cannot run together."""
    if "m" in "".join((layout.stages or ())[:-1]) and not target.predicts_apart:
        yield target.refusal(
            "multi-token prediction on an earlier stage than the head",
            "--stages with m and L in the last one",
        )
    if layout.pp > 1 and layout.zero > max(target.zero_with_pp, target.zero[0]):
        what = f"ZeRO-{layout.zero} with pp {layout.pp}"
        yield target.refusal(what, f"--zero {target.zero_with_pp}, or --pp 1")
    if layout.tp > 1 and layout.zero > target.zero_with_tp:
        what = f"ZeRO-{layout.zero} with tp {layout.tp}"
        yield target.refusal(what, f"--zero {target.zero_with_tp}, or --tp 1")
    if layout.tp > 1 and layout.dispatcher not in target.tp_dispatchers:
        able = [one for one in target.tp_dispatchers if one in target.dispatchers]
        instead = f"--dispatcher {' or '.join(able)}, or --tp 1" if able else "--tp 1"
        yield target.refusal(f"tp {layout.tp} with dispatcher {layout.dispatcher}", instead)
    if layout.order in SPLITTING:
        yield from _splitting_rules(layout, target)
    if target.tp_divides_ep and layout.ep > 1 and layout.ep % layout.tp:
        yield target.refusal(f"ep {layout.ep} with tp {layout.tp}", "an ep that tp divides")


def _splitting_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what does not go with a backward pass whose weights wait."""
    if not target.splits_recomputed and layout.recompute:
        yield target.refusal(
            f"recomputation with {layout.order}, whose weights wait with all that was computed "
            "again",
            "--recompute none",
        )
    if layout.zero > target.zero_with_split:
        yield target.refusal(
            f"ZeRO-{layout.zero} with {layout.order}, whose weights' gradients come when their "
            "blocks are sharded again",
            f"--zero {target.zero_with_split}, or another --schedule",
        )


_IN_NODE, _NODES = (2, 4, 8), (2, 4, 8, 16, 18, 20)
"""`SWITCH_RANKS` and `SWITCH_RDMA_RANKS` of DeepEP's `launch.cuh`."""
_RANKS_OF_NODE = 8
"""`NUM_MAX_NVL_PEERS` of DeepEP."""
_KERNELS = "DeepEP 1.2.1, csrc/kernels/launch.cuh"
_INSTEAD = "--dispatcher all_to_all"
_WITH_MNNVL = "hybrid_ep or all_to_all"


def dispatcher_rules(
    layout: FoldedLayout, target: Target, site: Site | None
) -> Iterator[BrokenRule]:
    """Yield the rules that a layout's dispatcher breaks.

    Args:
        site: None where the machine is not known: rules about machines are not asked.
    """
    if layout.dispatcher == "all_gather":
        yield from _gather_rules(layout, target)
    if layout.cuda_graphs == "full" and layout.ep > 1 and layout.dispatcher != "hybrid_ep":
        yield target.refusal(
            f"full CUDA graphs of experts with {layout.dispatcher}", "--dispatcher hybrid_ep",
            "transformer/transformer_config.py",
        )  # fmt: skip
    if layout.dispatcher not in DEDUPLICATING:
        return
    if kernel_ranks(layout) == 1:
        what = f"{layout.dispatcher} with ep 1, which exchanges nothing"
        yield target.refusal(what, f"--ep above 1, or {_INSTEAD}")
        return
    if layout.dispatcher == "deepep":
        yield from _deepep_rules(layout, target)
    if site is not None:
        yield from _link_rules(layout, target, site)


def family_rules(layout: FoldedLayout, target: Target, decoder: Decoder) -> Iterator[BrokenRule]:
    """Yield the rule of models that a runtime's dispatcher is not for."""
    family = target.gather_family
    if layout.dispatcher == "all_gather" and layout.ep > 1 and family not in ("", decoder.family):
        what = f"all_gather with experts of the family {decoder.family}"
        yield target.refusal(what, _INSTEAD, "moetune.TensorExpertLayer")


def kernel_ranks(layout: FoldedLayout) -> int:
    """Return the ranks of a dispatcher's group: Megatron's `tp_ep_group`, the experts' shards."""
    return layout.ep * layout.etp


def _gather_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    if target.gathers_over_tp and layout.ep not in (1, layout.tp):
        yield target.refusal(f"all_gather with ep {layout.ep} and tp {layout.tp}", _INSTEAD)
    if layout.overlap == "batch":
        yield target.refusal("overlap batch with all_gather", _INSTEAD)


def _deepep_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    """Yield what of its ranks DeepEP has no kernels for, on any machine."""
    ranks = kernel_ranks(layout)
    nodes, rest = divmod(ranks, _RANKS_OF_NODE)
    if ranks not in _IN_NODE and (rest or nodes not in _NODES):
        yield target.refusal(f"deepep with ep·etp {ranks}", _INSTEAD, _KERNELS)


def _link_rules(layout: FoldedLayout, target: Target, site: Site) -> Iterator[BrokenRule]:
    """Yield what of a machine a dispatcher's own kernels are not for."""
    name, ranks = layout.dispatcher, kernel_ranks(layout)
    peers = site.nvlink_peers or 0
    if site.vendor != "nvidia":
        yield target.refusal(f"{name} without NVIDIA GPUs", _INSTEAD, "DeepEP, README.md")
    elif name == "deepep" and site.chip in target.without_deepep:
        yield target.refusal(f"{name} on {site.chip}", f"--dispatcher {_WITH_MNNVL}",
                             "flex_dispatcher_backend.py")  # fmt: skip
    elif peers < 2:  # noqa: PLR2004 - a device and another
        yield target.refusal(f"{name} without NVLink between GPUs", _INSTEAD, "DeepEP, README.md")
    elif name == "deepep":
        yield from _node_rules(ranks, target, site)


def _node_rules(ranks: int, target: Target, site: Site) -> Iterator[BrokenRule]:
    """Yield what of DeepEP's ranks do not fit into nodes."""
    width = min(site.devices_per_node, site.nvlink_peers or 0)
    if ranks > _RANKS_OF_NODE and width != _RANKS_OF_NODE:
        what = f"deepep with ep·etp {ranks} over nodes of {width} GPUs that NVLink joins"
        yield target.refusal(what, _INSTEAD, _KERNELS)
    elif ranks <= _RANKS_OF_NODE and width % ranks:
        what = f"deepep with ep·etp {ranks} across nodes of {width} GPUs that NVLink joins"
        yield target.refusal(what, _INSTEAD, _KERNELS)
