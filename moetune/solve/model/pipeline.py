"""Time of a pipeline's micro-batches: events of a schedule, played through on all ranks."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from moetune.domain.pipeline import SPLITTING, Schedule, rank_of_stage
from moetune.solve.model.passes import Passes
from moetune.solve.model.schedule import KINDS, Pass, Timetable, timetable

_ROUNDS = 4
"""Rounds of p micro-batches that are played; more repeat the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePipeline:
    """The stages, and the schedule on p ranks, that are played.

    Args:
        stages: seconds of each one's passes for one micro-batch, s of them on each rank, placed as
            the schedule has them.
        send_seconds: of one micro-batch from a stage to the next one on another rank.
        hides_sends: whether a rank computes while it sends; 1F1B of torch and Megatron does not.
    """

    schedule: Schedule
    pp: int
    stages: tuple[Passes, ...]
    num_micro_batches: int
    send_seconds: float = 0.0
    hides_sends: bool = True

    @property
    def vpp(self) -> int:
        """Stages of a rank."""
        return len(self.stages) // self.pp

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return _ranks_of_stages(self.schedule, self.pp, len(self.stages))

    @property
    def lengths(self) -> tuple[float, ...]:
        """Seconds of each kind of pass, as `PASS_WORDS` has them, of each stage."""
        return (
            *(one.forward for one in self.stages), *(one.backward for one in self.stages),
            *(one.grad_input for one in self.stages), *(one.grad_weight for one in self.stages),
        )  # fmt: skip

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds of each rank's passes, all micro-batches."""
        found = [0.0] * self.pp
        for rank, stage in zip(self.ranks, self.stages, strict=True):
            found[rank] += stage.forward + stage.grad_input + stage.grad_weight
        return tuple(self.num_micro_batches * seconds for seconds in found)

    @property
    def busiest_passes(self) -> tuple[float, float]:
        """Seconds of the busiest rank's forward and backward passes for one micro-batch."""
        busy = self.busy
        busiest = busy.index(max(busy))
        own = [one for rank, one in zip(self.ranks, self.stages, strict=True) if rank == busiest]
        return sum(one.forward for one in own), sum(one.backward for one in own)


@cache
def _ranks_of_stages(schedule: Schedule, pp: int, num_stages: int) -> tuple[int, ...]:
    return tuple(rank_of_stage(stage, pp, schedule) for stage in range(num_stages))


def play(pipeline: StagePipeline) -> float:
    """Return the seconds of all micro-batches.

    Many micro-batches are not played one by one: after some rounds, each round takes as long as
    the one before it. Where another rank that is slower by little binds later, that is up to 1 %
    short.
    """
    num, each = pipeline.num_micro_batches, pipeline.pp
    played = _ROUNDS * each + num % each
    if num <= played + each:
        return max(_ends(pipeline, num))
    first, second = (max(_ends(pipeline, count)) for count in (played, played + each))
    rounds = (num - played - each) / each
    return max(second + rounds * (second - first), least_seconds(pipeline))


class PassSpan(NamedTuple):
    """A pass of a stage for one micro-batch, with its start and its end."""

    kind: Pass
    rank: int
    stage: int
    batch: int
    start_seconds: float
    end_seconds: float


def pass_spans(pipeline: StagePipeline, num_micro_batches: int) -> tuple[PassSpan, ...]:
    """Return all passes of so many micro-batches, each as early as its input is there.

    Args:
        num_micro_batches: that the schedule can have: of several stages a rank, whole rounds.
    """
    turns, lengths = _timetable(pipeline, num_micro_batches).turns, pipeline.lengths
    spans = []
    for turn, end in zip(turns, _ends(pipeline, num_micro_batches), strict=True):
        rank, length, batch, *_ = turn
        kind, stage = divmod(length, len(pipeline.stages))
        spans.append(PassSpan(KINDS[kind], rank, stage, batch, end - lengths[length], end))
    return tuple(spans)


def least_seconds(pipeline: StagePipeline) -> float:
    """Return what no run of the pipeline beats.

        T ≥ max_r (m·(w_r + n_r·c) + Σ_{s < r} (f_s + c) + what must follow)

    Rank r begins when a micro-batch has come to stage r, and where backward passes are whole, the
    gradients of its last one have to go back the same way. n_r·c is what it sends itself, nothing
    where sends are hidden. For equal stages without sends 1F1B and interleaved 1F1B take exactly
    this long.
    """
    send, num = pipeline.send_seconds, pipeline.num_micro_batches
    whole = pipeline.schedule not in SPLITTING
    least = before = 0.0
    for rank, (busy, sends) in enumerate(zip(pipeline.busy, _sends(pipeline.ranks), strict=True)):
        own = 0.0 if pipeline.hides_sends else send * (num * sends - (whole and rank > 0))
        least = max(least, busy + own + before)
        stage = pipeline.stages[rank]
        before += (sum(stage) if whole else stage.forward) + (1 + whole) * send
    return least


@cache
def _sends(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return how often each rank sends for one micro-batch, by the ranks of the stages."""
    found = [0] * (max(ranks) + 1)
    for here, there in pairwise(ranks):
        if here != there:
            found[here] += 1
            found[there] += 1
    return tuple(found)


def _timetable(pipeline: StagePipeline, num_micro_batches: int) -> Timetable:
    return timetable(pipeline.schedule, pipeline.pp, pipeline.vpp, num_micro_batches)


def _ends(pipeline: StagePipeline, num_micro_batches: int) -> list[float]:
    """Return the end of each pass of so many micro-batches, in the order of the timetable.

    A rank does its passes in order, each once its input is there. A message leaves when the one
    before it on the way between the same ranks has arrived.
    """
    table = _timetable(pipeline, num_micro_batches)
    lengths, send, hides = pipeline.lengths, pipeline.send_seconds, pipeline.hides_sends
    clocks, free = [0.0] * pipeline.pp, [0.0] * table.num_links
    there, ends = [0.0] * table.num_places, list[float]()
    for rank, length, _, needs, gives, link in table.turns:
        end = clocks[rank]
        if there[needs] > end:  # noqa: PLR1730 - with `max` the loop takes twice as long
            end = there[needs]
        end += lengths[length]
        ends.append(end)
        if link is None:
            there[gives] = clocks[rank] = end
            continue
        leaves = free[link]
        if end > leaves:  # noqa: PLR1730 - as above
            leaves = end
        there[gives] = free[link] = arrival = leaves + send
        clocks[rank] = end if hides else arrival
    return ends
