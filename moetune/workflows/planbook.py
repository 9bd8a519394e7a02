"""The plans of a training job: of files, of the store and of a plan service, on all its ranks."""

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from moetune import config
from moetune.domain.document import canonical_json, encode
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.plan import Plan
from moetune.domain.request import PlanInputs
from moetune.domain.service_url import check_service_url
from moetune.runtime.plans.book import FoundPlans, PlanBook, read_plans, share_plans
from moetune.runtime.plans.client import ServiceClient
from moetune.runtime.plans.reports import ObservationSender, StepReporter, post_observations
from moetune.workflows import wiring

if TYPE_CHECKING:
    import torch.distributed as dist

    from moetune.workflows.tuning import StudyTuner


EXAMPLE = 'open_planbook({"model": "gpt-s", "tokens_per_rank": 8192}, service="http://…")'
_ID = re.compile("[0-9a-f]{64}")


def checked_inputs(inputs: Mapping[object, object], *, num_ranks: int) -> dict[str, object]:
    """Return a plan's inputs as they are sent: plain values, without what is None.

    Args:
        num_ranks: the world size where none is given.

    Raises:
        InputError: a key is unknown, a value cannot be sent, or there is nothing to plan for.
    """
    names = [item.name for item in fields(PlanInputs)]
    for key in inputs:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
            raise InputError(f"a plan has no input {key!r}", hint)
    plain: dict[str, object] = {
        str(key): encode(value) for key, value in inputs.items() if value is not None
    }
    if "model" not in plain and "layer" not in plain:
        raise InputError("the inputs lack 'model' or 'layer'", f"as in {EXAMPLE}")
    plain.setdefault("world_size", num_ranks)
    try:
        canonical_json(plain)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"a plan's inputs cannot be sent: {error}", "give texts, whole numbers and tables"
        ) from None
    return plain


def is_served(source: object, url: str | None) -> bool:
    """Return whether a service is asked for it: for inputs, and for whole ids where there is one.

    A file, a folder and the beginning of an id are looked up here.
    """
    if isinstance(source, Mapping):
        return True
    return url is not None and isinstance(source, str) and _ID.fullmatch(source) is not None


def ask_service(
    url: str | None,
    sources: Sequence[object],
    *,
    others: Sequence[Plan],
    num_ranks: int,
    observe_every: int,
) -> FoundPlans:
    """Return the service's plans behind those from elsewhere, and where to report.

    Args:
        sources: plans' inputs, and whole ids.
        num_ranks: the world size of inputs that give none.
        observe_every: calls of a layer between two that are reported; 0 reports none.

    Raises:
        InputError: there is no service, or inputs are wrong.
    """
    if url is None:
        raise InputError(
            "there is no plan service to ask for these inputs",
            "name one with service=…, MOETUNE_URL or the setting `url`",
        )
    if observe_every < 0:
        raise InputError(f"observe_every must be at least 0, got {observe_every}")
    questions = [
        checked_inputs(one, num_ranks=num_ranks) if isinstance(one, Mapping) else str(one)
        for one in sources
    ]
    client = wiring.service_client(url)
    answers = client.ask(questions)
    served = [plan for plan in answers if plan is not None]
    is_reporting = served and observe_every
    return FoundPlans(
        plans=(*others, *served),
        is_complete=len(served) == len(answers),
        reporter=_reporter(client, served, observe_every) if is_reporting else None,
    )


def _reporter(client: ServiceClient, served: Sequence[Plan], every: int) -> StepReporter:
    send = partial(post_observations, client.connection)
    sender = ObservationSender(send, is_quiet=client.was_refused)
    return StepReporter(sender, plan_ids=frozenset(plan.id for plan in served), every=every)


_One: TypeAlias = str | os.PathLike[str] | Plan | Mapping[str, object]


def open_planbook(
    source: _One | Sequence[_One] | None = None,
    *,
    group: "dist.ProcessGroup | None" = None,
    db: str | None = None,
    online: bool = False,
    service: str | None = None,
    observe_every: int = 50,
) -> PlanBook:
    """Return the same plans on every rank of the group; all its ranks call this together.

    The group's first rank reads, the others receive, and a digest is compared on all. With
    `MOETUNE_DISABLE=1` on the first rank the book is empty: layers run one chunk.

    With `online` the book searches for better degrees and strategies on the layers that are
    given it, while they train: call `book.step()` after every optimizer step, on all ranks.
    For each number of tokens that comes it tries a few, beginning with the plan's answer, and
    keeps the fastest in the store, from where the next job takes it. A size costs about 20
    steps, most of them near the best; near sizes and sizes between two that agree cost none.
    When all that come are settled, `step` does nothing. The degrees never change the numbers.

    With a plan service (`moetune serve`) the first rank asks it for the plans of inputs. Where it
    gives no plan, the last one that it gave for the same question counts, from the user's
    cache, and then none: one warning, and the training goes on. What steps with its plans take
    is sent to it in the background; `book.close()` at the end of the job sends the rest.

    Args:
        source: plan files, folders of them, ids or their beginnings in the store, or plans;
            None takes every plan of the store. With a service whole ids are the service's, and
            a table of a plan's inputs, such as `{"model": "gpt-s", "tokens_per_rank": 8192}`,
            asks it for the plan; `model` or `layer` is needed, `world_size` is the group's
            number of ranks where it is not given, and the service knows the rest.
        db: the store; default, as the command line finds it.
        group: the ranks that share the book; with `online` the layers' group.
        online: search while training.
        service: the service's url; default, MOETUNE_URL or the setting `url`. Its token is
            taken from MOETUNE_TOKEN.
        observe_every: calls of a layer between two whose time is sent to the service; 0 sends
            none. With `online` none is sent either.

    Raises:
        InputError: a file, an id of the store, an input's name or the url is wrong; on every
            rank.
        RankMismatchError: a rank received something else.
        MoetuneError: the store cannot be read, or `online` lacks Optuna; on every rank.
    """
    request = _BookRequest(source=source, db=db, service=service, observe_every=observe_every)
    if online:
        return share_plans(
            lambda: _find_settled(request, group), make_tuner=partial(_make_tuner, db), group=group
        )
    return share_plans(lambda: _find_all(request, group), group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BookRequest:
    """The arguments of `open_planbook`."""

    source: _One | Sequence[_One] | None
    db: str | None
    service: str | None
    observe_every: int

    @property
    def sources(self) -> Sequence[_One]:
        if self.source is None:
            return ()
        return self.source if isinstance(self.source, (list, tuple)) else (self.source,)


def _find_settled(request: _BookRequest, group: "dist.ProcessGroup | None") -> FoundPlans:
    """Return what an online book holds; on the group's first rank only."""
    if importlib.util.find_spec("optuna") is None:
        raise MoetuneError("online=True needs Optuna", "pip install 'optuna>=5.0'")
    found = replace(_find_all(request, group), reporter=None)
    if not found.plans:
        return found
    with wiring.find_store(wiring.configure(db=request.db).settings) as store:
        if store is None:
            return found
        hardware_id = wiring.detect_cluster().fingerprint.hardware_id
        settled = [one for plan in found.plans for one in store.settled(plan.id)]
        return replace(found, settled=[one for one in settled if one.hardware_id == hardware_id])


def _make_tuner(db: str | None) -> "StudyTuner":
    from moetune.workflows.tuning import StudyTuner

    settings = wiring.configure(db=db).settings
    return StudyTuner(
        folder=wiring.searches_folder(settings),
        hardware_id=wiring.detect_cluster().fingerprint.hardware_id,
        stores=partial(wiring.open_store, settings),
    )


def _find_all(request: _BookRequest, group: "dist.ProcessGroup | None") -> FoundPlans:
    """Return what the book holds; on the group's first rank only."""
    import torch

    from moetune.comm.gloo import communicator_of

    if config.is_disabled(config.environment()):
        return FoundPlans(plans=())
    url = _url(request)
    if request.source is None:
        return FoundPlans(plans=tuple(_all_plans(request.db)))
    served = [one for one in request.sources if is_served(one, url)]
    others = [one for one in request.sources if not is_served(one, url)]
    plans = tuple(plan for one in others for plan in _find(one, request.db))
    if not served:
        return FoundPlans(plans=plans)
    return ask_service(
        url, served, others=plans,
        num_ranks=communicator_of(group, device=torch.device("cpu")).num_ranks,
        observe_every=request.observe_every,
    )  # fmt: skip


def _url(request: _BookRequest) -> str | None:
    """Return the address of the service, None for none.

    Raises:
        InputError: it is no address, or there is nothing to ask for.
    """
    url = request.service
    if url is None:
        url = wiring.configure(db=request.db).settings.url
    elif request.source is None:
        raise InputError(
            "a plan service is asked for a job's own plans, and none is named", f"as in {EXAMPLE}"
        )
    return None if url is None else check_service_url(url)


def _find(one: object, db: str | None) -> Iterable[Plan]:
    from moetune.workflows.files import find_plan

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
