"""A plan book that searches while a job trains, between its steps (Algorithm 1 of MPipeMoE).

Look-ups never measure and never search. What the ranks know is equal at every moment: sizes
are agreed before they are looked up, and every change is made in `OnlineBook.step`, by what
the group's first rank says to all.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from moetune.domain.document import canonical_json, decode, digest
from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel, LayerShape
from moetune.domain.plan import Decision, Plan, plan_from_json
from moetune.domain.plan_inputs import Strategy
from moetune.domain.records import Settled
from moetune.runtime.council import Council
from moetune.runtime.online_shelf import Desk, OnlineShelf, Search
from moetune.runtime.planbook import PlanBook
from moetune.runtime.stopwatch import Clock, device_clock
from moetune.runtime.tuner import Task, Tuner, describe

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
        self._desk = Desk(clock)
        self._open: dict[_Key, OnlineShelf] = {}
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
    ) -> OnlineShelf | None:
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
            shelf = self._open[key] = OnlineShelf(self._desk, plans, memory_reuse)
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
        desk = self._desk
        if desk.search is not None:
            self._advance(desk.search)
        if desk.search is None and desk.wish is not None:
            (shelf, tokens_per_rank), desk.wish = desk.wish, None
            self._begin(shelf, tokens_per_rank)

    def _advance(self, search: Search) -> None:
        if not search.calls:
            search.idle_steps += 1
            if self._desk.wish is not None and search.idle_steps >= PATIENCE_STEPS:
                self._desk.end_search()
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

    def _begin(self, shelf: OnlineShelf, tokens_per_rank: int) -> None:
        plan = shelf.nearest(tokens_per_rank)
        space = shelf.space(plan, tokens_per_rank)
        if space is None:
            return
        if space.is_single:
            shelf.settle(plan, tokens_per_rank, space.seed)
            self._num_changes += 1
            return
        task = Task(
            plan=plan, tokens_per_rank=tokens_per_rank, memory_reuse=shelf.memory_reuse,
            space=space,
        )  # fmt: skip
        search = self._desk.search = Search(
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

    def _apply(self, search: Search, said: Decision | Settled | None) -> None:
        self._num_changes += 1
        if isinstance(said, Decision):
            if said != search.decision:
                search.try_next(said)
                search.shelf.forget()
            return
        if said is None:
            self._desk.close()
        else:
            search.shelf.settle(search.plan, search.tokens_per_rank, said.decision)
            if self._council.is_first:
                violations = search.shelf.ranges[search.plan.id].violations
                _LOGGER.info("%s", describe(said, violations=violations))
            self._desk.end_search()


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
