"""A plan of either kind as questions see it: its choice, priced again with its profile."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from moetune.domain.layer import Workload
from moetune.domain.plan import Decision
from moetune.domain.profile import Profile
from moetune.domain.training_document import AnyPlan
from moetune.fit.slowed import Slowdown
from moetune.solve.trace import TraceSpan
from moetune.workflows.compared import Asked, ComparedChoice, Refusal, WhyNot

Kind = Literal["layer", "model"]
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class LostChoice:
    """A candidate as far as a plan keeps it, and why it lost; "" where its parts say it."""

    choice: ComparedChoice
    lost_because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instead:
    """The best with what is asked pinned.

    Args:
        choice: None where a rule refuses it.
        refused: by which rule, or why it does not fit; None where it does.
        probability_faster: that it is faster than the plan's own; None where it is refused.
        notes: what has to be known about these numbers.
    """

    choice: ComparedChoice | None = None
    refused: Refusal | None = None
    probability_faster: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """One decision of the plan, moved.

    Args:
        knob: the flag of the decision.
        choice: in words.
        step_seconds: None where it cannot be had.
        note: why it cannot be had, or that it does not fit.
    """

    knob: str
    choice: str
    step_seconds: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timelines:
    """What a plan predicts of one step, over time.

    Args:
        processes: bars of each process, by its name.
        overlap: shares of the communication behind computation, forward and backward; None for
            models.
        notes: what is left out.
    """

    processes: tuple[tuple[str, Sequence[TraceSpan]], ...]
    overlap: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A step that this machine can run: a layer with its decision."""

    workload: Workload
    decision: Decision


class Subject(Protocol):
    """A plan, and the profile that it was made with; None where that is not there.

    What is priced needs the profile. A profile may lack an operation: that is a `ProfileError`.
    """

    @property
    def kind(self) -> Kind:
        """Whether it is of one layer or of a whole model."""
        ...

    @property
    def plan(self) -> AnyPlan:
        """The plan."""
        ...

    @property
    def profile(self) -> Profile | None:
        """The profile behind the plan."""
        ...

    @property
    def choice(self) -> ComparedChoice:
        """The plan's own choice, as the plan has it."""
        ...

    @property
    def alternatives(self) -> Sequence[LostChoice]:
        """The candidates that the plan keeps."""
        ...

    @property
    def memory_limit_bytes(self) -> int | None:
        """Memory of one device that the choice may take; None where it is not known."""
        ...

    @property
    def rule(self) -> str:
        """By which a plan may leave a faster choice."""
        ...

    @property
    def document(self) -> Mapping[str, object]:
        """The JSON document of `moetune explain` and of the service."""
        ...

    def asked(self, question: WhyNot) -> Asked:
        """Return what is asked of the plan.

        Raises:
            InputError: a value is none that it could have, or the plan has no such choice.
        """
        ...

    def instead(self, asked: Asked) -> Instead:
        """Return the best with what is asked pinned."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of the machine that may count."""
        ...

    def seconds(self, slowdown: Slowdown | None = None) -> float:
        """Return the step of the plan's own choice, of the machine or of a slower one."""
        ...

    def neighbours(self) -> Iterator[Neighbour]:
        """Yield the plan's decisions, each moved, and the best choice with a GiB more memory."""
        ...

    def timelines(self) -> Timelines:
        """Return the predicted step over time."""
        ...

    @property
    def run_step(self) -> RunStep:
        """The step that this machine can run.

        Raises:
            InputError: only another runtime runs it.
        """
        ...
