"""Comparison of machines, numbers of GPUs and runtimes: each best plan, and what it costs."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from moetune.app.planner import Planner, plan_model
from moetune.app.requests import is_of_model
from moetune.app.solvers import SolverLimits, SolverPool
from moetune.domain.budget import Budget
from moetune.domain.errors import (
    InfeasiblePlanError,
    InputError,
    LayoutTooLargeError,
    MoetuneError,
    ProfileError,
)
from moetune.domain.profile import Profile
from moetune.domain.question import Question
from moetune.domain.records import ObservedRun
from moetune.domain.training_document import TrainingDocument

MOST_CHOICES = 64
_PATIENCE = SolverLimits(seconds=3600.0, memory_bytes=2**42, num_waiting=MOST_CHOICES)
_WORDS: tuple[tuple[type[MoetuneError], str], ...] = (
    (LayoutTooLargeError, "too large"), (InfeasiblePlanError, "refused"), (InputError, "refused"),
    (ProfileError, "no times"), (MoetuneError, "failed"),
)  # fmt: skip
"""Why a choice has no plan: the word of the first error class that matches."""
_Asked = tuple[Profile, Sequence[ObservedRun], Question]
Advance = Callable[["Choice"], None]
"""Function that takes each choice when it is solved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A number of a machine's GPUs under a runtime: its best plan, or why there is none."""

    profile: str
    world_size: int
    target: str
    plan: TrainingDocument | None = None
    refusal: MoetuneError | None = None

    @property
    def name(self) -> str:
        """The machine, its GPUs and the runtime, for a sentence."""
        return f"{self.profile}, {self.world_size:,} GPUs, {self.target}"

    @property
    def days(self) -> float:
        """Days of the whole training; infinity without a plan."""
        return inf if self.plan is None or self.plan.run is None else self.plan.run.days.predicted

    @property
    def money(self) -> float:
        """Cost of the whole training, or its GPU-hours without a price; infinity without a plan."""
        if self.plan is None or self.plan.run is None:
            return inf
        return (self.plan.run.cost or self.plan.run.gpu_hours).predicted

    @property
    def word(self) -> str:
        """The reason for no plan, in a word or two; "" with a plan."""
        words = (word for kind, word in _WORDS if isinstance(self.refusal, kind))
        return next(words, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Choices in the order in which they were asked for.

    Args:
        question: the question without machine, ranks and runtime.
        has_prices: whether `money` is a cost, and not GPU-hours.
    """

    question: Question
    budget: Budget
    has_prices: bool
    choices: tuple[Choice, ...]

    @property
    def solved(self) -> tuple[Choice, ...]:
        """Choices that have a plan, the shortest training first."""
        solved = (choice for choice in self.choices if choice.plan is not None)
        return tuple(sorted(solved, key=lambda choice: choice.days))

    def better_than(self, choice: Choice) -> Choice | None:
        """Return the cheapest choice that dominates this choice in days and money, else None."""
        here = choice.days, choice.money
        better = (
            rival for rival in self.solved
            if choice.plan is not None and (rival.days, rival.money) != here
            and rival.days <= choice.days and rival.money <= choice.money
        )  # fmt: skip
        return min(better, key=lambda rival: rival.money, default=None)


def compare_machines(
    planner: Planner, question: Question, *, profiles: Sequence[str], world_sizes: Sequence[int],
    targets: Sequence[str], prices: Mapping[str, float], advance: Advance,
) -> Comparison:  # fmt: skip
    """Return the best plan of each profile, number of ranks and runtime.

    Args:
        question: for a whole model, with the tokens of its training.
        prices: price of a GPU-hour by profile; empty without prices.
        advance: called with each choice when it is solved.

    Raises:
        InputError: there are too many choices, or the question is not for a whole model.
        MoetuneError: all choices fail for the same reason.
    """
    if question.budget is None or not is_of_model(question):
        raise InputError("machines are compared by a whole model's training", "name such a model")
    asked = [*product(dict.fromkeys(profiles), dict.fromkeys(targets), dict.fromkeys(world_sizes))]
    if not 0 < len(asked) <= MOST_CHOICES:
        raise InputError(
            f"{len(asked)} choices are {'more than ' + str(MOST_CHOICES) if asked else 'too few'}",
            "name a machine and a number of GPUs, and fewer than that of each combined",
        )
    machines = {name: planner.sources.profile(name, for_models=True).profile for name in profiles}
    runs = {
        name: () if question.uncalibrated else planner.sources.observed_runs(machine)
        for name, machine in machines.items()
    }
    questions = [
        (
            machines[name], runs[name],
            replace(question, target=target, world_size=size, price=prices.get(name)),
        )
        for name, target, size in asked
    ]  # fmt: skip
    choices = tuple(_solved(planner, questions, advance))
    reasons = {(choice.word, str(choice.refusal)) for choice in choices}
    if len(reasons) == 1 and choices[0].refusal is not None:
        raise choices[0].refusal
    return Comparison(
        question=question, budget=question.budget, has_prices=bool(prices), choices=choices
    )


def _solved(planner: Planner, questions: Sequence[_Asked], advance: Advance) -> Iterator[Choice]:
    """Yield the choices in their order, solved in a process for each core."""
    num_processes = min(len(questions), len(os.sched_getaffinity(0)))
    with (
        closing(SolverPool(_PATIENCE, num_processes=num_processes)) as pool,
        ThreadPoolExecutor(num_processes) as threads,
    ):
        solving = replace(planner, solver=pool)
        asked = [threads.submit(_choice, solving, *question) for question in questions]
        try:
            for done in as_completed(asked):
                advance(done.result())
        except BaseException:
            pool.close()  # running solves end at once
            threads.shutdown(cancel_futures=True)
            raise
        yield from (done.result() for done in asked)


def _choice(
    planner: Planner, profile: Profile, runs: Sequence[ObservedRun], question: Question
) -> Choice:
    plan = refusal = None
    try:
        plan = planner.run(profile.name, plan_model, question, profile, runs, with_savings=False)
    except MoetuneError as error:
        refusal = error
    return Choice(
        profile=profile.name, world_size=question.world_size or 0, target=question.target or "",
        plan=plan, refusal=refusal,
    )  # fmt: skip
