"""Open a plan book in a training job: the store or files on one rank, the same on all."""

import importlib.util
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moetune import config
from moetune.domain.errors import MoetuneError
from moetune.domain.plan import Plan
from moetune.domain.ports import Settled
from moetune.workflows import wiring

if TYPE_CHECKING:
    import torch.distributed as dist

    from moetune.runtime.planbook import PlanBook
    from moetune.workflows.tuning import StudyTuner

_PathLike = str | os.PathLike[str]


def open_planbook(
    source: _PathLike | Plan | Sequence[_PathLike | Plan] | None = None,
    *,
    group: "dist.ProcessGroup | None" = None,
    db: str | None = None,
    online: bool = False,
) -> "PlanBook":
    """Return the same plans on every rank of the group; all its ranks call this together.

    The group's first rank reads, the others receive, and a digest is compared on all. With
    `MOETUNE_DISABLE=1` on the first rank the book is empty: layers run one chunk.

    With `online` the book searches for better degrees and strategies on the layers that are
    given it, while they train: call `book.step()` after every optimizer step, on all ranks.
    For each number of tokens that comes it tries a few, beginning with the plan's answer, and
    keeps the fastest in the store, from where the next job takes it. A size costs about 20
    steps, most of them near the best; near sizes and sizes between two that agree cost none.
    When all that come are settled, `step` does nothing. The degrees never change the numbers.

    Args:
        source: plan files, folders of them, ids or their beginnings in the store, or plans;
            None takes every plan of the store.
        db: the store; default, as the command line finds it.
        group: the ranks that share the book; with `online` the layers' group.
        online: search while training.

    Raises:
        InputError: a file or an id is wrong; on every rank.
        RankMismatchError: a rank received something else.
        MoetuneError: the store cannot be read, or `online` lacks Optuna; on every rank.
    """
    if online:
        from moetune.runtime.online import share_online

        return share_online(
            lambda: _load_online(source, db), make_tuner=partial(_make_tuner, db), group=group
        )
    from moetune.runtime.planbook import share_plans

    return share_plans(lambda: _load(source, db), group=group)


def _load_online(
    source: _PathLike | Plan | Sequence[_PathLike | Plan] | None, db: str | None
) -> tuple[list[Plan], tuple[Settled, ...]]:
    if importlib.util.find_spec("optuna") is None:
        raise MoetuneError("online=True needs Optuna", "pip install 'optuna>=5.0'")
    plans = _load(source, db)
    if not plans:
        return [], ()
    with wiring.find_store(wiring.configure(db=db).settings) as store:
        if store is None:
            return plans, ()
        hardware_id = wiring.detect_cluster().fingerprint.hardware_id
        settled = [one for plan in plans for one in store.settled(plan.id)]
        return plans, tuple(one for one in settled if one.hardware_id == hardware_id)


def _make_tuner(db: str | None) -> "StudyTuner":
    from moetune.workflows.tuning import StudyTuner

    settings = wiring.configure(db=db).settings
    return StudyTuner(
        folder=wiring.searches_folder(settings),
        hardware_id=wiring.detect_cluster().fingerprint.hardware_id,
        stores=partial(wiring.open_store, settings),
    )


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
