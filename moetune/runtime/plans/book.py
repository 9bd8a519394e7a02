"""Plan books: look up a layer's plan after the ranks agree on their tokens, before the gate.

A look-up is a dictionary access without an exchange. The group's first rank loads a book and
broadcasts it, so that no two ranks can decide differently.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch.distributed as dist

from moetune.comm.agree import decide_on_first
from moetune.comm.gloo import communicator_of
from moetune.domain.any_plan import AnyPlan, plan_from_json
from moetune.domain.constraints import Strategy
from moetune.domain.document import digest
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerKey
from moetune.domain.plan import Decision, Plan
from moetune.domain.records import Settled
from moetune.domain.units import format_chunks
from moetune.runtime.plans.layer_plans import LayerPlans, WatchedPlans
from moetune.runtime.plans.online import OnlineSearch
from moetune.runtime.plans.timers import Clock, device_clock
from moetune.runtime.plans.tuner import Tuner

_LOGGER = logging.getLogger("moetune")
_MAX_SHOWN = 3


class PlanBook:
    """Plans by layer, which are equal on all ranks of a group: see `moetune.open_planbook`.

    A layer without a plan runs the safe decision: one chunk, no memory reuse. Copying a book
    returns the book itself; pickling it saves its plans alone.

    Args:
        plans: plans for any layers.
        search: finds better decisions while the job trains.
        is_complete: False if a requested plan is missing and was logged: layers without a plan then
            do not warn again.
        clock: clock of the drift alarm's timers.

    Attributes:
        digest: digest of the plans' content, and of earlier searches' results.
        plans, is_complete: as in the arguments.
    """

    def __init__(
        self,
        plans: Iterable[Plan] = (),
        *,
        search: OnlineSearch | None = None,
        is_complete: bool = True,
        clock: Clock = device_clock,
    ) -> None:
        self.plans = tuple(plans)
        self._by_layer: dict[LayerKey, list[Plan]] = {}
        for plan in self.plans:
            self._by_layer.setdefault(plan.workload.key, []).append(plan)
        self._search, self.is_complete = search, is_complete
        self._clock = clock
        self._watched: set[LayerKey] = set()
        self.digest = digest(list(self.plans))
        if search is not None:
            self.digest = digest([self.digest, list(search.settled)])

    def __deepcopy__(self, _: object) -> "PlanBook":
        return self

    def __reduce__(self) -> tuple[type["PlanBook"], tuple[tuple[Plan, ...]]]:
        return PlanBook, (self.plans,)

    @property
    def version(self) -> str:
        """A text that is equal on ranks with equal decisions."""
        version = self.digest[:12]
        if self._search is None:
            return version
        return f"{version}, changed {self._search.num_changes} times"

    @property
    def described(self) -> str:
        """A short description of the book; equal descriptions mean equal books."""
        listed = ", ".join(
            f"plan {plan.id[:6]} with "
            f"{format_chunks(plan.pipeline.forward_degree, plan.pipeline.backward_degree)}"
            for plan in self.plans[:_MAX_SHOWN]
        )
        num_more = len(self.plans) - _MAX_SHOWN
        more = f" and {num_more} more" if num_more > 0 else ""
        return f"{listed or 'no plan'}{more} (digest {self.digest[:12]})"

    def plans_for(self, key: LayerKey) -> Sequence[Plan]:
        """Return the plans for a layer, in the order in which the book got them."""
        return self._by_layer.get(key, ())

    def layer_plans(
        self, key: LayerKey, *, memory_reuse: Strategy | None = None, watches: bool = False
    ) -> LayerPlans:
        """Return the plans for a layer, which may be empty.

        Args:
            memory_reuse: the strategy that the layer's arguments set; None if they set no strategy.
            watches: whether the drift alarm times its calls; it times the first of equal layers.

        Raises:
            InputError: the book searches, and its group has another number of ranks.
        """
        plans = self.plans_for(key)
        if plans and self._search is not None:
            return self._search.layer(key, plans, memory_reuse)
        if not watches or not plans or key in self._watched:
            return LayerPlans(plans)
        self._watched.add(key)
        return WatchedPlans(plans, memory_reuse=memory_reuse, clock=self._clock)

    def decide(self, key: LayerKey, *, tokens_per_rank: int) -> Decision:
        """Return a layer's decision, which is the safe decision if the book has no plan."""
        return self.layer_plans(key).decide(tokens_per_rank)

    def step(self) -> None:
        """Agree on the next decision to try, in an online book; other books do nothing.

        Call it after every optimizer step, on all ranks of the group.
        """
        if self._search is not None:
            self._search.step()


GivenPlan: TypeAlias = Plan | PlanBook | str | os.PathLike[str] | None
"""A layer's plan as callers give it: the plan, the path of its file, or a book."""


def warn_on_first(message: str, *, rank: int) -> None:
    """Log a warning on the first rank only."""
    if rank == 0:
        _LOGGER.warning(message)


def read_plans(paths: Iterable[Path]) -> tuple[Plan, ...]:
    """Return the plans in plan files, and in all `*.json` files of folders.

    Raises:
        InputError: a path is missing or is no plan.
    """
    plans: list[Plan] = []
    for path in paths:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        plans += (read_plan(file).as_layer(str(file)) for file in files)
    return tuple(plans)


def read_plan(path: Path) -> AnyPlan:
    """Return the plan in a file; it may be of any kind.

    Raises:
        InputError: the file cannot be read, or is no plan.
    """
    try:
        return plan_from_json(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"plan {path} cannot be read: {error.strerror}") from None


def plans_of(plan: Plan | str | os.PathLike[str]) -> tuple[Plan, ...]:
    """Return a given plan unchanged, or the plans of a path, as `read_plans` does.

    Raises:
        InputError: `plan` is neither a plan nor a path, or the path is missing or is no plan.
    """
    if isinstance(plan, (str, os.PathLike)):
        return read_plans([Path(plan)])
    if not hasattr(document := getattr(plan, "plan", plan), "as_layer"):
        raise InputError(
            f"{plan!r} is neither the plan of a layer or of a paper's model, nor a path",
            "make a plan with moetune.plan, or give the path of a plan file",
        )
    return (document.as_layer(),)


def share_plans(
    find: Callable[[], PlanBook],
    *,
    find_settled: Callable[[Sequence[Plan]], Sequence[Settled]] = lambda _: (),
    make_tuner: Callable[[], Tuner] | None = None,
    group: dist.ProcessGroup | None = None,
) -> PlanBook:
    """Return the same book on every rank: the group's first rank gets the plans and sends them.

    Args:
        find: called on the group's first rank only.
        find_settled: returns earlier searches' decisions for plans, oldest first; called like
            `find`.
        make_tuner: makes the tuner of a book that searches online, see `OnlineSearch`; else None.

    Raises:
        MoetuneError: raised by `find`; raised on every rank.
        CollectiveError: the exchange failed.
    """
    communicator = communicator_of(group)

    def of_first() -> tuple[Sequence[Plan], Sequence[Settled], bool]:
        book = find()
        return book.plans, tuple(find_settled(book.plans)), book.is_complete

    plans, settled, is_complete = decide_on_first(communicator, of_first, "the sharing of plans")
    search = None
    if make_tuner is not None:
        search = OnlineSearch(make_tuner=make_tuner, settled=settled, group=group)
    return PlanBook(plans, search=search, is_complete=is_complete)
