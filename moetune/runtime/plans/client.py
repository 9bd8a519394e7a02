"""Get plans from a plan service when a job starts, or its last good answers while it is away.

`moetune.open_planbook` calls this on the group's first rank, once for every question.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

from moetune.domain.any_plan import plan_from_json
from moetune.domain.document import canonical_json, digest, encode
from moetune.domain.errors import InputError
from moetune.domain.plan import Plan
from moetune.runtime.files import replace_file
from moetune.runtime.plans.service import (
    TIMEOUT_SECONDS,
    ServiceConnection,
    ServiceError,
    printable,
)

Question: TypeAlias = Mapping[str, object] | str
"""A plan's id, or some or all of a plan's `inputs` as plain values."""
NUM_TRIES = 3

_LOGGER = logging.getLogger("moetune")
_NO_TOKEN = frozenset({401, 403})
_ANSWERED = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The plan for a question, None without one.

    Args:
        reason: of a failure on the way to it, empty without one.
        hint: next command to run.
    """

    plan: Plan | None
    reason: str = ""
    hint: str = ""


class ServiceClient:
    """A client of a plan service, which falls back to the last good plan of each question.

    No failure of the service, the network or the folder raises. All failures of one call are one
    warning in the log (`moetune`).

    Args:
        url: as `check_service_url` returns it.
        token: of the service, if it wants one.
        cache: folder for the last good plan of every question.
        timeout_seconds: of one try, from the look-up of the host's name to the last byte.
        pause_seconds: between the first try and the second; the next pause is twice as long.

    Attributes:
        connection: to the service.
        was_refused: a question had no good answer, and the log has warned.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        cache: Path,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        pause_seconds: float = 0.25,
    ) -> None:
        self.connection = ServiceConnection(url, token, timeout_seconds=timeout_seconds)
        self.was_refused = False
        self._cache = cache
        self._pause_seconds = pause_seconds
        self._away: ServiceError | None = None

    def ask(self, questions: Sequence[Question]) -> tuple[Plan | None, ...]:
        """Return a plan for each question, None without one.

        After a question that got no answer at all, the service is not asked again.
        """
        answers = [self._answer(question) for question in questions]
        troubles = [
            (question, answer)
            for question, answer in zip(questions, answers, strict=True)
            if answer.reason
        ]
        if troubles:
            _LOGGER.warning("%s", _report(self.connection.url, troubles))
        return tuple(answer.plan for answer in answers)

    def _answer(self, question: Question) -> _Answer:
        try:
            plan = self._fetch(question)
        except ServiceError as error:
            return self._remembered(question, error)
        try:
            self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._file(question), canonical_json(plan).encode())
        except OSError as error:
            reason = f"the plan cannot be stored for use without the service: {_os_words(error)}"
            return _Answer(plan=plan, reason=reason, hint="free space there, or set XDG_CACHE_HOME")
        return _Answer(plan=plan)

    def _file(self, question: Question) -> Path:
        """Return the file of the last good plan, which several jobs may share."""
        return self._cache / f"{digest(question)}.json"

    def _fetch(self, question: Question) -> Plan:
        """Return the service's plan.

        Raises:
            ServiceError: there is none, or it does not answer the question.
        """
        request = partial(self.connection.request, "/v1/plans:resolve", question)
        if isinstance(question, str):
            request = partial(self.connection.request, f"/v1/plans/{quote(question, safe='')}")
        text = self._retried(request)
        return _checked(text, question, "its answer")

    def _retried(self, exchange: Callable[[], bytes]) -> bytes:
        """Try up to three times; once, if the answer is final; never, if the service is away."""
        if self._away is not None:
            raise self._away
        failure = ServiceError("it was not asked")
        for attempt in range(NUM_TRIES):
            time.sleep(self._pause_seconds * attempt)
            try:
                return exchange()
            except ServiceError as error:
                if error.is_final:
                    raise
                failure = ServiceError(f"{error}, {NUM_TRIES} tries", status=error.status)
        if failure.status is None:
            self._away = failure
        raise failure

    def _remembered(self, question: Question, error: ServiceError) -> _Answer:
        """Return the last good plan, if there is one that this version can read."""
        self.was_refused = True
        reason, file = str(error), self._file(question)
        try:
            plan = _checked(file.read_bytes(), question, "it")
        except FileNotFoundError:
            plan = None
        except (OSError, ServiceError) as broken:
            words = str(broken) if isinstance(broken, ServiceError) else _os_words(broken)
            reason += f"; and of the plan stored in {file}: {words}"
            plan = None
        return _Answer(plan=plan, reason=reason, hint=_hint(error))


def _checked(text: bytes, question: Question, where: str) -> Plan:
    """Return the plan in an answer.

    Args:
        where: name of the answer in an error.

    Raises:
        ServiceError: it is no plan, its id is not the hash of its inputs, or its inputs are not
            those of the question.
    """
    try:
        plan = plan_from_json(text, where).as_layer(where)
    except InputError as error:
        raise ServiceError(printable(error.what), status=_ANSWERED) from None
    except Exception as error:  # noqa: BLE001 - whatever came, the job goes on
        words = f"{where} cannot be read ({type(error).__name__})"
        raise ServiceError(words, status=_ANSWERED) from None
    if isinstance(question, str):
        difference = "" if plan.id == question else "id"
    else:
        difference = _difference(question, encode(plan.inputs))
    if difference:
        words = f"{where} is a plan for something else, {difference} differs"
        raise ServiceError(words, status=_ANSWERED)
    return plan


def _difference(asked: Mapping[str, object], given: Mapping[str, object]) -> str:
    """Return the name of an input that differs from the question, empty if none does."""
    for name, wanted in asked.items():
        answered = given.get(name)
        if isinstance(wanted, Mapping) and isinstance(answered, Mapping):
            if inner := _difference(wanted, answered):
                return f"{name}.{inner}"
        elif wanted is not None and wanted != answered:
            return name
    return ""


def _hint(error: ServiceError) -> str:
    if error.status is None:
        return "is `moetune serve` running there? MOETUNE_URL names another"
    return "set MOETUNE_TOKEN to the service's write token" if error.status in _NO_TOKEN else ""


def _report(url: str, troubles: Sequence[tuple[Question, _Answer]]) -> str:
    """Return the warning: the reasons, and the plan that the job uses for each question."""
    lines = [f"plan service {url}: {'; '.join(dict.fromkeys(a.reason for _, a in troubles))}"]
    for question, answer in troubles:
        name = question if isinstance(question, str) else canonical_json(question)
        if answer.plan is None:
            outcome = "NO PLAN, its layers run one chunk"
        else:
            outcome = f"goes on with its plan {answer.plan.id[:12]}"
        lines.append(f"{printable(name)}: {outcome}")
    lines += dict.fromkeys(answer.hint for _, answer in troubles if answer.hint)
    return "\n  ".join(lines)


def _os_words(error: OSError) -> str:
    return f"{error.filename or 'file'}: {error.strerror or error}"
