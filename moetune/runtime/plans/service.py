"""The plan service in training jobs: its plans when a job starts, or its last good plans.

`moetune.open_planbook` asks each question once, on the group's first rank. A request is bounded in
time and size, and goes to a single host. urllib's handlers of redirections and proxies are left
out, because their hosts would get the token.
"""

import http.client
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeAlias
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit

from moetune.domain.any_plan import plan_from_json
from moetune.domain.document import canonical_json, digest, encode
from moetune.domain.errors import InputError
from moetune.domain.plan import Plan
from moetune.runtime.files import replace_file

Question: TypeAlias = Mapping[str, object] | str
"""A plan's id, or some or all of a plan's `inputs` as plain values."""
NUM_TRIES = 3
TIMEOUT_SECONDS = 2.0
MAX_BYTES = 16 * 2**20
"""The size of the longest answer that is read."""

_MAX_CHARACTERS = 400
_LATER = frozenset({408, 425, 429})
_NO_TOKEN = frozenset({401, 403})
_SERVER_FAULT, _REDIRECTIONS, _ANSWERED = 500, range(300, 400), 200
_HANDLERS = (
    request.HTTPHandler, request.HTTPSHandler, request.HTTPDefaultErrorHandler,
    request.HTTPErrorProcessor,
)  # fmt: skip
_LOGGER = logging.getLogger("moetune")


class ServiceError(Exception):
    """An error for an answer that is not good; its text ends a sentence that begins with the URL.

    Args:
        status: the HTTP status; None if the answer was not complete.
    """

    def __init__(self, what: str, *, status: int | None = None) -> None:
        super().__init__(what)
        self.status = status

    @property
    def is_final(self) -> bool:
        """Whether another try would get the same answer."""
        if self.status is None or self.status in _LATER:
            return False
        return self.status < _SERVER_FAULT


class ServiceConnection:
    """A connection that sends requests to one service.

    Args:
        url: as `check_service_url` returns it.
        token: sent with every request, if any.
        timeout_seconds: limit of a request, from the look-up of the host's name to the last byte.
    """

    def __init__(
        self, url: str, token: str | None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self.url, self._timeout_seconds = url, timeout_seconds
        self._headers = {"Accept": "application/json", "User-Agent": "moetune"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._opener = request.OpenerDirector()
        for handler in _HANDLERS:
            self._opener.add_handler(handler())

    def request(self, path: str, document: object = None) -> bytes:
        """Send a document, or GET without a document, and return the body of the answer.

        A socket's timeout limits neither the look-up of a name nor a slow answer. A thread
        therefore sends the request, and ends by itself.

        Raises:
            ServiceError: no good answer came in time.
        """
        outcome: Future[bytes] = Future()

        def run() -> None:
            try:
                outcome.set_result(self._exchange(path, document))
            except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
                outcome.set_exception(error)

        try:
            threading.Thread(target=run, daemon=True, name="moetune plan service").start()
            return outcome.result(self._timeout_seconds)
        except ServiceError:
            raise
        except TimeoutError:
            raise ServiceError(f"no answer within {self._timeout_seconds:g} s") from None
        except Exception as error:  # noqa: BLE001 - whatever happened, the job goes on
            raise ServiceError(f"it cannot be asked: {printable(repr(error))}") from None

    def _exchange(self, path: str, document: object) -> bytes:
        sent, headers = None, self._headers
        if document is not None:
            sent = canonical_json(document).encode()
            headers = {**headers, "Content-Type": "application/json"}
        asked = request.Request(self.url + path, data=sent, headers=headers)  # noqa: S310 - checked before
        try:
            with self._opener.open(asked, timeout=self._timeout_seconds) as response:
                body: bytes = response.read(MAX_BYTES + 1)
                is_cut = bool(response.length)
        except HTTPError as error:
            raise _refusal(error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServiceError(_reason(error)) from None
        if len(body) > MAX_BYTES:
            raise ServiceError(f"its answer is longer than {MAX_BYTES:,} bytes", status=_ANSWERED)
        if is_cut:
            raise ServiceError("its answer was cut off")
        return body


def _refusal(error: HTTPError) -> ServiceError:
    """Return the error with the text of a problem document (RFC 9457), else the reason phrase."""
    with error:
        if error.code in _REDIRECTIONS:
            where = _host(error.headers.get("Location", ""))
            what = f"it sends elsewhere{where} ({error.code}), and redirections are not followed"
            return ServiceError(what, status=error.code)
        try:
            document = json.loads(error.read(MAX_BYTES))
        except (ValueError, RecursionError, OSError, http.client.HTTPException):
            document = None
    problem = document if isinstance(document, dict) else {}
    texts = [problem.get("detail") or problem.get("title") or error.reason, problem.get("hint")]
    words = printable("; ".join(text for text in texts if text and isinstance(text, str)))
    what = f"it answers {error.code}: {words}".removesuffix(": ")
    return ServiceError(what, status=error.code)


def _host(location: str) -> str:
    """Return the host of a redirection, without user name and password."""
    try:
        host = urlsplit(location).netloc.rpartition("@")[2]
    except ValueError:
        return ""
    return f", to {printable(host)}" if host else ""


def _reason(error: Exception) -> str:
    if isinstance(error, URLError) and isinstance(error.reason, Exception):
        error = error.reason
    if isinstance(error, TimeoutError):
        return "no answer in time"
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
        words = f"no HTTP is spoken there, but {words.strip()!r}"
    return printable(words)


def printable(text: str) -> str:
    """Return a text from the service as one short line for the log."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]} …"


class ServiceClient:
    """A plan service's client, which falls back to the last good plan for each question.

    No failure of the service, the network or the folder raises. All failures of one call are one
    warning in the log (`moetune`).

    Args:
        connection: connection to the service; its timeout limits a single try.
        cache: folder for the last good plan for each question.
        pause_seconds: between the first try and the second; the next pause is twice as long.
    """

    def __init__(
        self, connection: ServiceConnection, cache: Path, *, pause_seconds: float = 0.25
    ) -> None:
        self._connection, self._cache, self._pause_seconds = connection, cache, pause_seconds
        self._away: ServiceError | None = None

    def ask(self, questions: Sequence[Question]) -> tuple[Plan | None, ...]:
        """Return a plan for each question, or None if there is no plan.

        After a question that got no answer at all, the service is not asked again.
        """
        answers = [self._answer(question) for question in questions]
        reasons = list(dict.fromkeys(reason for _, reason, _ in answers if reason))
        if reasons:
            lines = [f"plan service {self._connection.url}: {'; '.join(reasons)}"]
            lines += [
                _outcome(question, plan)
                for question, (plan, reason, _) in zip(questions, answers, strict=True)
                if reason
            ]
            lines += dict.fromkeys(hint for _, _, hint in answers if hint)
            _LOGGER.warning("%s", "\n  ".join(lines))
        return tuple(plan for plan, _, _ in answers)

    def _answer(self, question: Question) -> tuple[Plan | None, str, str]:
        """Return a plan, what went wrong, and what to do about it."""
        file = self._cache / f"{digest(question)}.json"  # which several jobs may share
        try:
            plan = _checked(self._retried(question), question, "its answer")
        except ServiceError as error:
            plan_before, trouble = _remembered(file, question)
            return plan_before, f"{error}{trouble}", _hint(error)
        try:
            self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(file, canonical_json(plan).encode())
        except OSError as error:
            reason = f"the plan cannot be stored for use without the service: {_os_words(error)}"
            return plan, reason, "free space there, or set XDG_CACHE_HOME"
        return plan, "", ""

    def _retried(self, question: Question) -> bytes:
        """Ask up to three times; once, if the answer is final; never, if the service is away."""
        if self._away is not None:
            raise self._away
        path, document = "/v1/plans:resolve", None if isinstance(question, str) else question
        if isinstance(question, str):
            path = f"/v1/plans/{quote(question, safe='')}"
        failure = ServiceError("it was not asked")
        for attempt in range(NUM_TRIES):
            time.sleep(self._pause_seconds * attempt)
            try:
                return self._connection.request(path, document)
            except ServiceError as error:
                if error.is_final:
                    raise
                failure = ServiceError(f"{error}, {NUM_TRIES} tries", status=error.status)
        if failure.status is None:
            self._away = failure
        raise failure


def _remembered(file: Path, question: Question) -> tuple[Plan | None, str]:
    """Return the last good plan if this version can read it, else the reason why it cannot."""
    try:
        return _checked(file.read_bytes(), question, "it"), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, ServiceError) as error:
        words = str(error) if isinstance(error, ServiceError) else _os_words(error)
        return None, f"; and of the plan stored in {file}: {words}"


def _checked(text: bytes, question: Question, where: str) -> Plan:
    """Return the plan in an answer; ServiceError if it is no plan, or answers another question.

    Args:
        where: name of the answer in an error.
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
    """Return the name of an input that differs from the question; "" if none differs."""
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


def _outcome(question: Question, plan: Plan | None) -> str:
    """Return a text that says which plan the job uses for a question."""
    name = printable(question if isinstance(question, str) else canonical_json(question))
    if plan is None:
        return f"{name}: NO PLAN, its layers run one chunk"
    return f"{name}: goes on with its plan {plan.id[:12]}"


def _os_words(error: OSError) -> str:
    return f"{error.filename or 'file'}: {error.strerror or error}"
