"""The search for the overlap of two batches: in turns or one after the other, in chunks or whole.

`BatchOverlap` asks before each call how to run its batches, and notes what the call took. The
group's `OnlineSearch` asks `OverlapSearch` after each step, on all ranks, what to try next.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

from moetune.domain.records import Settled
from moetune.domain.training import StepOverlap
from moetune.runtime.plans.shared_tuner import PATIENCE_STEPS, Answer, Measured, SharedTuner
from moetune.runtime.plans.timers import Clock, Interval
from moetune.runtime.plans.tuner import Tuner
from moetune.solve.layer.settled_ranges import is_near
from moetune.solve.layer.step_overlaps import PlannedCall, best_overlap, next_overlap, step_overlaps

_MOST_CALLS = 1024
"""That are kept where nobody takes steps."""


class OverlapSearch:
    """The overlap of one model's batches: settled, or on trial.

    It is searched for calls whose layers have about as many tokens as the first one's, and holds
    for all, because the tokens are known only once the batches run.

    Args:
        clock: of the calls.
        known: overlaps that earlier searches settled, oldest first.

    Attributes:
        overlap: what the next call runs with.
        is_settled: no more calls are timed.
    """

    def __init__(self, *, clock: Clock, known: Sequence[Settled] = ()) -> None:
        self.overlap: StepOverlap = "both"
        self.is_settled = False
        self._clock, self._known = clock, known
        self._calls: deque[tuple[Interval, int]] = deque(maxlen=_MOST_CALLS)
        self._first: PlannedCall | None = None
        self._options: tuple[StepOverlap, ...] = ()
        self._tried: dict[StepOverlap, list[float]] = {}  # on the first rank
        self._num_steps = self._idle_steps = 0
        self._is_warming = True
        self._warm_up: Measured = ()
        self._lost_before_seconds = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a search is due: there was a call, and nothing is settled."""
        return not self.is_settled and self._first is not None

    def begin(self, device: torch.device) -> Interval:
        """Begin to time a call."""
        return self._clock("forward", device)

    def end(self, interval: Interval, calls: Sequence[PlannedCall]) -> None:
        """End a call's time.

        Args:
            calls: of the model's layers; without any nothing is searched.
        """
        interval.end()
        if not calls or self.is_settled:
            return
        ran, largest = self.overlap, max(calls, key=lambda one: one.tokens_per_rank)
        if self._first is None:
            self._begin(largest, calls)
        if ran == self.overlap and not self.is_settled:
            self._calls.append((interval, largest.tokens_per_rank))

    def _begin(self, largest: PlannedCall, calls: Sequence[PlannedCall]) -> None:
        """Begin with a call, unless an earlier search has settled it."""
        self._first, self._options = largest, step_overlaps(calls)
        mine = [
            one.overlap for one in self._known
            if one.plan_id == largest.plan.id and self._is_near(one.tokens_per_rank)
        ]  # fmt: skip
        able = [one for one in mine if one in self._options]
        self.overlap = [*self._options[:1], *able][-1]
        self.is_settled = bool(able) or len(self._options) == 1

    def step(self, shared: SharedTuner) -> None:
        """Agree on the last step's times and on the next overlap; all ranks call this.

        Raises:
            CollectiveError: an exchange failed.
        """
        warm_up, measured = self._warm_up, self._take()
        if not measured:
            if self._idle_steps >= PATIENCE_STEPS:
                self.overlap, self.is_settled = self._options[0], True
            return
        if self._is_warming:
            self._is_warming, self._warm_up = False, measured
            return
        everywhere = shared.measured_everywhere(warm_up, measured)
        self._warm_up = ()
        self._apply(shared, shared.ask(lambda tuner: self._tell(shared, tuner, *everywhere)))

    def _apply(self, shared: SharedTuner, answer: Answer[StepOverlap] | None) -> None:
        if answer is None:
            self.overlap, self.is_settled = self._options[0], True
        elif isinstance(answer.said, Settled):
            assert answer.said.overlap is not None  # noqa: S101 - made by `_result`
            self.overlap, self.is_settled = answer.said.overlap, True
            shared.announce(
                self._about.plan, answer.said, num_trials=len(self._tried),
                lost_seconds=shared.lost.lost_seconds - self._lost_before_seconds,
                is_cut=answer.is_cut,
            )  # fmt: skip
        else:
            self._is_warming = answer.said != self.overlap
            self.overlap = answer.said

    def _tell(
        self,
        shared: SharedTuner,
        tuner: Tuner,
        warm_ups: Sequence[Measured],
        steps: Sequence[Measured],
    ) -> tuple[StepOverlap | Settled, bool]:
        """Take the last step on the first rank; return what to try, or what was settled."""
        if not self._tried:
            self._lost_before_seconds = shared.lost.lost_seconds
        before = [one for name, one in self._tried.items() if name != self.overlap]
        best_seconds = min(map(statistics.median, before), default=None)
        self._num_steps += 1 + any(warm_ups)
        shared.charge(warm_ups, best_seconds)
        seconds, _ = shared.charge(steps, best_seconds)
        self._tried.setdefault(self.overlap, []).append(seconds)
        wanted = next_overlap(self._options, self._tried)
        if wanted is not None and not shared.lost.is_spent:
            return wanted, False
        return tuner.store(self._about.plan, self._result()), wanted is not None

    def _take(self) -> Measured:
        """Return the mean seconds of this step's calls, and their number; () without any."""
        about = self._about.tokens_per_rank
        near = [one for one in self._calls if self._is_near(one[1])]
        scaled = [interval.seconds() * about / tokens for interval, tokens in near]
        self._calls.clear()
        self._idle_steps = 0 if scaled else self._idle_steps + 1
        return (fmean(scaled), len(scaled)) if scaled else ()

    @property
    def _about(self) -> PlannedCall:
        assert self._first is not None, "a search without a call"  # noqa: S101 - our own bug
        return self._first

    def _is_near(self, tokens: int) -> bool:
        return is_near(tokens, self._about.tokens_per_rank)

    def _result(self) -> Settled:
        """Return the best of what was tried; at least one step was measured."""
        best, decision = best_overlap(self._tried), self._about.decision
        if best == "batch":
            decision = replace(decision, forward_degree=1, backward_degree=1)
        return Settled(
            plan_id=self._about.plan.id, hardware_id="", memory_reuse=None,
            tokens_per_rank=self._about.tokens_per_rank, decision=decision, overlap=best,
            seconds=tuple(self._tried[best]), num_steps=self._num_steps,
            planned_seconds=statistics.median(self._tried[self._options[0]]),
        )  # fmt: skip
