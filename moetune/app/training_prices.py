"""Prices of a decoder's training on a profile's machine, and what the profile lacks of them."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from moetune.domain.costs import Costs, Doubt
from moetune.domain.profile import Profile
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingDtype, TrainingJob
from moetune.fit.costs import costs_of
from moetune.fit.variants import RESAMPLING_SEED, resample_costs
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.search import PricedLayout
from moetune.solve.model.stages import DecoderStages
from moetune.solve.model.step import StepPrices

_SUSTAINED, _GAP_SECONDS = 0.85, 15e-6
"""Share of their published rate, alone and with cold clocks, that kernels reach in a step, and the
gap between GEMMs. Both are set by the mean of the public runs of each machine, from blocks of 2 k
to 16 k columns. aiconfigurator's GEMMs of GB200 that ran long enough for their power to be read
(TensorRT-LLM 1.3.0rc17) reach 0.84 of those that did not in bfloat16 and 8 bits, and 0.81 in
NVFP4."""
_SHARDS_ALL = 3
_NUM_DRAWS = 20
_ENDS = (0.05, 0.95)
_NUM_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIns:
    """Operations of a layout that a profile does not have.

    Args:
        words: a sentence for each kind.
        ratios: 5 % and 95 % quantiles of the step over its prediction, as far as they stand in.
    """

    words: tuple[str, ...] = ()
    ratios: tuple[float, float] = (1.0, 1.0)


def device_prices(
    profile: Profile, costs: Costs | None = None, element: TrainingDtype = "bfloat16"
) -> DevicePrices:
    """Return the prices of a rank's operations on the machine of a profile.

    Published tables are of one kernel at a time, measured profiles of what a layer sustains.

    Args:
        costs: drawn ones; None for the profile's own.
        element: dtype of whatever is not in 8 bits or fewer.
    """
    network = profile.network
    return DevicePrices(
        costs=costs or costs_of(profile, allow_modelled=True),
        machine=profile.machine,
        element=element,
        sustained=1.0 if profile.samples else _SUSTAINED,
        gap_seconds=0.0 if profile.samples else _GAP_SECONDS,
        posted_chunk_seconds=network.posted_chunk_seconds if network else 0.0,
    )


def step_prices(job: TrainingJob, target: Target, profile: Profile, costs: Costs) -> StepPrices:
    """Return the prices of a job's steps."""
    return StepPrices(
        job=job, device=device_prices(profile, costs, job.element),
        stages=DecoderStages(job.decoder), target=target,
    )  # fmt: skip


def stand_ins_of(
    job: TrainingJob, target: Target, profile: Profile, chosen: PricedLayout, costs: Costs
) -> StandIns:
    """Return what stands in for operations of a layout, and by how much its step may be off.

    The record of public runs knows the error of published machines with a network. Where another
    wire, another group or a reference machine stands in for a described one, or samples have noise,
    the step is priced under drawn costs.

    Args:
        costs: the profile's own.
    """
    prices = step_prices(job, target, profile, costs)
    prices.step(chosen.layout)
    words = (
        *_unpublished_words(chosen.layout, target),
        *_network_words(job, profile), *_stand_in_words(prices.device.trusts.doubts),
    )  # fmt: skip
    if profile.network is not None and profile.provenance == "published":
        return StandIns(words=words)
    drawn = resample_costs(profile, num=_NUM_DRAWS, seed=RESAMPLING_SEED, allow_modelled=True)
    seconds = [
        step_prices(job, target, profile, variant).step(chosen.layout).seconds for variant in drawn
    ]
    low, high = np.quantile(np.array(seconds) / chosen.step.seconds, _ENDS)
    return StandIns(words=words, ratios=(float(low), float(high)))


def _unpublished_words(layout: FoldedLayout, target: Target) -> Iterator[str]:
    """Yield a sentence for each part of a step that no public run tells."""
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
    """Yield a sentence where ranks are on several nodes and the profile is of one."""
    machine = profile.machine
    nodes = math.ceil(job.world_size / machine.devices_per_node)
    if nodes > 1 and profile.network is None and machine.num_devices <= machine.devices_per_node:
        yield (
            f"profile {profile.name!r} describes one node and no network: between the {nodes} "
            "nodes of this plan its own wires stand in"
        )


def _stand_in_words(doubts: Iterable[Doubt]) -> Iterator[str]:
    """Yield a sentence for the collectives, and one for the GEMMs, that other ones stand in for."""
    names = {doubt.operation: doubt.stand_in for doubt in doubts if doubt.stand_in}
    gemms = {name: other for name, other in names.items() if " GEMM of " in name}
    others = {name: other for name, other in names.items() if name not in gemms}
    for stand_in in dict.fromkeys(others.values()):
        operations = [name for name, other in others.items() if other == stand_in]
        yield f"not in the profile: {_list_words(operations)}; {stand_in} stands in"
    if gemms:
        yield (
            f"not in the profile: {len(gemms)} {'shape' if len(gemms) == 1 else 'shapes'} of GEMMs "
            f"of this layout, such as {next(iter(gemms))}; other shapes or passes stand in"
        )


def _list_words(names: list[str]) -> str:
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
