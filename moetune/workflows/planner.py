"""Work that is asked for several times at once is done once, and everybody gets the result."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from moetune.config import Settings
from moetune.domain.errors import InputError, MoetuneError, NotFoundError, ProfileError
from moetune.domain.plan import Plan
from moetune.domain.ports import Store
from moetune.domain.profile import Profile
from moetune.workflows import wiring
from moetune.workflows.explain import Explanation, explain_from
from moetune.workflows.inputs import Question, question_of, read_inputs
from moetune.workflows.plan import make_plan
from moetune.workflows.profiles import FoundProfile, is_path, named_profile, newest_measured
from moetune.workflows.trace import Trace, trace_plan
from moetune.workflows.whatif import WhatIf, WhatIfAnswer, change_plan

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Work under way, by a key: who asks for it meanwhile waits for it, in this process.

    Nothing is kept afterwards. A key must not be asked for by the work that it stands for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, Future[T]] = {}

    def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """Return what the work returns; its error is raised to everybody who waits.

        Raises:
            MoetuneError: the thread that worked was interrupted.
        """
        with self._lock:
            leader = self._under_way.get(key)
            mine: Future[T] = Future()
            if leader is None:
                self._under_way[key] = mine
        if leader is not None:
            return _result_of(leader)
        try:
            result = work()
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            mine.set_result(result)
            return result
        finally:
            with self._lock:
                del self._under_way[key]


def _result_of(leader: Future[T]) -> T:
    error = leader.exception()
    if error is None:
        return leader.result()
    if isinstance(error, MoetuneError):
        # Of its own: threads that raise one error at once spoil each other's tracebacks.
        raise type(error)(*error.args) from error
    raise MoetuneError(
        f"the work failed that was waited for: {type(error).__name__}: {error}", "ask again"
    ) from error


MOST_KEPT = 8
_Key = tuple[str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileCache:
    """The profiles of a store, by name. Threads may share it.

    Args:
        store: read only when a profile is asked for that is not, or no longer, here.
    """

    store: Store
    _kept: OrderedDict[_Key, FoundProfile] = field(default_factory=OrderedDict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _solving: SingleFlight[FoundProfile] = field(default_factory=SingleFlight, init=False)

    def find(self, name: str) -> FoundProfile:
        """Return the current profile of that name, its digest worked out.

        Raises:
            ProfileError: nothing has that name.
        """
        key = name, self.store.current_fit(name)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        return self._solving.run(key, lambda: self._read(key))

    def _read(self, key: _Key) -> FoundProfile:
        name, fit = key
        found = named_profile(name, store=self.store)
        _ = found.digest  # worked out now, by one thread
        if self.store.current_fit(name) == fit:  # else it was read beside a change
            with self._lock:
                self._kept[key] = found
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        return found


PATIENCE_SECONDS = 5.0
"""How long a question waits for what others hold in the database."""
NUM_SOLVERS = 2
"""Plans that are made at once: one that takes long shall not stop the others, nor all answers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planner:
    """Answers questions about plans. Made by `open_planner`; threads may share it.

    Args:
        store: for writing.
        reading: the same database without the right to write.
        profile: name of what to plan with where none is asked for; None for the newest measured.
        dtype: the same; None for the profile's own choice.
    """

    store: Store
    reading: Store
    profile: str | None = None
    dtype: str | None = None
    profiles: ProfileCache = field(init=False)
    _solving: SingleFlight[Plan] = field(default_factory=SingleFlight, init=False)
    _solvers: threading.BoundedSemaphore = field(
        default_factory=partial(threading.BoundedSemaphore, NUM_SOLVERS), init=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "profiles", ProfileCache(store=self.reading))

    def resolve(self, inputs: Mapping[str, object]) -> Plan:
        """Return the plan for a plan's `inputs`, of which only `model` or `layer` is required.

        A plan that is stored is not made again. Equal questions that come at the same time are
        solved once, and all get the same answer or error.

        Raises:
            InputError: a key is unknown, or a value wrong; the text names the key.
            InfeasiblePlanError: nothing satisfies the constraints or the memory.
            ProfileError: there is no such profile, or it lacks an operation.
            StoreUnavailableError: the database is locked, full or away.
        """
        question = self._question(inputs)
        stored = self.reading.plan(question.inputs.plan_id)
        if stored is not None:
            return stored
        return self._solving.run(question.inputs.plan_id, partial(self._make, question))

    def plan(self, plan_id: str) -> Plan:
        """Return the stored plan whose id starts with `plan_id`.

        Raises:
            NotFoundError: there is none.
            InputError: there are several.
        """
        found = self.reading.plan(plan_id)
        if found is None:
            raise NotFoundError(f"no plan has an id that begins with {plan_id[:64]!r}")
        return found

    def explain(self, plan_id: str) -> Explanation:
        """Return a stored plan's terms; without its profile, only the plan, and why.

        Raises:
            NotFoundError: there is no such plan.
        """
        plan = self.plan(plan_id)
        try:
            found = self.profiles.find(plan.inputs.profile)
        except ProfileError:
            return explain_from(plan, None)
        with _sound_numbers(plan.inputs.profile):
            return explain_from(plan, found)

    def trace(self, plan_id: str) -> Trace:
        """Return the predicted timelines of a stored plan.

        Raises:
            NotFoundError: there is no such plan.
            InputError: it is for a whole model, of before such plans kept their stages.
            ProfileError: a layer's profile is gone or has changed.
        """
        plan = self.plan(plan_id)
        profile = None if plan.transformer is not None else self._profile_behind(plan)
        with _sound_numbers(plan.inputs.profile):
            trace = trace_plan(plan, profile=profile, num_ranks=None, launch=None, environ={})
        assert trace is not None  # noqa: S101 - only ranks above 0 have none
        return trace

    def whatif(self, question: WhatIf) -> WhatIfAnswer:
        """Return a plan beside the one that it would be if something were otherwise.

        Nothing is stored.

        Raises:
            NotFoundError: there is no such plan.
            InputError: the question is incomplete or wrong; the text names the key.
            InfeasiblePlanError: nothing satisfies the changed constraints or memory.
            ProfileError: the plan's profile is gone, has changed, or lacks an operation.
        """
        if (question.plan_id is None) == (not question.inputs):
            raise InputError(
                "what is to be changed is not clear", "give either the plan's id or its inputs"
            )
        if question.plan_id is not None:
            before = self.plan(question.plan_id)
            profile = self._profile_behind(before)
        else:
            asked = self._question(question.inputs)
            profile = asked.profile
            before = self.reading.plan(asked.inputs.plan_id) or self._solve(asked)
        with self._solvers, _sound_numbers(profile.name):
            return change_plan(
                before, profile=profile, changes=question.changes, speeds=question.speeds
            )

    def problems(self) -> tuple[str, ...]:
        """Return why questions cannot be answered now; empty when they can."""
        found = []
        for store in (self.store, self.reading):
            try:
                store.check_ready()
            except MoetuneError as error:
                found.append(f"{error.what}: {error.hint}" if error.hint else error.what)
        return tuple(dict.fromkeys(found))

    def _question(self, inputs: Mapping[str, object]) -> Question:
        asked = read_inputs(inputs)
        found = self._find_profile(asked.profile)
        return question_of(
            asked, profile=found.profile, fingerprint=found.digest, default_dtype=self.dtype
        )

    def _find_profile(self, name: str | None) -> FoundProfile:
        return self.profiles.find(name or self.profile or newest_measured(self.reading))

    def _profile_behind(self, plan: Plan) -> Profile:
        found = self.profiles.find(plan.inputs.profile)
        if found.digest != plan.inputs.profile_fingerprint:
            raise ProfileError(
                f"profile {plan.inputs.profile!r} of plan {plan.id[:6]} has changed since",
                "make the plan again",
            )
        return found.profile

    def _make(self, question: Question) -> Plan:
        # Somebody may have stored it between the look-up and the flight.
        stored = self.reading.plan(question.inputs.plan_id)
        if stored is not None:
            return stored
        plan = self._solve(question)
        self.store.save_plan(plan)
        return plan

    def _solve(self, question: Question) -> Plan:
        with self._solvers, _sound_numbers(question.profile.name):
            return make_plan(question.request, profile=question.profile)


@contextmanager
def open_planner(settings: Settings) -> Iterator[Planner]:
    """Open the database of the settings, or make it, for as long as the context lasts.

    Raises:
        InputError: the setting `profile` is a file.
        SchemaMismatchError: the database has another schema.
        MoetuneError: it cannot be opened, or made.
    """
    if settings.profile is not None and is_path(settings.profile):
        raise InputError(
            f"the setting profile is the file {settings.profile}: whoever asks for a plan finds "
            "only what the store has",
            f"import it with `moetune profiles import {settings.profile}`, and name it",
        )
    with (
        wiring.open_store(settings, patience_seconds=PATIENCE_SECONDS) as store,
        wiring.open_store(settings, read_only=True, patience_seconds=PATIENCE_SECONDS) as reading,
    ):
        yield Planner(store=store, reading=reading, profile=settings.profile, dtype=settings.dtype)


@contextmanager
def _sound_numbers(profile: str) -> Iterator[None]:
    """Say whose numbers are to blame where arithmetic fails: profiles come from strangers.

    Raises:
        ProfileError: something overflowed, or was no number.
    """
    try:
        yield
    except (ArithmeticError, ValueError) as error:
        raise ProfileError(
            f"profile {profile!r} has numbers that nothing can be computed from: {error}",
            "look at it with `moetune profiles show`, and measure it again",
        ) from error
