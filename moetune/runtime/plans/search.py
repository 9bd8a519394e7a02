"""What searches for an online plan book: the protocol, its task, and a line about the outcome."""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol

import torch
import torch.distributed as dist

from moetune.domain.constraints import Strategy
from moetune.domain.document import canonical_json, decode, digest
from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel, LayerShape
from moetune.domain.plan import Decision, Plan, plan_from_json
from moetune.domain.records import Settled
from moetune.runtime.agree import Council
from moetune.runtime.plans.book import LayerPlans, PlanBook
from moetune.runtime.plans.stopwatch import CallWatch, Clock, NoWatch, Watch, device_clock
from moetune.solve.layer.online import Space, search_space
from moetune.solve.layer.settled import AdaptiveRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTask:
    """What to search for.

    Args:
        memory_reuse: the strategy that the layer is told to use, None where it is free.
    """

    plan: Plan
    tokens_per_rank: int
    memory_reuse: Strategy | None
    space: Space


class Tuner(Protocol):
    """Searches, one task at a time. It lives on the group's first rank.

    It answers with what to run next, the same as before to run it again, or with what it
    decided.
    """

    def begin(self, task: TuningTask) -> Decision | Settled:
        """Begin a search, or go on with one of the same task that was left."""
        ...

    def tell(self, forward_seconds: float, backward_seconds: float) -> Decision | Settled:
        """Take the times of one call's pipelined part on the slowest rank."""
        ...


def describe(settled: Settled, *, violations: int) -> str:
    """Return one line for the log.

    Args:
        violations: see `moetune.solve.layer.settled`.
    """
    decision = settled.decision
    faster = settled.planned_seconds / settled.median_seconds - 1
    gain = "as planned" if faster <= 0 else f"{faster:.1%} faster than planned"
    doubt = f"; degrees fall with tokens {violations} times" if violations else ""
    return (
        f"{settled.tokens_per_rank:,} tokens: {decision.forward_degree} and "
        f"{decision.backward_degree} chunks, strategy {decision.strategy}; "
        f"{settled.num_steps} steps searched, {gain}{doubt}"
    )


_MOST_CALLS = 1024


class OnlineLayerPlans(LayerPlans):
    """The plans for one layer on one group, and what was settled since, by plan."""

    def __init__(
        self, queue: "SearchQueue", plans: Sequence[Plan], memory_reuse: Strategy | None
    ) -> None:
        super().__init__(plans)
        self.memory_reuse = memory_reuse
        self.ranges = {plan.id: AdaptiveRanges() for plan in plans}
        self._queue = queue

    def __deepcopy__(self, _: object) -> "OnlineLayerPlans":
        return self

    def watch(self, tokens_per_rank: int, device: torch.device) -> Watch:
        """Return what times a call whose size is searched for, and note one that should be."""
        if self.settled(tokens_per_rank) is not None:
            return NoWatch()
        return self._queue.watch(self, tokens_per_rank, device)

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
        search = self._queue.search
        if search is not None and search.is_about(self, tokens):
            return search.decision
        answer = super()._look_up(tokens)
        return replace(answer, strategy=self.memory_reuse or answer.strategy)


@dataclass(slots=True, kw_only=True)
class SizeSearch:
    """The search under way.

    Args:
        decision: what is being tried.
        is_warming: whether the next step with it is not told.
        calls: those of this step.
        idle_steps: how long the size has not come.
    """

    shelf: OnlineLayerPlans
    plan: Plan
    tokens_per_rank: int
    decision: Decision
    is_warming: bool = True
    calls: deque[CallWatch] = field(default_factory=lambda: deque(maxlen=_MOST_CALLS))
    idle_steps: int = 0

    def is_about(self, shelf: OnlineLayerPlans, tokens_per_rank: int) -> bool:
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


class SearchQueue:
    """What a book's shelves share: the search under way, and the size to search for next.

    Args:
        clock: what calls are timed with.
    """

    def __init__(self, clock: Clock) -> None:
        self.search: SizeSearch | None = None
        self.wish: tuple[OnlineLayerPlans, int] | None = None
        self.is_open = True
        self._clock = clock

    def watch(self, shelf: OnlineLayerPlans, tokens_per_rank: int, device: torch.device) -> Watch:
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
        """SizeSearch no more."""
        self.end_search()
        self.wish, self.is_open = None, False


_LOGGER = logging.getLogger("moetune")
_Key = tuple[LayerShape, ExpertParallel, bool, str, Strategy | None]
PATIENCE_STEPS = 100
"""Where the size under search does not come for so long, another one that came is searched."""


class OnlineBook(PlanBook):
    """Plans, and searches for sizes that no search has settled. Equal on all ranks of a group.

    One size is searched at a time; others are looked up until it is settled. The book serves
    layers whose group is the book's.

    Args:
        settled: what earlier searches decided, oldest first.
        make_tuner: makes what searches, when the first search begins, on the first rank only.
        group: default, the world.
        clock: what calls are timed with.
    """

    def __init__(
        self,
        plans: Iterable[Plan],
        *,
        settled: Sequence[Settled] = (),
        make_tuner: Callable[[], Tuner],
        group: dist.ProcessGroup | None = None,
        clock: Clock = device_clock,
    ) -> None:
        super().__init__(plans)
        self.digest = digest([self.digest, list(settled)])
        self._settled = tuple(settled)
        self._make_tuner = make_tuner
        self._tuner: Tuner | None = None
        self._council = Council(group)
        self._queue = SearchQueue(clock)
        self._open: dict[_Key, OnlineLayerPlans] = {}
        self._num_changes = 0

    def __deepcopy__(self, _: object) -> "OnlineBook":
        return self

    @property
    def version(self) -> str:
        """What ranks must have in common; it changes with every decision."""
        return f"{self.digest[:12]}, changed {self._num_changes} times"

    def shelf(
        self,
        layer: LayerShape,
        *,
        expert_parallel: ExpertParallel = "all_to_all",
        sequence_parallel: bool = False,
        num_ranks: int,
        dtype: str,
        memory_reuse: Strategy | None = None,
    ) -> OnlineLayerPlans | None:
        """Return the shelf that all layers of this kind share, None where there is no plan.

        Raises:
            InputError: the layer runs on another number of ranks than the book's group has.
        """
        plans = self.plans_for(
            layer, expert_parallel=expert_parallel, sequence_parallel=sequence_parallel,
            num_ranks=num_ranks, dtype=dtype,
        )  # fmt: skip
        if not plans:
            return None
        if num_ranks != self._council.num_ranks:
            raise InputError(
                f"the layer runs on {num_ranks} ranks, the online plan book is shared by "
                f"{self._council.num_ranks}",
                "open the book with the layer's group: open_planbook(online=True, group=…)",
            )
        key = layer, expert_parallel, sequence_parallel, dtype, memory_reuse
        if key not in self._open:
            shelf = self._open[key] = OnlineLayerPlans(self._queue, plans, memory_reuse)
            for plan in plans:
                for one in self._settled:
                    if one.plan_id == plan.id and one.memory_reuse == memory_reuse:
                        shelf.settle(plan, one.tokens_per_rank, one.decision)
        return self._open[key]

    def step(self) -> None:
        """Call it once after every optimizer step, on all ranks of the group.

        While a size is searched the ranks agree here on how long the last step took and on
        what to run next. Once every size that comes is settled, nothing is exchanged.
        """
        queue = self._queue
        if queue.search is not None:
            self._advance(queue.search)
        if queue.search is None and queue.wish is not None:
            (shelf, tokens_per_rank), queue.wish = queue.wish, None
            self._begin(shelf, tokens_per_rank)

    def _advance(self, search: SizeSearch) -> None:
        if not search.calls:
            search.idle_steps += 1
            if self._queue.wish is not None and search.idle_steps >= PATIENCE_STEPS:
                self._queue.end_search()
            return
        search.idle_steps = 0
        if search.is_warming:
            search.is_warming = False
            search.calls.clear()
            return
        everywhere = self._council.gather(search.measured() or ())
        search.calls.clear()
        measured = [one for one in everywhere if one]
        if len(measured) < len(everywhere):
            return
        forward, backward = (max(phase) for phase in zip(*measured, strict=True))
        self._apply(search, self._hear(lambda tuner: tuner.tell(forward, backward)))

    def _begin(self, shelf: OnlineLayerPlans, tokens_per_rank: int) -> None:
        plan = shelf.nearest(tokens_per_rank)
        space = shelf.space(plan, tokens_per_rank)
        if space is None:
            return
        if space.is_single:
            shelf.settle(plan, tokens_per_rank, space.seed)
            self._num_changes += 1
            return
        task = TuningTask(
            plan=plan, tokens_per_rank=tokens_per_rank, memory_reuse=shelf.memory_reuse,
            space=space,
        )  # fmt: skip
        search = self._queue.search = SizeSearch(
            shelf=shelf, plan=plan, tokens_per_rank=tokens_per_rank, decision=space.seed
        )
        shelf.forget()
        self._apply(search, self._hear(lambda tuner: tuner.begin(task)))

    def _hear(self, ask: Callable[[Tuner], Decision | Settled]) -> Decision | Settled | None:
        """Return on every rank what the tuner says on the first, None where it fails."""

        def safely() -> Decision | Settled | None:
            try:
                if self._tuner is None:
                    self._tuner = self._make_tuner()
                return ask(self._tuner)
            except Exception as error:  # noqa: BLE001 - training goes on whatever the search meets
                _LOGGER.warning("the search for better plans ends here: %s", error)
                return None

        return self._council.hear(safely)

    def _apply(self, search: SizeSearch, said: Decision | Settled | None) -> None:
        self._num_changes += 1
        if isinstance(said, Decision):
            if said != search.decision:
                search.try_next(said)
                search.shelf.forget()
            return
        if said is None:
            self._queue.close()
        else:
            search.shelf.settle(search.plan, search.tokens_per_rank, said.decision)
            if self._council.is_first:
                violations = search.shelf.ranges[search.plan.id].violations
                _LOGGER.info("%s", describe(said, violations=violations))
            self._queue.end_search()


def share_online(
    load: Callable[[], tuple[Sequence[Plan], Sequence[Settled]]],
    *,
    make_tuner: Callable[[], Tuner],
    group: dist.ProcessGroup | None = None,
) -> OnlineBook:
    """Return the same online book on every rank.

    Args:
        load: returns plans and what was settled, oldest first; called on the first rank only.
        make_tuner: as in `OnlineBook`.

    Raises:
        MoetuneError: what `load` raised, on every rank.
        RankMismatchError: a rank received something else.
    """
    council = Council(group)

    def say() -> tuple[list[str], list[str]]:
        plans, settled = load()
        return [canonical_json(plan) for plan in plans], [canonical_json(one) for one in settled]

    plans, settled = council.hear(say)
    book = OnlineBook(
        (plan_from_json(text, "plan from the first rank") for text in plans),
        settled=[decode(Settled, json.loads(text), "settled") for text in settled],
        make_tuner=make_tuner,
        group=group,
    )
    council.compare(book.digest, "plan books")
    return book
