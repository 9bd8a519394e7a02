"""Planners of the command line and the service: they resolve, explain and change requests.

A planner looks up profiles and plans in its sources, solves with `app.plan` or `app.training`, and
returns values that `app.views` turns into sections.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Concatenate, NamedTuple, ParamSpec, TypeVar

from moetune.app import wiring
from moetune.app.plan import inputs_sent, layer_inputs, plan_for, read_inputs, sound_numbers
from moetune.app.profiles import ResolvedProfile, is_path
from moetune.app.requests import is_of_model, layer_question, training_request
from moetune.app.sensitivity import sensitivity_of
from moetune.app.solvers import SolverPool, Turns
from moetune.app.sources import Sources, StoredSources
from moetune.app.subjects import Subject, WhyNot, subject_of
from moetune.app.trace import Trace, predicted_trace
from moetune.app.training import plan_training
from moetune.app.why_not import answer_why_not
from moetune.config import Settings
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import InputError, MoetuneError, ProfileError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.question import Question
from moetune.domain.records import ObservedRun
from moetune.domain.request import PlanInputs
from moetune.domain.spelling import AS_KEYS, spelled
from moetune.domain.training_document import TrainingDocument
from moetune.report.sensitivity import Sensitivity
from moetune.report.why_not import WhyNotAnswer

if TYPE_CHECKING:
    from moetune.store import SqlStore

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE_SECONDS = 5.0
"""Longest wait of the service for a lock on the database."""


class NewPlan(NamedTuple):
    """A new plan and the profile that it was made with."""

    plan: AnyPlan
    machine: ResolvedProfile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planner:
    """Planning with profiles and plans of its sources; threads may share it.

    Args:
        sources: profiles and plans, and the store of new plans.
        settings: answers that questions leave open; None for the defaults.
        solver: processes that solve and compute; None to solve in the calling threads.
    """

    reads_files: ClassVar[bool] = True
    """Whether a question may name files of this machine."""

    sources: Sources
    settings: Settings | None = None
    solver: SolverPool | None = None
    _turns: Turns = field(default_factory=Turns, init=False)

    def resolve(self, inputs: Mapping[str, object]) -> Plan:
        """Return the plan for a plan's `inputs`, of which only `model` or `layer` is required.

        A stored plan is not solved again. Of equal requests at the same time the first solves, and
        the others wait for its plan.

        Raises:
            InputError: a key is unknown, or a value wrong; the message names the key.
            InfeasiblePlanError: nothing satisfies the constraints or the memory limit.
            ProfileError: there is no such profile, or it lacks an operation.
            StoreUnavailableError: the database is locked, full or unreachable.
        """
        complete, profile = self._read(inputs)
        with self._turns.of(complete.plan_id):
            plan = self.sources.stored(complete.plan_id)
            if plan is None:
                plan = self._solve(complete, profile)
                self.sources.save(plan)
            return plan

    def stored(self, inputs: Mapping[str, object]) -> Plan | None:
        """Return the stored plan for `inputs`, else None; errors: see `resolve`."""
        complete, _ = self._read(inputs)
        return self.sources.stored(complete.plan_id)

    def draft(self, inputs: Mapping[str, object]) -> Plan:
        """Return the plan for `inputs`, stored or solved; store nothing; errors: see `resolve`."""
        complete, profile = self._read(inputs)
        return self.sources.stored(complete.plan_id) or self._solve(complete, profile)

    def ask(self, question: Question, profile: str | None = None) -> NewPlan:
        """Solve for the plan of a layer or of a whole model's training; nothing is stored.

        Args:
            profile: its name; None for the default profile.

        Raises:
            InputError: a value is wrong or missing.
            InfeasiblePlanError: nothing satisfies the pins or the memory limit.
            ProfileError: there is no such profile, or it lacks an operation.
        """
        if is_of_model(question):
            machine = self.sources.profile(profile, for_models=True)
            used = machine.profile
            runs = () if question.uncalibrated else self.sources.observed_runs(used)
            plan = self.run(used.name, plan_model, question, used, runs)
            return NewPlan(plan, machine)
        question = layer_question(question, self.settings)
        machine = self.sources.profile(profile)
        inputs = layer_inputs(question, machine.profile)
        return NewPlan(self._solve(inputs, machine.profile), machine)

    def explain(self, plan: AnyPlan, *, model: str | None = None) -> Subject:
        """Return a plan with its profile, or with the reason why the profile is missing.

        Raises:
            ProfileError: `--profile` names another profile.
        """
        try:
            current = self.sources.profile_of(plan).profile
        except ProfileError:
            if self.sources.must_match:
                raise
            missing = f"there is no profile {plan.inputs.profile!r}, name it with --profile"
            return subject_of(plan, missing=missing, model=model)
        if current.digest == plan.inputs.profile_fingerprint:
            return subject_of(plan, profile=current, model=model)
        name = f"profile {current.name!r}"
        missing = f"{name} is not the plan's profile, or has changed since"
        subject = subject_of(plan, missing=missing, model=model)
        if self.sources.must_match:
            _ = subject.machine  # which says so
        return subject

    def why_not(self, plan: AnyPlan, question: WhyNot, *, model: str | None) -> WhyNotAnswer:
        """Return another choice next to the plan's choice (`answer_why_not`)."""
        return self._ask(plan, model, answer_why_not, question)

    def sensitivity(self, plan: AnyPlan, *, model: str | None) -> Sensitivity:
        """Return the machine's parts and decisions that change a plan's step (`sensitivity_of`)."""
        return self._ask(plan, model, sensitivity_of)

    def trace(self, plan: AnyPlan, *, model: str | None = None) -> Trace:
        """Return a plan's predicted timelines (`predicted_trace`)."""
        return self._ask(plan, model, predicted_trace)

    def run(
        self, profile: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return `function`'s result, computed by the solver; errors: see `SolverPool.run`."""
        work = partial(function, *args, **kwargs)
        if self.solver is None:
            return _soundly(profile, work)
        return self.solver.run(_soundly, profile, work)

    def _ask(
        self, plan: AnyPlan, model: str | None,
        question: Callable[Concatenate[Subject, P], T], *args: P.args, **kwargs: P.kwargs,
    ) -> T:  # fmt: skip
        subject = self.explain(plan, model=model)
        return self.run(plan.inputs.profile, question, subject, *args, **kwargs)

    def _read(self, inputs: Mapping[str, object]) -> tuple[PlanInputs, Profile]:
        """Return the inputs with every default filled in, and the profile to plan with."""
        with spelled(AS_KEYS):
            question, sent = read_inputs(inputs)
            if question.dtype is None and self.settings is not None:
                question = replace(question, dtype=self.settings.dtype)
            profile = self.sources.profile(sent.profile).profile
            return inputs_sent(question, sent, profile), profile

    def _solve(self, inputs: PlanInputs, profile: Profile) -> Plan:
        return self.run(profile.name, plan_for, inputs, profile)


def plan_model(
    question: Question, profile: Profile, runs: Sequence[ObservedRun], *, with_savings: bool = True
) -> TrainingDocument:
    """Return the plan of a whole model's training.

    Args:
        runs: runs observed with the profile, which calibrate its times.
        with_savings: also compute what single flags and all pins cost.

    Raises:
        MoetuneError: see `plan_training`.
    """
    request = training_request(question, profile)
    request = replace(request, runs=tuple(runs))
    return plan_training(request, profile, with_front=question.front, with_savings=with_savings)


def _soundly(profile: str, work: Callable[[], T]) -> T:
    with sound_numbers(profile):
        return work()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServicePlanner(Planner):
    """A planner with open stores, whose rows the service also lists and writes.

    Args:
        reading: the same database as `store`, opened read-only.
    """

    reads_files: ClassVar[bool] = False

    store: "SqlStore"
    reading: "SqlStore"

    def problems(self) -> tuple[str, ...]:
        """Return the reasons why the database cannot be used now; empty when it can."""
        problems = []
        for store in (self.store, self.reading):
            try:
                store.check_ready()
            except MoetuneError as error:
                problems.append(f"{error.what}: {error.hint}" if error.hint else error.what)
        return tuple(dict.fromkeys(problems))


@contextmanager
def open_planner(
    settings: Settings, *, solver: SolverPool | None = None
) -> Iterator[ServicePlanner]:
    """Open the service's planner; create the database if there is none.

    Raises:
        InputError: the setting `profile` is a file.
        MoetuneError: the store cannot be opened, upgraded or made.
    """
    if settings.profile is not None and is_path(settings.profile):
        raise InputError(
            f"the setting profile is the file {settings.profile}, and the service plans only with "
            "profiles of the store",
            f"import it with `moetune profiles import {settings.profile}`, and name it",
        )
    with (
        wiring.open_store(settings, patience_seconds=PATIENCE_SECONDS) as store,
        wiring.open_store(settings, read_only=True, patience_seconds=PATIENCE_SECONDS) as reading,
    ):
        sources = StoredSources(store=store, reading=reading, default_profile=settings.profile)
        yield ServicePlanner(
            sources=sources, settings=settings, solver=solver, store=store, reading=reading,
        )  # fmt: skip


@contextmanager
def local_planner(
    settings: Settings, *, profile: str | Profile | None = None, saves: bool = False
) -> Iterator[Planner]:
    """Open the command line's planner: it also reads files, and opens the store when needed.

    Args:
        profile: file, name or the profile itself; None for the setting's profile with new plans,
            and for the profile of a stored plan.
        saves: store new plans; create the database if there is none.

    Raises:
        MoetuneError: the store cannot be opened, upgraded or made.
    """
    with ExitStack() as stack:
        store = stack.enter_context(wiring.open_store(settings)) if saves else None
        stores = (
            partial(wiring.find_store, settings, is_needed=False)
            if store is None
            else partial(nullcontext, store)
        )
        sources = Sources(
            stores=stores, store=store, named=profile, default_profile=settings.profile
        )
        yield Planner(sources=sources, settings=settings)


def plan_question(
    question: Question, settings: Settings, *, profile: str | Profile | None, save: bool
) -> NewPlan:
    """Return the plan of a layer or of a whole model's training, and its profile.

    Arguments and errors are those of `local_planner` and of `Planner.ask`.
    """
    with local_planner(settings, profile=profile, saves=save) as planner:
        planned = planner.ask(question)
        planner.sources.save(planned.plan)
    return planned
