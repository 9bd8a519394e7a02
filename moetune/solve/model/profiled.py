"""Prices of a job, and the search over its layouts, on the machine of a profile."""

from math import inf

from moetune.domain.cluster import Machine
from moetune.domain.costs import Costs
from moetune.domain.profile import Profile
from moetune.domain.site import site_of
from moetune.domain.step_errors import GAP_SECONDS, SUSTAINED
from moetune.domain.targets import Target
from moetune.domain.training import TrainingDtype, TrainingJob
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.rank_memory import fillable_bytes
from moetune.solve.model.search import FoldedSearch
from moetune.solve.model.step import StepPrices


def device_prices(
    profile: Profile, costs: Costs, element: TrainingDtype = "bfloat16"
) -> DevicePrices:
    """Return the prices of a rank's operations on a profile's machine, by the given costs.

    Published tables time one kernel at a time, measured profiles the sustained rates of a layer.
    """
    network = profile.network
    return DevicePrices(
        costs=costs,
        machine=profile.machine,
        element=element,
        sustained=1.0 if profile.samples else SUSTAINED,
        gap_seconds=0.0 if profile.samples else GAP_SECONDS,
        posted_chunk_seconds=network.posted_chunk_seconds if network else 0.0,
    )


def step_prices(job: TrainingJob, target: Target, profile: Profile, costs: Costs) -> StepPrices:
    """Return the prices of a job's steps."""
    return StepPrices(
        job=job, device=device_prices(profile, costs, job.element),
        stages=DecoderStages(job.decoder), target=target,
    )  # fmt: skip


def usable_bytes(machine: Machine) -> int:
    """Return the bytes of a device that a plan's layout may take, including CUDA libraries."""
    is_cuda = machine.kind == "cuda"
    return fillable_bytes(machine.memory_bytes) if is_cuda else machine.memory_bytes


def search_of(
    prices: StepPrices, profile: Profile, *, limit_bytes: float, error_share: float = 0.0,
    asks_runtime: bool = True,
) -> FoldedSearch:  # fmt: skip
    """Return the search for layouts that fit and that, with `asks_runtime`, the runtime accepts."""
    site = site_of(profile)
    return FoldedSearch(
        wholes=prices, limit_bytes=limit_bytes, error_share=error_share, site=site,
        asks_runtime=asks_runtime,
        host_bytes=site.host_bytes_per_rank(prices.job.world_size) or inf,
    )  # fmt: skip
