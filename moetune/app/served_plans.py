"""Plans that a plan service has for a training job, and the reports of their steps."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial

from moetune.app import wiring
from moetune.domain.document import canonical_json, encode
from moetune.domain.errors import InputError
from moetune.domain.plan import Plan
from moetune.domain.request import PlanInputs
from moetune.domain.spelling import nearest_or
from moetune.runtime.plans.book import PlanBook
from moetune.runtime.plans.client import ServiceClient
from moetune.runtime.plans.reports import ObservationSender, StepReporter, post_observations

EXAMPLE = 'open_planbook({"model": "gpt-s", "tokens_per_rank": 8192}, service="http://…")'
_ID = re.compile("[0-9a-f]{64}")


def checked_inputs(inputs: Mapping[object, object], *, num_ranks: int) -> dict[str, object]:
    """Return a plan's inputs ready to send: plain values, without those that are None.

    Args:
        num_ranks: the world size where none is given.

    Raises:
        InputError: a key is unknown, a value has no JSON form, or neither model nor layer is given.
    """
    names = [item.name for item in fields(PlanInputs)]
    for key in inputs:
        if key not in names:
            hint = nearest_or(f"known: {', '.join(names)}", key, names)
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
            f"a plan's inputs cannot be sent: {error}", "give strings, integers and dicts"
        ) from None
    return plain


def is_served(source: object, url: str | None) -> bool:
    """Return whether the plan service resolves a source: inputs, and full ids where `url` is set.

    Files, folders and beginnings of ids are resolved on this machine.
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
) -> PlanBook:
    """Return other plans followed by the service's, and the reporter of the latter's steps.

    Args:
        sources: plans' inputs, and full ids.
        num_ranks: the world size of inputs that give none.
        observe_every: calls of a layer per reported one; 0 reports none.

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
    return PlanBook(
        (*others, *served),
        is_complete=len(served) == len(answers),
        reporter=_reporter(client, served, observe_every) if is_reporting else None,
    )


def _reporter(client: ServiceClient, served: Sequence[Plan], every: int) -> StepReporter:
    send = partial(post_observations, client.connection)
    sender = ObservationSender(send, is_quiet=client.was_refused)
    return StepReporter(
        sender, plan_ids=frozenset(plan.id for plan in served), every=every,
        device_id=wiring.detect_cluster().fingerprint.device_id,
    )  # fmt: skip
