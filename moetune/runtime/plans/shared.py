"""Plans of a book: read from files, and found by the group's first rank for all of its ranks.

A book is loaded on the group's first rank and broadcast, so that no two ranks can decide
differently.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch.distributed as dist

from moetune.comm.agree import decide_on_first
from moetune.comm.gloo import communicator_of
from moetune.domain.any_plan import AnyPlan, plan_from_json
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.plan import Plan
from moetune.domain.records import Settled
from moetune.runtime.plans.book import PlanBook
from moetune.runtime.plans.online import OnlineSearch
from moetune.runtime.plans.tuner import BUDGET_SECONDS, Tuner


def read_plans(paths: Iterable[Path]) -> tuple[Plan, ...]:
    """Return the plans in plan files, and in all `*.json` of folders.

    Raises:
        InputError: a path is missing or is no plan.
    """
    plans: list[Plan] = []
    for path in paths:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        plans += (read_plan(file).as_layer(str(file)) for file in files)
    return tuple(plans)


def read_plan(path: Path) -> AnyPlan:
    """Return the plan in a file, of whichever kind.

    Raises:
        InputError: it cannot be read, or is no plan.
    """
    try:
        return plan_from_json(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"plan {path} cannot be read: {error.strerror}") from None


def plans_of(plan: Plan | str | os.PathLike[str]) -> tuple[Plan, ...]:
    """Return a plan as it is, or those of a path, as `read_plans` does.

    Raises:
        InputError: it is neither, or the path is missing or is no plan.
    """
    if isinstance(plan, (str, os.PathLike)):
        return read_plans([Path(plan)])
    if not hasattr(found := getattr(plan, "plan", plan), "as_layer"):
        raise InputError(
            f"{plan!r} is neither the plan of a layer or of a paper's model, nor a path",
            "make one with moetune.plan, or give the path of a plan file",
        )
    return (found.as_layer(),)


def share_plans(
    find: Callable[[], PlanBook],
    *,
    find_settled: Callable[[Sequence[Plan]], Sequence[Settled]] = lambda _: (),
    make_tuner: Callable[[], Tuner] | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    group: dist.ProcessGroup | None = None,
) -> PlanBook:
    """Return the same book on every rank: the group's first rank finds the plans and sends them.

    Args:
        find: called on the group's first rank only; only that one reports measured steps.
        find_settled: decisions of earlier searches for plans, oldest first; as `find`.
        make_tuner: for a book that searches online, see `OnlineSearch`; None for one that does not.
        budget_seconds: that its searches may lose.

    Raises:
        MoetuneError: raised by `find`; raised on every rank.
        CollectiveError: the exchange failed.
    """
    communicator = communicator_of(group)
    found_here: list[PlanBook] = []

    def find_safely() -> tuple[Sequence[Plan], Sequence[Settled], bool]:
        try:
            found_here.append(find())
            (book,) = found_here
            return book.plans, tuple(find_settled(book.plans)), book.is_complete
        except MoetuneError:
            raise
        except Exception as error:
            # `decide_on_first` sends only a MoetuneError: after another, other ranks would hang.
            raise MoetuneError(f"plans cannot be loaded: {error!r}") from error

    plans, known, is_complete = decide_on_first(communicator, find_safely, "the sharing of plans")
    search, reporter = None, found_here[0].reporter if found_here else None
    if make_tuner is not None:
        search = OnlineSearch(
            make_tuner=make_tuner, known=known, group=group, budget_seconds=budget_seconds,
            report=None if reporter is None else reporter.settled,
        )  # fmt: skip
    return PlanBook(plans, search=search, reporter=reporter, is_complete=is_complete)
