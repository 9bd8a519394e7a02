"""Every error a user can meet, as one tree.

MoetuneError                    1  something failed
├── AllocationError             1  there is no memory for a step's buffers
├── AbandonedError              1  nobody waits for an answer any more
├── BusyError                   1  too many questions wait already; a later try may succeed
├── SolveLimitError             1  an answer takes more time or memory than it may
├── CollectiveError             1  a collective failed or a rank died
├── RankMismatchError           1  ranks disagree on a plan, a shape or a dtype
├── StoreUnavailableError       1  the database is locked, full or away
│   └── BadStoreError           2  there is no database, or it is damaged; an InputError, too
├── InputError                  2  a file, flag, unit, model or key is wrong
│   └── NotFoundError           2  there is no plan with that id
├── InfeasiblePlanError         3  no plan satisfies the constraints
│   └── PricedPlanError         3  a layout that cannot run, with its predicted plan:
│       ├── LayoutTooLargeError 3    it does not fit into the memory
│       └── RefusedLayoutError  3    the runtime would refuse it at start
├── NotAuthorisedError          4  a token is missing or wrong
├── ProfileError                5  a profile or a measurement is missing or stale
├── QualityError                6  measurements or predictions fail the gate
└── SchemaMismatchError         7  the database has another schema

The number is the exit code of the command line. Arguments are positional so that errors
survive pickling between ranks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar


class MoetuneError(Exception):
    """Base of all errors: a problem and the next step.

    Args:
        what: the problem, with the object's name and its value.
        hint: the next step, often a command; empty when there is none.
        field: the question's field that is wrong, such as "memory_limit"; empty if none is. Texts
            name fields as flags: see `domain.spelling`.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, hint: str = "", *, field: str = "") -> None:
        super().__init__(what, hint)
        self.what = what
        self.hint = hint
        self.field = field

    def __str__(self) -> str:
        return f"{self.what}\n  {self.hint}" if self.hint else self.what


class AllocationError(MoetuneError):
    """No memory for a step's buffers: the text names the buffers and their size.

    The layer keeps its state from before the step, and a smaller step can follow.
    """


class AbandonedError(MoetuneError):
    """A question is not answered: its caller has hung up, or the service ends."""


class BusyError(MoetuneError):
    """Too many questions wait already; the same question may be answered later."""


class SolveLimitError(MoetuneError):
    """An answer takes more time or memory than the service allows for a question."""


class CollectiveError(MoetuneError):
    """A collective failed: the text names it, its chunk and the rank that saw it."""


class RankMismatchError(MoetuneError):
    """Ranks disagree; the same error is raised on every rank."""


class InputError(MoetuneError):
    """A file, flag, unit, model or key that cannot be used."""

    exit_code = 2


def check_positive(owner: object, *names: str) -> None:
    """Raise InputError if an attribute of the owner is below 1; None passes."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")


class MissingPackageError(MoetuneError):
    """A package is missing that only some commands need; the hint has the line that installs it."""


class NotFoundError(InputError):
    """Nothing has the given id."""


class StoreUnavailableError(MoetuneError):
    """The database is locked, full or away: the same request may succeed later.

    Nothing was written, unless the text says that it is not known.
    """


class BadStoreError(StoreUnavailableError, InputError):
    """The address holds no database of moetune, or the database is damaged."""

    exit_code = 2


class InfeasiblePlanError(MoetuneError):
    """No plan satisfies the constraints; the text names the constraint that binds."""

    exit_code = 3


class PricedPlanError(InfeasiblePlanError):
    """A layout that cannot run, with its predicted plan.

    Args:
        plan: the document that `moetune plan --json` would have printed; None if its times are
            not known.
    """

    def __init__(
        self,
        what: str,
        hint: str = "",
        plan: Mapping[str, object] | None = None,
        *,
        field: str = "",
    ) -> None:
        super().__init__(what, hint, field=field)
        self.plan = plan


class LayoutTooLargeError(PricedPlanError):
    """A layout that does not fit into the memory."""


class RefusedLayoutError(PricedPlanError):
    """A pinned layout that the runtime would refuse; the text names the rule and its source."""


class NotAuthorisedError(MoetuneError):
    """A token is missing or wrong."""

    exit_code = 4


class ProfileError(MoetuneError):
    """A profile or one of its measurements is missing or stale."""

    exit_code = 5


class QualityError(MoetuneError):
    """Measurements or predictions fail the quality gate."""

    exit_code = 6


class SchemaMismatchError(MoetuneError):
    """The database has another schema than this version."""

    exit_code = 7


EXTRAS: Mapping[str, str] = {
    "torch": "train",
    "transformers": "transformers",
    "accelerate": "transformers",
    "safetensors": "transformers",
    "fastapi": "serve",
    "httptools": "serve",
    "prometheus_client": "serve",
    "uvicorn": "serve",
    "jinja2": "report",
    "psycopg": "postgres",
}
"""Extra by the name that Python imports; `pyproject.toml` lists the distributions."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Raise MissingPackageError, with the install command, if an import that `what` needs fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise MissingPackageError(
            f"{what} needs {package}, which is not installed",
            f"run `pip install 'moetune[{EXTRAS[package]}]'`",
        ) from None
