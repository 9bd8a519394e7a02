"""Planner of the command line and the service: resolve a request, explain, trace, what-if.

It looks profiles and plans up in its `PlanSources`, has `app.plan` solve, and returns values
that `app.views` turns into sections.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from moetune.app.compared import WhyNot, WhyNotAnswer
from moetune.app.plan import CompleteRequest, NewPlan, make_plan, read_inputs, sound_numbers
from moetune.app.requests import is_of_model, layer_request, training_request
from moetune.app.sensitivity import Sensitivity, sensitivity_of
from moetune.app.solvers import SingleFlight, Solver, ThreadSolver
from moetune.app.sources import PlanSources
from moetune.app.subjects import Subject, subject_of
from moetune.app.trace import Trace, predicted_trace
from moetune.app.training import plan_training
from moetune.app.why_not import answer_why_not
from moetune.config import Settings
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import AbandonedError, ProfileError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.question import Question
from moetune.domain.request import PlanRequest
from moetune.domain.spelling import AS_KEYS, spelled
from moetune.domain.training_document import TrainingDocument

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planner:
    """Planning over a source of profiles and plans; threads may share it.

    Args:
        sources: profiles and plans, and the store of new plans.
        settings: of questions and inputs that leave something open; None for the defaults.
        solver: runs what solves or computes.
    """

    sources: PlanSources
    settings: Settings | None = None
    solver: Solver = field(default_factory=ThreadSolver)
    _solving: SingleFlight[Plan] = field(default_factory=SingleFlight, init=False)

    def resolve(self, inputs: Mapping[str, object]) -> Plan:
        """Return the plan for a plan's `inputs`, of which only `model` or `layer` is required.

        A stored plan is not solved for again. Equal requests that come at the same time are solved
        once, and all of them get the same answer or error.

        Raises:
            InputError: a key is unknown, or a value wrong; the message names the key.
            InfeasiblePlanError: nothing satisfies the constraints or the memory limit.
            ProfileError: there is no such profile, or it lacks an operation.
            StoreUnavailableError: the database is locked, full or unreachable.
        """
        request = self._read(inputs)
        stored = self.sources.stored(request.inputs.plan_id)
        if stored is not None:
            return stored
        while True:
            mine = partial(self._make, request)
            try:
                return self._solving.run(request.inputs.plan_id, mine)
            except AbandonedError as error:
                # Raised again in all that waited for it: who still waits asks anew.
                if error.__cause__ is None:
                    raise

    def known(self, inputs: Mapping[str, object]) -> Plan | None:
        """Return the stored plan for a plan's `inputs`; None where it has to be solved for.

        Raises:
            InputError, ProfileError, StoreUnavailableError: as of `resolve`.
        """
        return self.sources.stored(self._read(inputs).inputs.plan_id)

    def ask(self, question: Question, profile: str | None = None) -> NewPlan:
        """Solve for the plan of a layer or of a whole model's training; nothing is stored.

        Args:
            profile: its name; None for the default one.

        Raises:
            InputError: a value is wrong, or one is missing.
            InfeasiblePlanError: nothing satisfies the pins or the memory limit.
            ProfileError: there is no such profile, or it lacks an operation.
        """
        if not is_of_model(question):
            complete = self._complete(layer_request(question, self.settings), profile)
            return NewPlan(plan=self._solve(complete), found=complete.found)
        found = self.sources.profile(profile, for_models=True)
        plan = self.run(found.profile.name, _plan_model, question, found.profile)
        return NewPlan(plan=plan, found=found)

    def plan(self, wanted: str) -> Plan:
        """Return the plan of an id or its beginning; on the command line also of a file.

        Raises:
            NotFoundError: a service has none.
            InputError: there is none, or there are several.
        """
        return self.sources.plan(wanted).as_layer()

    def explain(self, plan: AnyPlan, *, model: str | None = None) -> Subject:
        """Return a plan with its profile; where that is missing or has changed, with the reason.

        Args:
            model: the `config.json` of a training plan whose model has no name.

        Raises:
            ProfileError: `--profile` names another profile.
        """
        try:
            found = self.sources.profile_of(plan)
        except ProfileError:
            if self.sources.must_match:
                raise
            missing = f"profile {plan.inputs.profile!r} was not found, name it with --profile"
            return subject_of(plan, missing=missing, model=model)
        if found.digest == plan.inputs.profile_fingerprint:
            return subject_of(plan, profile=found.profile, model=model)
        name = f"profile {found.profile.name!r}"
        missing = f"{name} is not the one that the plan was made with, or has changed since"
        subject = subject_of(plan, missing=missing, model=model)
        if self.sources.must_match:
            _ = subject.machine  # which says so
        return subject

    def why_not(self, plan: AnyPlan, question: WhyNot, *, model: str | None = None) -> WhyNotAnswer:
        """Return another choice beside a plan's own (`answer_why_not`)."""
        return self._ask(plan, model, answer_why_not, question)

    def sensitivity(self, plan: AnyPlan, *, model: str | None = None) -> Sensitivity:
        """Return what a plan's step follows (`sensitivity_of`)."""
        return self._ask(plan, model, sensitivity_of)

    def trace(self, plan: AnyPlan, *, model: str | None = None) -> Trace:
        """Return a plan's predicted timelines (`predicted_trace`)."""
        return self._ask(plan, model, predicted_trace)

    def _ask(
        self, plan: AnyPlan, model: str | None,
        question: Callable[Concatenate[Subject, P], T], *args: P.args, **kwargs: P.kwargs,
    ) -> T:  # fmt: skip
        subject = self.explain(plan, model=model)
        return self.run(plan.inputs.profile, question, subject, *args, **kwargs)

    def drafted(self, inputs: Mapping[str, object]) -> Plan:
        """Return the stored plan for a plan's `inputs`, else solve for it and store nothing.

        Raises:
            MoetuneError: as of `resolve`.
        """
        complete = self._read(inputs)
        return self.sources.stored(complete.inputs.plan_id) or self._solve(complete)

    def profile_behind(self, plan: AnyPlan) -> Profile:
        """Return the profile that a plan was made with.

        Raises:
            ProfileError: it is missing, or has changed.
        """
        return self.explain(plan).machine

    def profile_if_known(self, plan: AnyPlan) -> Profile | None:
        """Return the profile that a plan was made with; None where it is missing or has changed.

        Raises:
            ProfileError: `--profile` names another profile.
        """
        return self.explain(plan).profile

    def _read(self, inputs: Mapping[str, object]) -> CompleteRequest:
        dtype = None if self.settings is None else self.settings.dtype
        with spelled(AS_KEYS):
            document = read_inputs(inputs)
            complete = self._complete(document.request(default_dtype=dtype), document.profile)
        document.check(complete.inputs)
        return complete

    def _complete(self, request: PlanRequest, profile: str | None = None) -> CompleteRequest:
        request.check_sizes()
        found = self.sources.profile(profile)
        inputs = request.inputs_for(found.profile, fingerprint=found.digest)
        return CompleteRequest(request=request, inputs=inputs, found=found)

    def _make(self, complete: CompleteRequest) -> Plan:
        # Another process, or an earlier call of this key, may have stored it since the look-up.
        stored = self.sources.stored(complete.inputs.plan_id)
        if stored is not None:
            return stored
        plan = self._solve(complete)
        self.sources.save(plan)
        return plan

    def _solve(self, complete: CompleteRequest) -> Plan:
        profile, fingerprint = complete.found.profile, complete.found.digest
        return self.run(
            profile.name, make_plan, complete.request, profile=profile, fingerprint=fingerprint
        )

    def run(
        self, profile: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the result of a function that computes with a profile's numbers.

        Raises:
            MoetuneError: of the function, of the solver's limits, or of the profile's numbers.
        """
        return self.solver.run(_soundly, profile, partial(function, *args, **kwargs))


def _plan_model(question: Question, profile: Profile) -> TrainingDocument:
    request = training_request(question, profile)
    return plan_training(request, profile, with_front=question.front, with_savings=True)


def _soundly(profile: str, work: Callable[[], T]) -> T:
    with sound_numbers(profile):
        return work()
