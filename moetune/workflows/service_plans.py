"""What a training job asks a plan service for, and what it tells it afterwards."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial

from moetune.domain.document import canonical_json, encode
from moetune.domain.errors import InputError
from moetune.domain.plan import Plan
from moetune.domain.plan_inputs import PlanInputs
from moetune.runtime.reporting import ObservationSender, post_observations
from moetune.runtime.service_book import Found, Reports
from moetune.runtime.service_client import ServiceClient
from moetune.workflows import wiring

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
) -> Found:
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
    return Found(
        plans=(*others, *served),
        is_complete=len(served) == len(answers),
        reports=_reports(client, served, observe_every) if is_reporting else None,
    )


def _reports(client: ServiceClient, served: Sequence[Plan], every: int) -> Reports:
    send = partial(post_observations, client.line)
    sender = ObservationSender(send, is_quiet=client.was_refused)
    return Reports(sender=sender, plan_ids=frozenset(plan.id for plan in served), every=every)
