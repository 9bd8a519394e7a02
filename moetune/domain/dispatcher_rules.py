"""Rules of dispatchers, which are the same in all runtimes that have them."""

from collections.abc import Iterator

from moetune.domain.layout import BrokenRule
from moetune.domain.site import Site
from moetune.domain.targets import Target
from moetune.domain.training import DEFAULT_SMS, FoldedLayout


def dispatcher_rules(
    layout: FoldedLayout, target: Target, site: Site | None
) -> Iterator[BrokenRule]:
    """Yield the rules that a layout's dispatcher breaks.

    Args:
        site: None where the machine is not known: rules about machines are not asked.
    """
    if not layout.has_usual_sms and not target.sets_sms:
        yield target.refusal(
            f"{layout.dispatcher} with {layout.sms} multiprocessors",
            f"--dispatcher-sms {DEFAULT_SMS[layout.dispatcher]}",
        )
    if layout.dispatcher == "all_gather":
        yield from _gather_rules(layout, target)
    if site is not None and layout.dispatcher in DEFAULT_SMS:
        yield from _kernel_rules(layout, target, site)


def _kernel_rules(layout: FoldedLayout, target: Target, site: Site) -> Iterator[BrokenRule]:
    """Yield what of a machine the dispatcher's own kernels are not for."""
    if site.vendor != "nvidia":
        yield target.refusal(f"{layout.dispatcher} without NVIDIA GPUs", "--dispatcher all_to_all")


def _gather_rules(layout: FoldedLayout, target: Target) -> Iterator[BrokenRule]:
    if target.tp_divides_ep and layout.ep not in (1, layout.tp):
        yield target.refusal(
            f"all_gather with ep {layout.ep} and tp {layout.tp}", "--dispatcher all_to_all"
        )
    if layout.overlap == "batch":
        yield target.refusal("overlap batch with all_gather", "--dispatcher all_to_all")
