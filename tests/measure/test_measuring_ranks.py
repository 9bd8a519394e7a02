"""Two real ranks: the slowest counts, all agree, and a session survives what fails in it."""

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from moetune.app import launch
from moetune.app.launch import cores_of
from moetune.app.profile import measure_on_ranks
from moetune.app.profile_request import ProfileRequest
from moetune.domain.errors import CollectiveError
from moetune.domain.samples import (
    AttentionPoint,
    CollectiveOp,
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    InterferencePoint,
    Point,
    RowsPoint,
    Sample,
)
from moetune.measure.session import Assignment, Estimates, News
from tests.measure import measure_workers
from tests.ranks import run_ranks

GEMM = GemmPoint(dtype="float32", num_experts=2, rows=16, d_in=32, d_out=32)
FAILING = RowsPoint(op="teleport", dtype="float32", rows=4, width=4)
POINTS: tuple[Point, ...] = (
    GEMM,
    GemmPoint(dtype="float32", product="grad_weight", rows=16, d_in=32, d_out=64),
    GemmPoint(dtype="bfloat16", product="grad_input", num_experts=2, rows=8, d_in=32, d_out=64),
    RowsPoint(op="swiglu_backward", dtype="float32", rows=16, width=32),
    RowsPoint(op="gate", dtype="float32", rows=16, width=4),
    RowsPoint(op="adam", dtype="bfloat16", rows=1000, width=1),
    RowsPoint(op="host_adam", dtype="bfloat16", rows=1000, width=1),
    AttentionPoint(dtype="float32", num_sequences=2, length=16, num_heads=2, head_dim=8),
    AttentionPoint(
        dtype="bfloat16", num_sequences=2, length=16, num_heads=2, head_dim=8, backward=True
    ),
    CollectivePoint(op="all_to_all", group_size=2, num_bytes=1024),
    CollectivePoint(op="all_to_all", group_size=2, num_bytes=1024, in_flight=4),
    CollectivePoint(op="all_reduce", group_size=2, num_bytes=1024),
    CollectivePoint(op="all_gather", group_size=2, num_bytes=1024),
    CollectivePoint(op="reduce_scatter", group_size=2, num_bytes=1024),
    CollectivePoint(op="send", group_size=2, num_bytes=1024),
    CopyPoint(direction="h2d", pinned=True, num_bytes=4096),
    InterferencePoint(victim="comp", others=()),
    InterferencePoint(victim="mem", others=("comm",)),
    FAILING,
    CollectivePoint(op="all_reduce", group_size=2, num_bytes=1023),
)


class Ear:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.seconds: dict[Point, float] = {}
        self.samples: list[Sample] = []

    def hear(self, news: News) -> None:
        if isinstance(news, Estimates):
            self.seconds = dict(news.seconds)
        else:
            self.measured(news)

    def measured(self, sample: Sample) -> None:
        self.samples.append(sample)


def measure_here(assignment: Assignment, ear: Ear, *, num_ranks: int) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    request = ProfileRequest(num_ranks=num_ranks, environment=environ, oversubscribe=True)
    measure_on_ranks(assignment, request, ear.hear)


def started_ranks() -> list[int]:
    """Return the ranks that this thread started and that still run."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, command in commands.items() if launch.__name__.encode() in command]


@pytest.mark.dist
def test_the_slowest_rank_counts_and_a_failure_or_wish_of_a_rank_is_heard_by_all() -> None:
    assert run_ranks(measure_workers.agree, 2) == ["", ""]


@pytest.mark.dist
def test_a_session_samples_every_kind_and_goes_on_after_points_that_fail() -> None:
    ear = Ear()
    measure_here(Assignment(needed=POINTS, preset="quick", budget_seconds=90.0), ear, num_ranks=2)
    assert set(ear.seconds) <= set(POINTS)
    assert {sample.point for sample in ear.samples} == set(POINTS)
    visits = Counter(sample.point for sample in ear.samples if not sample.error)
    assert max(visits.values()) in range(2, 6)
    failed = {sample.point: sample.error for sample in ear.samples if sample.error}
    # A crowded machine may keep the background_loads from a proof; that is an answer, too.
    failed.pop(InterferencePoint(victim="mem", others=("comm",)), None)
    assert failed.keys() == {FAILING, POINTS[-1]}
    assert "'teleport' is unknown" in failed[FAILING]
    for sample in ear.samples:
        assert sample.error or len(sample.seconds) >= 3
    assert not started_ranks()


@pytest.mark.dist
def test_groups_of_ranks_are_where_they_should_be() -> None:
    assert run_ranks(measure_workers.meet_in_groups, 4) == [""] * 4


@pytest.mark.dist
def test_collectives_are_measured_inside_nodes_and_across_them() -> None:
    wanted: tuple[tuple[CollectiveOp, int, int], ...] = (
        ("all_to_all", 2, 0), ("all_to_all", 2, 2), ("all_to_all", 4, 0), ("all_reduce", 2, 2),
        ("send", 2, 2),
    )  # fmt: skip
    points: tuple[Point, ...] = tuple(
        CollectivePoint(op=op, group_size=size, num_bytes=4096, num_nodes=nodes)
        for op, size, nodes in wanted
    )
    assert run_ranks(measure_workers.measure_all, 4, points) == [""] * 4


class Killer(Ear):
    """Kills a rank when the first sample is done."""

    def measured(self, sample: Sample) -> None:
        if not self.samples:
            os.kill(started_ranks()[-1], signal.SIGKILL)
        super().measured(sample)


@pytest.mark.dist
def test_a_rank_that_dies_ends_the_others_with_an_error() -> None:
    killer = Killer()
    assignment = Assignment(needed=POINTS * 20, preset="full")
    with pytest.raises(CollectiveError, match=r"rank 1 of 2 .*SIGKILL"):
        measure_here(assignment, killer, num_ranks=2)
    assert killer.samples
    assert not started_ranks()


def test_one_rank_measures_here_and_talks_through_memory() -> None:
    ear = Ear()
    loop = CollectivePoint(op="all_to_all", group_size=1, num_bytes=4096, in_flight=2)
    alone: tuple[Point, ...] = (GEMM, loop, CopyPoint(direction="d2h", pinned=True, num_bytes=64))
    measure_here(Assignment(needed=alone, preset="quick", budget_seconds=60.0), ear, num_ranks=1)
    assert {sample.point for sample in ear.samples if not sample.error} == set(alone)


class SlowEar(Ear):
    """Takes its time, as a busy machine does."""

    def measured(self, sample: Sample) -> None:
        time.sleep(1.0)
        super().measured(sample)


def test_a_budget_ends_the_session_also_where_the_estimates_were_too_low() -> None:
    ear = SlowEar()
    points = tuple(
        GemmPoint(dtype="float32", rows=rows, d_in=16, d_out=16) for rows in range(8, 72, 4)
    )
    measure_here(Assignment(needed=points, preset="quick", budget_seconds=3.0), ear, num_ranks=1)
    assert len(ear.seconds) > 5
    assert len(ear.samples) <= 5


@pytest.mark.parametrize(("num_ranks", "num_cores"), [(1, 4), (2, 4), (3, 8), (4, 4)])
def test_ranks_have_disjoint_cores_that_use_all(num_ranks: int, num_cores: int) -> None:
    shares = [cores_of(rank, num_ranks, range(num_cores)) for rank in range(num_ranks)]
    assert sorted(core for share in shares for core in share) == list(range(num_cores))
