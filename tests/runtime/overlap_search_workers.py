"""What ranks do in the tests of the search for the overlap of two batches."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import moetune
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, Phase
from moetune.domain.plan import Plan
from moetune.domain.records import Settled
from moetune.domain.training import StepOverlap
from moetune.runtime.plans.book import PlanBook
from moetune.runtime.plans.overlap_search import OverlapSearch
from moetune.runtime.plans.search import OnlineSearch
from moetune.runtime.plans.timers import Interval
from moetune.store import open_store
from tests.runtime.companion_nets import HIDDEN, TOKENS, WIDTH, Net, batch
from tests.runtime.online_workers import CountedTuner, MadeUp, counted_collectives, study_tuner
from tests.runtime.overlap_workers import check_gradients, loss_of, wanted
from tests.runtime.plans import small_plan

SHAPE = LayerShape(d_model=WIDTH, d_hidden=HIDDEN, num_experts=6, top_k=2)
MOST_STEPS = 40
Seconds = dict[StepOverlap, float]


def plan_of(num_ranks: int) -> Plan:
    """Return a plan of two chunks forward and three backward."""
    return small_plan(
        layer=SHAPE, world_size=num_ranks, tokens=TOKENS, dtype="float64", degrees=(2, 3),
        ranges=((1, 100, 2, 3),),
    )  # fmt: skip


class Job:
    """A net whose two batches take times that are known beforehand.

    Args:
        seconds: of both batches by their overlap.
        plan: of the net's layer; None for a book that has none.
    """

    def __init__(
        self,
        folder: Path,
        seconds: Seconds,
        *,
        plan: Plan | None,
        known: Sequence[Settled] = (),
        budget_seconds: float = 36.0,
        tuner: Callable[[], CountedTuner] | None = None,
        report: Callable[[Plan, Settled], None] | None = None,
    ) -> None:
        self.tuner = study_tuner(folder)
        search = OnlineSearch(
            make_tuner=tuner or (lambda: self.tuner), clock=self._clock, known=known,
            budget_seconds=budget_seconds, report=report,
        )  # fmt: skip
        self.search, self._seconds = search, seconds
        self.book = PlanBook(() if plan is None else [plan], search=search, is_complete=False)
        self.net = Net(pipeline=True, planbook=self.book, num_experts=6)
        if dist.is_initialized():
            self.net = moetune.replicate(self.net)
        self.two = moetune.BatchOverlap[torch.Tensor](self.net, partial(loss_of, self.net))
        self.num_timed = 0
        self.ran: list[StepOverlap] = []

    @property
    def overlap(self) -> OverlapSearch:
        return self.search.overlaps[0]

    def _clock(self, phase: Phase, _: torch.device) -> Interval:  # noqa: ARG002 - a `Clock`
        self.num_timed += 1
        return MadeUp(self._seconds[self.overlap.overlap])

    def step(self, batches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one step, but for the optimizer."""
        self.net.zero_grad()
        self.ran.append(self.overlap.overlap)
        losses = self.two(batches)
        self.book.step()
        return losses

    def until_settled(self, batches: Sequence[torch.Tensor]) -> None:
        for _ in range(MOST_STEPS):
            self.step(batches)
            if self.overlap.is_settled:
                return
        raise AssertionError("the search does not end")


def every_overlap_computes_the_same(folder: Path) -> None:
    """On real ranks: gradients and losses of each overlap are one process', and all ranks agree."""
    world, rank = dist.get_world_size(), dist.get_rank()
    # The slowest rank counts: for the first one alone turns would be the fastest.
    both = 1.6 if rank else 1.0
    job = Job(folder, {"both": both, "batch": 2.0, "chunks": 1.5}, plan=plan_of(world))
    degrees = set()
    for step in range(MOST_STEPS):
        first = 2 * world * step
        expected, losses = wanted(
            lambda **given: Net(num_experts=6, pipeline=1, **given),
            [*range(first, first + 2 * world)],
        )
        found = job.step([batch(first + rank), batch(first + world + rank)])
        check_gradients(job.net, expected)
        for one, index in zip(found, (rank, world + rank), strict=True):
            assert torch.allclose(one, losses[index], rtol=1e-11)
        now = job.net.moe.decision
        degrees.add((job.ran[-1], now.forward_degree, now.backward_degree))
        everywhere: list[object] = [None] * world
        dist.all_gather_object(everywhere, job.ran[-1])
        assert len(set(everywhere)) == 1, everywhere
        if job.overlap.is_settled and step > len(set(job.ran)) + 2:
            break
    assert degrees == {("both", 2, 3), ("batch", 1, 1), ("chunks", 2, 3)}
    assert job.overlap.overlap == "chunks"
    warmed_up_and_measured_twice = 3 * (2.0 - 1.6)
    assert job.search.lost.lost_seconds == pytest.approx(warmed_up_and_measured_twice)
    _settled_once(job, folder)


def _settled_once(job: Job, folder: Path) -> None:
    """The first rank stored it; another step exchanges nothing for it; the next job knows."""
    known: list[tuple[Settled, ...]] = [()]
    if dist.get_rank() == 0:
        with open_store(f"{folder}/moetune.db") as store:
            known = [store.settled(plan_of(dist.get_world_size()).id)]
        (one,) = [each for each in known[0] if each.overlap is not None]
        assert (one.overlap, one.tokens_per_rank, one.num_steps) == ("chunks", TOKENS, 13)
        assert one.seconds == (1.5,) * 4
        assert one.planned_seconds == pytest.approx(1.6)
    dist.broadcast_object_list(known)
    before = job.num_timed
    equal: Seconds = {"both": 1.0, "batch": 1.0, "chunks": 1.0}
    later = Job(folder / "next", equal, plan=plan_of(dist.get_world_size()), known=known[0])
    for _ in range(2):
        later.step([batch(0), batch(1)])
    assert later.ran == ["both", "chunks"]
    assert later.num_timed == 1, "the first call, before its plan was known"
    with counted_collectives() as names:
        job.search.step()
    assert names == []
    assert job.num_timed == before


def tuner_that_fails(folder: Path) -> None:
    """All ranks go on with the plan's overlap."""

    def fail() -> CountedTuner:
        raise OSError("no space left on device")

    seconds: Seconds = {"both": 2.0, "batch": 1.0, "chunks": 1.0}
    job = Job(folder, seconds, plan=plan_of(dist.get_world_size()), tuner=fail)
    other = job.search.overlap()
    job.until_settled([batch(0), batch(1)])
    assert job.search.overlaps[0].overlap == "both"
    assert job.search.has_ended
    job.book.step()
    assert other.is_settled, "nothing is timed any more"
    with counted_collectives() as names:
        job.book.step()
    assert names == []


def recording(folder: Path) -> None:
    """A plan of the gradients asks for steps of one batch, in turns or one after the other."""
    job = Job(folder, {"both": 1.0, "batch": 1.0, "chunks": 1.0}, plan=plan_of(2))
    for overlap in ("both", "chunks"):
        job.overlap.overlap, job.overlap.is_settled = overlap, True
        with pytest.raises(InputError, match="of one batch"):
            moetune.plan_gradients(job.net, lambda: job.two([batch(0), batch(1)]))


def several_ranks(folder: Path) -> None:
    """All of the above in one start of the ranks."""
    every_overlap_computes_the_same(folder)
    tuner_that_fails(folder / "failing")
