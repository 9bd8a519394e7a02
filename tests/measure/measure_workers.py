"""What the ranks of the tests run; importable, because they are spawned."""

import time

import torch

from moetune.comm.agree import first_text, largest, vote
from moetune.domain.errors import InputError
from moetune.domain.samples import Point, Sample
from moetune.measure.device import Device
from moetune.measure.operations import Experiment, local_operation
from moetune.measure.ranks import MeasuringRanks
from moetune.measure.session import Assignment, News, run_session
from moetune.measure.timing import Effort, FailedPointError, measure

EFFORT = Effort(min_blocks=4, max_blocks=4, max_seconds=0.5, warmup_seconds=0.1)
SLOW_SECONDS = 0.02


def agree() -> None:
    """Time something that is slow on rank 1, fail on rank 1, go on, and stop together."""
    ranks = MeasuringRanks()
    assert ranks.control.broadcast_object(ranks.control.rank, "rank") == 0
    rank = ranks.control.rank
    assert largest(ranks.control, (rank, -rank), "ranks") == (1.0, 0.0)
    assert first_text(ranks.control, "late" if rank else "", "late") == "late"

    pause = SLOW_SECONDS if ranks.control.rank == 1 else SLOW_SECONDS / 20
    slow = Experiment(victim=local_operation(lambda: time.sleep(pause)))
    timing = measure(slow, device=Device(), ranks=ranks, effort=EFFORT)
    assert min(timing.seconds) >= SLOW_SECONDS
    assert ranks.control.broadcast_object(timing, "times") == timing

    def fail_on_rank_1() -> None:
        if ranks.control.rank == 1:
            raise RuntimeError("[enforce fail] can't allocate memory: you tried 1 TB")

    broken = Experiment(victim=local_operation(fail_on_rank_1))
    try:
        measure(broken, device=Device(), ranks=ranks, effort=EFFORT)
    except FailedPointError as error:
        assert error.what == "out of memory"  # noqa: PT017 - on every rank
    else:
        raise InputError("the failure of rank 1 was not heard")
    assert measure(slow, device=Device(), ranks=ranks, effort=EFFORT).seconds
    _stop_by_vote(ranks)


def _stop_by_vote(ranks: MeasuringRanks) -> None:
    """Stop on all ranks after the same operation, although only rank 1 wishes to."""
    rounds, stopped = 0, False
    while not stopped:
        outcome = vote(ranks.votes, ranks.control.rank == 1 and rounds == 5, "end")
        rounds += 1
        stopped = outcome()
    assert rounds == 6


def meet_in_groups() -> None:
    """Sum the ranks of every kind of group of four ranks on two nodes."""
    ranks = MeasuringRanks()
    groups = [(2, 0), (2, 2), (4, 0), (3, 0)]
    ranks.open_groups(groups, ranks_per_node=2)
    sums = {(2, 0): (1, 1, 5, 5), (2, 2): (2, 4, 2, 4), (4, 0): (6,) * 4, (3, 0): (3, 3, 3, None)}
    for group, expected in sums.items():
        subgroup = ranks.group(group)
        if expected[ranks.control.rank] is None:
            assert subgroup is None
            continue
        total = torch.tensor([ranks.control.rank])
        assert subgroup is not None
        subgroup.all_reduce(total, "ranks").wait()
        assert total.item() == expected[ranks.control.rank], group


def measure_all(points: tuple[Point, ...]) -> None:
    """Measure every point, two ranks on each node."""
    ranks, heard = MeasuringRanks(), list[News]()
    assignment = Assignment(needed=points, preset="quick", ranks_per_node=2, budget_seconds=15.0)
    run_session(assignment, device=Device(), ranks=ranks, on_news=heard.append)
    samples = [item for item in heard if isinstance(item, Sample)]
    assert bool(samples) == (ranks.control.rank == 0)
    if samples:
        assert {sample.point for sample in samples if not sample.error} == set(points)
