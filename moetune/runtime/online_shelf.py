"""What an online plan book looks up: settled sizes, the one under search, the plan's answers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from moetune.domain.plan import Decision, Plan
from moetune.domain.plan_inputs import Strategy
from moetune.runtime.planbook import Shelf
from moetune.runtime.stopwatch import CallWatch, Clock, NoWatch, Watch
from moetune.solve.adaptive import AdaptiveRanges
from moetune.solve.space import Space, search_space

_MOST_CALLS = 1024


class OnlineShelf(Shelf):
    """The plans for one layer on one group, and what was settled since, by plan."""

    def __init__(self, desk: "Desk", plans: Sequence[Plan], memory_reuse: Strategy | None) -> None:
        super().__init__(plans)
        self.memory_reuse = memory_reuse
        self.ranges = {plan.id: AdaptiveRanges() for plan in plans}
        self._desk = desk

    def __deepcopy__(self, _: object) -> "OnlineShelf":
        return self

    def watch(self, tokens_per_rank: int, device: torch.device) -> Watch:
        """Return what times a call whose size is searched for, and note one that should be."""
        if self.settled(tokens_per_rank) is not None:
            return NoWatch()
        return self._desk.watch(self, tokens_per_rank, device)

    def settled(self, tokens_per_rank: int) -> Decision | None:
        """Return what is settled for so many tokens."""
        return self.ranges[self.nearest(tokens_per_rank).id].decide(tokens_per_rank)

    def settle(self, plan: Plan, tokens_per_rank: int, decision: Decision) -> None:
        """Settle one size."""
        self.ranges[plan.id] = self.ranges[plan.id].settle(tokens_per_rank, decision)
        self.forget()

    def forget(self) -> None:
        """Look everything up anew."""
        self._known.clear()

    def space(self, plan: Plan, tokens_per_rank: int) -> Space | None:
        """Return what may be tried for so many tokens, None where they are settled."""
        gap = self.ranges[plan.id].gap(tokens_per_rank)
        if gap is None:
            return None
        return search_space(
            plan=plan, tokens_per_rank=tokens_per_rank, gap=gap, memory_reuse=self.memory_reuse
        )

    def _look_up(self, tokens: int) -> Decision:
        """Return what is settled, else what is being tried, else the plan's answer."""
        settled = self.settled(tokens)
        if settled is not None:
            return settled
        search = self._desk.search
        if search is not None and search.is_about(self, tokens):
            return search.decision
        answer = super()._look_up(tokens)
        return replace(answer, strategy=self.memory_reuse or answer.strategy)


@dataclass(slots=True, kw_only=True)
class Search:
    """The search under way.

    Args:
        decision: what is being tried.
        is_warming: whether the next step with it is not told.
        calls: those of this step.
        idle_steps: how long the size has not come.
    """

    shelf: OnlineShelf
    plan: Plan
    tokens_per_rank: int
    decision: Decision
    is_warming: bool = True
    calls: deque[CallWatch] = field(default_factory=lambda: deque(maxlen=_MOST_CALLS))
    idle_steps: int = 0

    def is_about(self, shelf: OnlineShelf, tokens_per_rank: int) -> bool:
        """Return whether a call of so many tokens belongs to it."""
        if shelf is not self.shelf or shelf.nearest(tokens_per_rank) is not self.plan:
            return False
        ranges = shelf.ranges[self.plan.id]
        return ranges.is_near(tokens_per_rank, self.tokens_per_rank)

    def try_next(self, decision: Decision) -> None:
        """Run with another decision from now on."""
        self.decision = decision
        self.is_warming = True
        self.calls = deque(maxlen=_MOST_CALLS)

    def measured(self) -> tuple[float, float] | None:
        """Return the mean time of this step's calls, None where none had its backward pass.

        Times of calls with a few more or fewer tokens are scaled to the size searched for.
        Of a call that is computed again for its backward pass only one has that pass.
        """
        forward, backward = [], []
        for call in self.calls:
            seconds = call.seconds()
            if seconds is not None:
                scale = self.tokens_per_rank / call.tokens_per_rank
                forward.append(seconds[0] * scale)
                backward.append(seconds[1] * scale)
        return (fmean(forward), fmean(backward)) if forward else None


class Desk:
    """What a book's shelves share: the search under way, and the size to search for next.

    Args:
        clock: what calls are timed with.
    """

    def __init__(self, clock: Clock) -> None:
        self.search: Search | None = None
        self.wish: tuple[OnlineShelf, int] | None = None
        self.is_open = True
        self._clock = clock

    def watch(self, shelf: OnlineShelf, tokens_per_rank: int, device: torch.device) -> Watch:
        """Return what times a call of the size under search; wish for a search for another."""
        if not self.is_open or not tokens_per_rank:
            return NoWatch()
        search = self.search
        if search is None or not search.is_about(shelf, tokens_per_rank):
            if self.wish is None:
                self.wish = shelf, tokens_per_rank
            return NoWatch()
        note = search.calls.append
        return CallWatch(self._clock, device, tokens_per_rank=tokens_per_rank, note=note)

    def end_search(self) -> None:
        """Let what was searched for be looked up anew."""
        if self.search is not None:
            self.search.shelf.forget()
        self.search = None

    def close(self) -> None:
        """Search no more."""
        self.end_search()
        self.wish, self.is_open = None, False
