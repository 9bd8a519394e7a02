"""Plans of a training job, from files, the store and a plan service, equal on all its ranks.

`open_planbook` is the job's first step; `MoELayer` looks its batch up in the book.
"""

import importlib.util
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from moetune import config
from moetune.app import wiring
from moetune.app.planner import local_planner
from moetune.app.served_plans import EXAMPLE, ask_service, is_served
from moetune.domain.document import canonical_json
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.plan import Plan
from moetune.domain.records import Settled
from moetune.runtime.plans.book import PlanBook
from moetune.runtime.plans.shared import read_plans, share_plans
from moetune.runtime.plans.tuner import BUDGET_SECONDS

if TYPE_CHECKING:
    import torch.distributed as dist

    from moetune.app.tuning import StudyTuner

_LOGGER = logging.getLogger("moetune")
_Source: TypeAlias = str | os.PathLike[str] | Plan | Mapping[str, object]


def open_planbook(
    source: _Source | Sequence[_Source] | None = None,
    *,
    group: "dist.ProcessGroup | None" = None,
    db: str | None = None,
    online: bool = False,
    service: str | None = None,
    observe_every: int = 50,
    search_budget_seconds: float = BUDGET_SECONDS,
    renew: bool = False,
) -> PlanBook:
    """Return the same plans on every rank of the group; all its ranks call this together.

    The group's first rank reads the plans and broadcasts them; files on the other ranks' machines
    are not read. With
    `MOETUNE_DISABLE=1` on the first rank the book is empty, and layers run one chunk.

    With `online` the book searches for better degrees and strategies while its layers train: call
    `book.step()` after every optimizer step, on all ranks. For each new number of tokens it tries
    a few, first the plan's, and stores the fastest for later jobs. One number of tokens takes
    about 20 steps, most of them close to the best; a number near a settled one, or between two
    that agree, takes none. Once all are settled, `step` does nothing. No decision changes the
    numbers that a layer computes. Trials that are slower than the best decision known lose time;
    once all of the job have lost `search_budget_seconds`, the search under way settles on the best
    it knows, and none follows.

    With a plan service (`moetune serve`) the first rank asks it for the plans of inputs. Where the
    service gives none, its last answer to the same inputs is taken from the user's cache, else the
    layer runs without a plan: there is one warning, and the training goes on. Step times are sent
    to the service in the background; `book.close()` at the end of the job sends the rest.

    Args:
        source: plan files, folders of them, ids or their beginnings in the store, or plans;
            None takes every plan of the store. With a service, full ids are looked up there, and
            a dict of a plan's inputs, such as `{"model": "gpt-s", "tokens_per_rank": 8192}`,
            requests the plan. `model` or `layer` is required; `world_size` defaults to the
            group's number of ranks, everything else to the service's defaults.
        db: the store; default, that of the command line.
        group: the ranks that share the book; with `online` the layers' group.
        online: search while training.
        service: the service's url; default, MOETUNE_URL or the setting `url`. Its token is
            taken from MOETUNE_TOKEN.
        observe_every: calls of a layer per call whose time is sent to the service; 0 sends
            none. With `online` what searches settle is sent instead.
        search_budget_seconds: time that searches of this job may lose; default, a hundredth of an
            hour. The first rank's counts.
        renew: instead of plans of layers for another number of ranks take those for the group's,
            with the same tokens of all ranks, profile and constraints.

    Raises:
        InputError: a file, an id of the store, an input's name or the url is wrong, or `renew` is
            given without a source; on every rank.
        MoetuneError: the store cannot be read, or `online` lacks Optuna; on every rank.
    """
    request = _BookRequest(
        source=source, db=db, service=service, observe_every=observe_every, renew=renew
    )
    if online:
        return share_plans(
            lambda: _find_all(request, group), find_settled=partial(_find_settled, request),
            make_tuner=partial(_make_tuner, db), budget_seconds=search_budget_seconds, group=group,
        )  # fmt: skip
    return share_plans(lambda: _find_all(request, group), group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BookRequest:
    """The arguments of `open_planbook`."""

    source: _Source | Sequence[_Source] | None
    db: str | None
    service: str | None
    observe_every: int
    renew: bool

    @property
    def sources(self) -> Sequence[_Source]:
        if self.source is None:
            return ()
        return self.source if isinstance(self.source, (list, tuple)) else (self.source,)


def _find_settled(request: _BookRequest, plans: Sequence[Plan]) -> Sequence[Settled]:
    """Return the decisions that earlier searches settled; on the group's first rank only."""
    if importlib.util.find_spec("optuna") is None:
        raise MoetuneError("online=True needs Optuna", "pip install 'optuna>=5.0'")
    if not plans:
        return ()
    with wiring.find_store(wiring.configure(db=request.db).settings) as store:
        if store is None:
            return ()
        hardware_id = wiring.detect_cluster().fingerprint.hardware_id
        settled = [one for plan in plans for one in store.settled(plan.id)]
        return [one for one in settled if one.hardware_id == hardware_id]


def _make_tuner(db: str | None) -> "StudyTuner":
    from moetune.app.tuning import StudyTuner

    settings = wiring.configure(db=db).settings
    return StudyTuner(
        folder=wiring.searches_folder(settings),
        hardware_id=wiring.detect_cluster().fingerprint.hardware_id,
        stores=partial(wiring.open_store, settings),
    )


def _find_all(request: _BookRequest, group: "dist.ProcessGroup | None") -> PlanBook:
    """Return the book's plans, its own before the service's; on the group's first rank only."""
    from moetune.comm.gloo import communicator_of

    if config.is_disabled(config.environment()):
        return PlanBook()
    url = _url(request)
    if request.source is None:
        if request.renew:
            raise InputError("renew needs the plans' names", "give a source")
        return PlanBook(_all_plans(request.db))
    num_ranks = communicator_of(group).num_ranks
    found = _find_named(request, url, num_ranks)
    if not request.renew:
        return found
    return _renewed(found, request, url=url, num_ranks=num_ranks)


def _find_named(request: _BookRequest, url: str | None, num_ranks: int) -> PlanBook:
    served = [one for one in request.sources if is_served(one, url)]
    others = [one for one in request.sources if not is_served(one, url)]
    plans = tuple(plan for one in others for plan in _find(one, request.db))
    if not served:
        return PlanBook(plans)
    return ask_service(
        url, served, others=plans, num_ranks=num_ranks, observe_every=request.observe_every
    )


def _renewed(
    found: PlanBook, request: _BookRequest, *, url: str | None, num_ranks: int
) -> PlanBook:
    """Return plans for a number of ranks in place of those for others.

    The service gives them where there is one; else they are made from the store's profiles, and
    stored. A plan that cannot be had is one warning, and its layers run one chunk.
    """
    old = [one for one in found.plans if one.inputs.world_size != num_ranks]
    if not old:
        return found
    kept = [one for one in found.plans if one not in old]
    questions = [one.inputs.question_for(num_ranks) for one in old]
    if url is None:
        made = _made(questions, request.db)
        plans = (*kept, *made)
        is_complete = found.is_complete and len(made) == len(questions)
        return PlanBook(plans, is_complete=is_complete, reporter=found.reporter)
    reported = frozenset() if found.reporter is None else found.reporter.plan_ids
    return ask_service(
        url, [*(one.id for one in kept if one.id in reported), *questions],
        others=[one for one in kept if one.id not in reported],
        num_ranks=num_ranks, observe_every=request.observe_every,
    )  # fmt: skip


def _made(questions: Sequence[Mapping[str, object]], db: str | None) -> list[Plan]:
    """Return the plans that can be made here; the log says why others cannot."""
    made: list[Plan] = []
    settings = wiring.configure(db=db).settings
    for question in questions:
        try:
            with local_planner(settings, saves=True) as planner:
                made.append(planner.resolve(question))
        except MoetuneError as error:
            text = f"no plan for {canonical_json(question)}: {error}\n  its layers run one chunk"
            _LOGGER.warning(text)
    return made


def _url(request: _BookRequest) -> str | None:
    """Return the address of the service; None for no service.

    Raises:
        InputError: it is not an address, or `service` is given without a source.
    """
    url = request.service
    if url is None:
        url = wiring.configure(db=request.db).service_url(config.environment())
    elif request.source is None:
        raise InputError(
            "with a plan service, name the inputs or the ids of the plans", f"as in {EXAMPLE}"
        )
    return None if url is None else config.check_service_url(url)


def _find(one: object, db: str | None) -> Iterable[Plan]:
    from moetune.app.files import find_plan

    found: Any = getattr(one, "plan", one)
    if not isinstance(found, (str, os.PathLike)):
        return (found.as_layer(),)
    text = os.fspath(found)
    if Path(text).is_dir():
        return read_plans([Path(text)])
    settings = wiring.configure(db=db).settings
    return (find_plan(text, stores=lambda: wiring.find_store(settings)).as_layer(),)


def _all_plans(db: str | None) -> Iterable[Plan]:
    with wiring.find_store(wiring.configure(db=db).settings) as store:
        if store is None:
            return []
        found = (store.plan(info.id) for info in reversed(store.plans()))
        return [plan.as_layer() for plan in found if plan and plan.kind != "training"]
