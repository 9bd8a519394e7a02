"""Explanations: a plan with the terms behind its predicted times.

Used by `Planner.explain`, between the look-up of plan and profile and `views.explanation`.
"""

from dataclasses import dataclass

from moetune.domain.document import encode
from moetune.domain.plan import LayerTerms, PhaseTerms, Plan, StrategyTerms
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.solve.layer.plan import SolvedPlan
from moetune.solve.layer.strategies import rank_layer
from moetune.solve.predict import plan_step
from moetune.workflows.compared import is_same_step

EXPLANATION_SCHEMA = "moetune.explanation/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan with the terms behind it.

    Args:
        forward, backward: terms of the phases; None where neither plan nor profile has them.
        strategies: every memory strategy with its best degrees; empty where the layout leaves no
            choice, or the terms are missing.
        profile: the one that the plan was made with; None where it was not found.
        note: what cannot be shown, and why; empty where everything can.
    """

    plan: Plan
    forward: PhaseTerms | None
    backward: PhaseTerms | None
    strategies: tuple[StrategyTerms, ...]
    profile: Profile | None
    note: str

    @property
    def memory_limit_bytes(self) -> int | None:
        """Memory limit of one device, less what the rest of the model takes; None if not known.

        The plan's, else what plans may fill of the profile's.
        """
        inputs = self.plan.inputs
        known = self.profile.machine.plannable_bytes if self.profile else None
        limit = inputs.memory_limit_bytes or known
        return limit and limit - inputs.pinned.memory_taken_bytes

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune explain` and of the service."""
        plain = encode(self)
        del plain["profile"]
        return {"schema": EXPLANATION_SCHEMA, **plain}


def explain_plan(plan: Plan, *, profile: Profile | None, missing: str = "") -> Explanation:
    """Return the plan with its terms; a plan of schema 1 holds none, and is solved again for them.

    Args:
        profile: the one that the plan was made with; None where it was not found.
        missing: why it was not found, for the note.

    Raises:
        ProfileError: the profile lacks an operation of the plan.
    """
    terms = plan.terms
    note = f"{missing}: the timeline cannot be drawn" if profile is None else ""
    if terms is None and profile is not None:
        terms = _terms_of_schema_1(plan, profile)
        missing = "this version of moetune would make another plan"
    if terms is None:
        note = f"{missing}: the terms behind the times cannot be shown"
    return Explanation(
        plan=plan,
        forward=terms.forward if terms else None,
        backward=terms.backward if terms else None,
        strategies=terms.strategies if terms else (),
        profile=profile,
        note=note,
    )


def _terms_of_schema_1(plan: Plan, profile: Profile) -> LayerTerms | None:
    """Solve again for the terms; None where this version would choose otherwise."""
    inputs = plan.inputs
    costs = costs_of(profile, allow_modelled=inputs.pinned.allow_modelled)
    ranked = rank_layer(
        inputs=inputs,
        costs=costs,
        bounds=inputs.pinned.bounds,
        device_memory_bytes=profile.machine.plannable_bytes,
    )
    step = plan_step(plan=plan, costs=costs)
    is_same = is_same_step(step.seconds, plan.predicted.step_seconds)
    chosen = ranked.best.strategy, ranked.step.degrees
    if not is_same or chosen != (plan.memory.strategy, step.degrees):
        return None
    return SolvedPlan(plan=plan, ranked=ranked).terms
