"""A measuring session on ranks that are started for it, or on those of a launch."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moetune.config import Launch
from moetune.measure.device import open_device
from moetune.measure.ranks import Ranks
from moetune.measure.session import Assignment, News, run_session
from moetune.workflows.launch import rank_device, run_on_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """A session, and how many ranks work on the same cores."""

    assignment: Assignment
    sharers: int


def measure_on_ranks(
    assignment: Assignment,
    *,
    num_ranks: int,
    launch: Launch | None,
    environ: Mapping[str, str],
    hear: Callable[[News], object],
) -> None:
    """Run the session on `num_ranks` ranks of this machine, or as one rank of a launch.

    Raises:
        InputError: fewer CUDA devices than ranks; or what the session finds wrong.
        CollectiveError: a rank died, or the ranks of the launch do not find each other.
    """
    order = _Order(assignment=assignment, sharers=_sharers(num_ranks, launch))
    run_on_ranks(_measure, order, num_ranks=num_ranks, launch=launch, environ=environ, hear=hear)


def _sharers(num_ranks: int, launch: Launch | None) -> int:
    cores = len(os.sched_getaffinity(0))
    if launch is None:
        return -(-num_ranks // cores)
    # Ranks of a launch that nobody pinned run on the same cores.
    return launch.local_world_size if cores == os.cpu_count() else 1


def _measure(order: _Order, tell: Callable[[News], object]) -> None:
    device = open_device(rank_device().index or 0)
    run_session(order.assignment, device=device, ranks=Ranks(), tell=tell, sharers=order.sharers)
