"""Plans of a training job from files, the store and a plan service, equal on all its ranks.

`open_planbook` is the job's first step; `MoELayer` looks its batch up in the book.
"""

import importlib.util
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from moetune import config
from moetune.app import wiring
from moetune.app.planner import local_planner
from moetune.config import Settings
from moetune.domain.document import canonical_json, encode
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.plan import Plan
from moetune.domain.records import Settled
from moetune.domain.request import PlanInputs
from moetune.domain.spelling import nearest_or
from moetune.runtime.plans.book import PlanBook, read_plans, share_plans

if TYPE_CHECKING:
    import torch.distributed as dist

    from moetune.app.tuning import StudyTuner

_LOGGER = logging.getLogger("moetune")
_EXAMPLE = 'open_planbook({"model": "gpt-s", "tokens_per_rank": 8192}, service="http://…")'
_ID = re.compile("[0-9a-f]{64}")
_Source: TypeAlias = str | os.PathLike[str] | Plan | Mapping[str, object]


def open_planbook(
    source: _Source | Sequence[_Source] | None = None,
    *,
    group: "dist.ProcessGroup | None" = None,
    db: str | None = None,
    online: bool = False,
    service: str | None = None,
    renew: bool = False,
) -> PlanBook:
    """Return the same plans on every rank of the group; all its ranks call this together.

    The group's first rank reads the plans and broadcasts them; the other ranks read no files.
    With `MOETUNE_DISABLE=1` on the first rank the book is empty, and layers run one chunk.

    With `online` the book searches for better degrees and strategies while its layers train: call
    `book.step()` after every optimizer step, on all ranks. For each new number of tokens it tries
    a few, first the plan's, and stores the fastest for later jobs. A search takes about 20 steps,
    most of them close to the best. A number near a settled number, or between two that agree,
    needs no search. Once all are settled, `step` does nothing. No decision changes the numbers
    that a layer computes.

    With a plan service (`moetune serve`) the first rank asks it for the plans of inputs. If the
    service gives no plan, its last answer to the same inputs comes from the user's cache. Without
    that, the layer runs without a plan: there is a single warning, and the training goes on.

    Args:
        source: plan files, folders of them, ids or their beginnings in the store, or plans;
            None takes every plan of the store. With a service, full ids are looked up there, and
            a dict of a plan's inputs, such as `{"model": "gpt-s", "tokens_per_rank": 8192}`,
            requests the plan. `model` or `layer` is required; `world_size` defaults to the
            group's number of ranks, everything else to the service's defaults.
        db: the store; default, the store of the command line.
        group: the ranks that share the book; with `online` the layers' group.
        online: search while training.
        service: the service's url; default, MOETUNE_URL or the setting `url`. Its token is
            taken from MOETUNE_TOKEN.
        renew: replace layers' plans for another number of ranks by plans for the group's number,
            with the same total tokens, profile and constraints.

    Raises:
        InputError: a file, an id of the store, an input's name or the url is wrong, or `renew` is
            given without a source; on every rank.
        MoetuneError: the store cannot be read, or `online` lacks Optuna; on every rank.
    """
    request = _BookRequest(source=source, db=db, service=service, renew=renew)
    if online:
        return share_plans(
            lambda: _find_all(request, group), find_settled=partial(_find_settled, request),
            make_tuner=partial(_make_tuner, request), group=group,
        )  # fmt: skip
    return share_plans(lambda: _find_all(request, group), group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BookRequest:
    """The arguments of `open_planbook`."""

    source: _Source | Sequence[_Source] | None
    db: str | None
    service: str | None
    renew: bool

    @property
    def settings(self) -> Settings:
        return wiring.configure(db=self.db).settings

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
    with wiring.find_store(request.settings) as store:
        if store is None:
            return ()
        hardware_id = wiring.detect_cluster().fingerprint.hardware_id
        settled = [size for plan in plans for size in store.settled(plan.id)]
        # Older decisions with two different degrees, which no layer runs, are searched again.
        return [
            size
            for size in settled
            if size.hardware_id == hardware_id
            and size.decision.forward_degree == size.decision.backward_degree
        ]


def _make_tuner(request: _BookRequest) -> "StudyTuner":
    from moetune.app.tuning import StudyTuner

    settings = request.settings
    return StudyTuner(
        folder=wiring.searches_folder(settings),
        hardware_id=wiring.detect_cluster().fingerprint.hardware_id,
        stores=partial(wiring.open_store, settings),
    )


def _find_all(request: _BookRequest, group: "dist.ProcessGroup | None") -> PlanBook:
    """Return the book: plans of files and the store, then the service's; on the first rank only."""
    from moetune.comm.gloo import communicator_of

    if config.is_disabled(config.environment()):
        return PlanBook()
    url = _url(request)
    if request.source is None:
        if request.renew:
            raise InputError("renew needs the plans' names", "give a source")
        return PlanBook(_all_plans(request.settings))
    num_ranks = communicator_of(group).num_ranks
    book = _find_named(request, url, num_ranks)
    return _renew(book, request, url=url, num_ranks=num_ranks) if request.renew else book


def _find_named(request: _BookRequest, url: str | None, num_ranks: int) -> PlanBook:
    served = [source for source in request.sources if _is_served(source, url)]
    local = [source for source in request.sources if not _is_served(source, url)]
    plans = tuple(plan for source in local for plan in _find(source, request.settings))
    if not served:
        return PlanBook(plans)
    served_plans = _ask_service(url, served, num_ranks=num_ranks)
    return PlanBook((*plans, *served_plans), is_complete=len(served_plans) == len(served))


def _renew(book: PlanBook, request: _BookRequest, *, url: str | None, num_ranks: int) -> PlanBook:
    """Return the book with plans for this number of ranks; warn of plans that cannot be made."""
    old = [plan for plan in book.plans if plan.inputs.world_size != num_ranks]
    if not old:
        return book
    current = [plan for plan in book.plans if plan not in old]
    questions = [plan.inputs.question_for(num_ranks) for plan in old]
    if url is None:
        renewed = _make_plans(questions, request.settings)
    else:
        renewed = _ask_service(url, questions, num_ranks=num_ranks)
    is_complete = book.is_complete and len(renewed) == len(questions)
    return PlanBook((*current, *renewed), is_complete=is_complete)


def _make_plans(questions: Sequence[Mapping[str, object]], settings: Settings) -> list[Plan]:
    """Return the plans that can be made here; the log says why others cannot."""
    made: list[Plan] = []
    for question in questions:
        try:
            with local_planner(settings, saves=True) as planner:
                made.append(planner.resolve(question))
        except MoetuneError as error:
            text = f"no plan for {canonical_json(question)}: {error}\n  its layers run one chunk"
            _LOGGER.warning(text)
    return made


def _url(request: _BookRequest) -> str | None:
    """Return the service's address, or None; raise InputError if it is wrong or lacks a source."""
    url = request.service
    if url is None:
        url = wiring.configure(db=request.db).service_url(config.environment())
    elif request.source is None:
        raise InputError(
            "with a plan service, name the inputs or the ids of the plans", f"as in {_EXAMPLE}"
        )
    return None if url is None else config.check_service_url(url)


def _find(source: object, settings: Settings) -> Iterable[Plan]:
    from moetune.app.files import find_plan

    named: Any = getattr(source, "plan", source)
    if not isinstance(named, (str, os.PathLike)):
        return (named.as_layer(),)
    if Path(named).is_dir():
        return read_plans([Path(named)])
    return (find_plan(named, stores=partial(wiring.find_store, settings)).as_layer(),)


def _all_plans(settings: Settings) -> Iterable[Plan]:
    with wiring.find_store(settings) as store:
        if store is None:
            return []
        plans = (store.plan(info.id) for info in reversed(store.plans()))
        return [plan.as_layer() for plan in plans if plan and plan.kind != "training"]


def _checked_inputs(inputs: Mapping[object, object], *, num_ranks: int) -> dict[str, object]:
    """Return a plan's inputs to send, with a world size and without None; or raise InputError."""
    names = [item.name for item in fields(PlanInputs)]
    for key in inputs:
        if key not in names:
            hint = nearest_or(f"known: {', '.join(names)}", key, names)
            raise InputError(f"a plan has no input {key!r}", hint)
    plain: dict[str, object] = {
        str(key): encode(value) for key, value in inputs.items() if value is not None
    }
    if "model" not in plain and "layer" not in plain:
        raise InputError("the inputs lack 'model' or 'layer'", f"as in {_EXAMPLE}")
    plain.setdefault("world_size", num_ranks)
    try:
        canonical_json(plain)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"a plan's inputs cannot be sent: {error}", "give strings, integers and dicts"
        ) from None
    return plain


def _is_served(source: object, url: str | None) -> bool:
    """Return whether the service resolves a source: inputs, and full ids if `url` is set."""
    if isinstance(source, Mapping):
        return True
    return url is not None and isinstance(source, str) and _ID.fullmatch(source) is not None


def _ask_service(url: str | None, sources: Sequence[object], *, num_ranks: int) -> list[Plan]:
    """Return the plans that the service gave for inputs and full ids, or raise InputError."""
    if url is None:
        raise InputError(
            "there is no plan service to ask for these inputs",
            "name a service with service=…, MOETUNE_URL or the setting `url`",
        )
    questions = [
        _checked_inputs(source, num_ranks=num_ranks) if isinstance(source, Mapping) else str(source)
        for source in sources
    ]
    answers = wiring.service_client(url).ask(questions)
    return [plan for plan in answers if plan is not None]
