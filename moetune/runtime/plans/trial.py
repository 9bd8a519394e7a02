"""Compare a plan with one chunk in a job's first steps: tuned never loses to untuned.

After a few calls to warm up, blocks of one chunk and of the plan alternate; then the plan stays,
or gives way where it lost beyond noise. The group's first rank decides, and its decisions travel
with the agreement on tokens, so that no rank has another number of chunks and no call has another
collective. Degrees never change the numbers that a layer computes.
"""

import logging
import statistics
from collections.abc import Sequence
from itertools import product

from moetune.domain.plan import Decision, Plan
from moetune.domain.units import format_seconds
from moetune.runtime.plans.monitor import ObservedCall

WARM_UP_CALLS = 4
"""Few, because one chunk may need more memory: if there is none, the job's first steps say so."""
NUM_BLOCKS = 6
"""Of one chunk and of the plan in turn, so that a machine that gets slower favours neither."""
BLOCK_CALLS = 3
"""Of which the first is not counted: its buffers are new."""
LOSS = 1.02
"""Smaller losses are noise."""
SLOWER_PAIRS = 0.85
"""Share of the pairs of calls in which a plan that loses is slower.

Of two equal decisions with 6 calls each, 3 in 100 pass it (Mann-Whitney's U of at least 31 of 36).
"""
_LOGGER = logging.getLogger("moetune")


def may_lose(plan: Plan) -> bool:
    """Return whether one chunk is worth a trial: it may be run instead, and nobody chose degrees.

    A plan that reuses memory is not tried, because one chunk needs more of it.
    """
    planned, bounds = plan.decide(plan.tokens_per_rank), plan.inputs.pinned.bounds
    is_chosen = bounds.forward_degree is None and bounds.backward_degree is None
    is_cut = max(planned.forward_degree, planned.backward_degree) > 1
    return is_cut and is_chosen and planned.strategy == "none"


def loses(planned: Sequence[float], one_chunk: Sequence[float]) -> bool:
    """Return whether the plan's times are longer than one chunk's, beyond noise."""
    ratio = statistics.median(planned) / statistics.median(one_chunk)
    slower = sum(with_plan > alone for with_plan, alone in product(planned, one_chunk))
    return ratio > LOSS and slower >= SLOWER_PAIRS * len(planned) * len(one_chunk)


class OneChunkTrial:
    """Observer of one layer's first calls with a plan, on the group's first rank.

    Args:
        plan: one that `may_lose`.
        warned: ids of the plans whose loss the log has; shared by the layers of a book.

    Attributes:
        runs_one_chunk: whether the calls that follow are to run one chunk.
        is_over: no more calls are wanted.
    """

    def __init__(self, plan: Plan, warned: set[str]) -> None:
        self.plan, self._warned = plan, warned
        self.runs_one_chunk = self.is_over = False
        self._block, self._num_calls = 0, 0
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def wants(self, plan: Plan, decision: Decision, number: int) -> bool:  # noqa: ARG002 - all calls
        """Want every call until the end of the trial."""
        return plan is self.plan and not self.is_over

    def take(self, call: ObservedCall) -> None:
        """Count a call of the block under way, and begin the next block after its last one."""
        is_one_chunk = call.decision == one_chunk_of(self.plan)
        if self.is_over or call.plan is not self.plan or is_one_chunk != self.runs_one_chunk:
            return
        self._num_calls += 1
        if self._block and self._num_calls > 1:
            self._seconds[is_one_chunk].append(call.seconds)
        if self._num_calls < (BLOCK_CALLS if self._block else WARM_UP_CALLS):
            return
        self._block, self._num_calls = self._block + 1, 0
        if self._block <= NUM_BLOCKS:
            self.runs_one_chunk = not self.runs_one_chunk
        else:
            self._end()

    def _end(self) -> None:
        self.is_over = True
        planned, one_chunk = self._seconds[False], self._seconds[True]
        self.runs_one_chunk = loses(planned, one_chunk)
        if self.runs_one_chunk and self.plan.id not in self._warned:
            self._warned.add(self.plan.id)
            _LOGGER.warning("%s", self._words(*map(statistics.median, (planned, one_chunk))))

    def _words(self, planned_seconds: float, one_chunk_seconds: float) -> str:
        plan, own = self.plan, self.plan.pipeline
        return (
            f"plan {plan.id[:6]} loses to one chunk here: {own.forward_degree} and "
            f"{own.backward_degree} chunks take {format_seconds(planned_seconds)} forward and "
            f"backward, one chunk {format_seconds(one_chunk_seconds)}\n"
            f"  layers with {plan.tokens_per_rank:,} tokens run one chunk from now on; "
            f"`moetune verify {plan.id[:6]}` on this machine shows what was predicted wrong"
        )


def one_chunk_of(plan: Plan) -> Decision:
    """Return the decision that a plan is compared with."""
    return Decision(forward_degree=1, backward_degree=1, order=plan.pipeline.order)
