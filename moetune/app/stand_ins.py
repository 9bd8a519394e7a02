"""Operations of a layout that a profile lacks, and the error of the step from their stand-ins."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from moetune.domain.costs import Costs, Doubt
from moetune.domain.profile import Profile
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.fit.variants import RESAMPLING_SEED, resample_costs
from moetune.solve.model.search import PricedLayout
from moetune.solve.model.step import StepPrices
from moetune.solve.model.uncertainty import drawn_ratios

_SHARDS_ALL = 3
_NUM_DRAWS = 20
_NUM_NAMED = 3


class StandIns(NamedTuple):
    """Sentences on the operations that a profile lacks, and the step's error from stand-ins.

    `ratios` are the 5 % and 95 % quantiles of the step over its prediction, from stand-ins alone.
    """

    words: tuple[str, ...]
    ratios: tuple[float, float] = (1.0, 1.0)


def stand_ins_of(
    price: Callable[[Costs], StepPrices], profile: Profile, chosen: PricedLayout, costs: Costs
) -> StandIns:
    """Return what stands in for operations of a layout, and the error of its step from that.

    For published machines with a network, the record of public runs already has the error. Else
    the step is priced under drawn costs, as another link, another group or a reference machine may
    stand in, and samples have noise.
    """
    prices = price(costs)
    prices.step(chosen.layout)
    words = (
        *_unpublished_words(chosen.layout, prices.target),
        *_network_words(prices.job, profile), *_stand_in_words(prices.device.trusts.doubts),
    )  # fmt: skip
    if profile.network is not None and profile.provenance == "published":
        return StandIns(words)
    drawn = resample_costs(profile, num=_NUM_DRAWS, seed=RESAMPLING_SEED, allow_modelled=True)
    return StandIns(words, drawn_ratios(map(price, drawn), chosen))


def _unpublished_words(layout: FoldedLayout, target: Target) -> Iterator[str]:
    """Yield a sentence for each part of a step that no public run shows."""
    if target.name in {"transformers", "deepspeed"}:
        yield (
            f"nobody published steps of {target.name} with their batch: its kernels are counted in "
            "its source, and the range is wide"
        )
    if layout.zero == _SHARDS_ALL and target.name != "torchtitan":
        yield (
            "how much of the gathers of ZeRO-3 is hidden is modelled, one block ahead: few runs "
            "with experts are public"
        )


def _network_words(job: TrainingJob, profile: Profile) -> Iterator[str]:
    """Yield a sentence if ranks are on several nodes and the profile has a single node."""
    machine = profile.machine
    nodes = math.ceil(job.world_size / machine.devices_per_node)
    if nodes > 1 and profile.network is None and machine.num_devices <= machine.devices_per_node:
        yield (
            f"profile {profile.name!r} describes one node and no network: between the {nodes} "
            "nodes of this plan its own wires stand in"
        )


def _stand_in_words(doubts: Iterable[Doubt]) -> Iterator[str]:
    """Yield sentences on collectives and GEMMs for which other operations stand in."""
    names = {doubt.operation: doubt.stand_in for doubt in doubts if doubt.stand_in}
    gemms, collectives = [name for name in names if " GEMM of " in name], dict[str, list[str]]()
    for name, stand_in in names.items():
        if name not in gemms:
            collectives.setdefault(stand_in, []).append(name)
    for stand_in, operations in collectives.items():
        rest = len(operations) - _NUM_NAMED
        words = ", ".join(operations[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
        yield f"not in the profile: {words}; {stand_in} stands in"
    if gemms:
        yield (
            f"not in the profile: {len(gemms)} {'shape' if len(gemms) == 1 else 'shapes'} of GEMMs "
            f"of this layout, such as {gemms[0]}; other shapes or passes stand in"
        )
