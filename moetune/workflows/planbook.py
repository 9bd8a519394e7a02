"""Open a plan book in a training job: the store or files on one rank, the same on all."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moetune import config
from moetune.domain.plan import Plan
from moetune.workflows import wiring

if TYPE_CHECKING:
    import torch.distributed as dist

    from moetune.runtime.planbook import PlanBook

_PathLike = str | os.PathLike[str]


def open_planbook(
    source: _PathLike | Plan | Sequence[_PathLike | Plan] | None = None,
    *,
    group: "dist.ProcessGroup | None" = None,
    db: str | None = None,
) -> "PlanBook":
    """Return the same plans on every rank of the group; all its ranks call this together.

    The group's first rank reads, the others receive, and a digest is compared on all. With
    `MOETUNE_DISABLE=1` on the first rank the book is empty: layers run one chunk.

    Args:
        source: plan files, folders of them, ids or their beginnings in the store, or plans;
            None takes every plan of the store.
        db: the store; default, as the command line finds it.

    Raises:
        InputError: a file or an id is wrong; on every rank.
        RankMismatchError: a rank received something else.
        MoetuneError: the store cannot be read.
    """
    from moetune.runtime.planbook import share_plans

    return share_plans(lambda: _load(source, db), group=group)


def _load(
    source: _PathLike | Plan | Sequence[_PathLike | Plan] | None, db: str | None
) -> list[Plan]:
    if config.is_disabled(config.environment()):
        return []
    if source is None:
        return list(_all_plans(db))
    many = source if isinstance(source, (list, tuple)) else [source]
    return [plan for one in many for plan in _find(one, db)]


def _find(one: object, db: str | None) -> Iterable[Plan]:
    from moetune.runtime.planbook import read_plans
    from moetune.workflows.plan import find_plan

    if isinstance(one, Plan):
        return (one,)
    text = os.fspath(one)  # type: ignore[call-overload] # a path by the signature
    if Path(text).is_dir():
        return read_plans([Path(text)])
    settings = wiring.configure(db=db).settings
    return (find_plan(text, stores=lambda: wiring.find_store(settings)),)


def _all_plans(db: str | None) -> Iterable[Plan]:
    with wiring.find_store(wiring.configure(db=db).settings) as store:
        if store is None:
            return []
        found = (store.plan(info.id) for info in reversed(store.plans()))
        return [plan for plan in found if plan is not None]
