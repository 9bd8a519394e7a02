"""Rules of dispatchers, which are the same in all runtimes that have them.

DeepEP 1.2.1 (`csrc/deep_ep.cpp`, `csrc/kernels/launch.cuh`) has kernels for 2, 4 and 8 ranks that
NVLink joins in a node, and for 2, 4, 8, 16, 18 or 20 nodes of 8 such ranks. HybridEP's ranks of a
domain share memory by NVLink.
"""

from collections.abc import Iterator

from moetune.domain.architecture import Decoder
from moetune.domain.layout import BrokenRule
from moetune.domain.site import Site
from moetune.domain.targets import Target
from moetune.domain.training import DEDUPLICATING, FoldedLayout

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
