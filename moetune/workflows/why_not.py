"""Another choice of a plan beside the plan's own: the answer to "why not this one".

`Planner.why_not` finds the plan and its profile. The other choice is the plan for the same request
with what was asked pinned, which `change_plan` makes as for a what-if. Without the profile it is
one of the candidates that the plan has kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moetune.domain.constraint_texts import check_constraint_sizes, decode_constraints
from moetune.domain.errors import InfeasiblePlanError, InputError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.request import LARGEST_BYTES
from moetune.domain.spelling import AS_FIELDS, Spelling
from moetune.domain.units import format_share
from moetune.fit.costs import costs_of
from moetune.solve.layer.choose import NOISE, WORTH
from moetune.solve.layer.memory import limit_of
from moetune.solve.predict import plan_step
from moetune.workflows.changes import WhatIf, check_changes, layer_again
from moetune.workflows.compared import (
    Refusal,
    WhyNotAnswer,
    drift_notes,
    only_kept_note,
)
from moetune.workflows.pairs import probability_faster
from moetune.workflows.plan_choices import choice_of, kept_because, kept_choices

_RULES = (
    f"Gains below {format_share(WORTH, digits=0)} over one chunk or over keeping all activations "
    f"are not taken, nor below {format_share(NOISE, digits=0)} over fewer chunks: the errors of "
    "measured costs are as large. The plan's own reason: {}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """A plan, and the other choice that is asked for; None for what is left to the solver.

    Args:
        degree: chunks forward and backward, where both are the same.
        layout: of a model's training, as `layout_text` reads it.
        spelling: the caller's names of these, for errors.
    """

    degree: int | None = None
    forward_degree: int | None = None
    backward_degree: int | None = None
    strategy: str | None = None
    layout: str | None = None
    spelling: Spelling = AS_FIELDS

    @property
    def is_asked(self) -> bool:
        """Whether any other choice is asked for."""
        asked = (self.degree, self.forward_degree, self.backward_degree, self.strategy, self.layout)
        return any(one is not None for one in asked)

    @property
    def degrees(self) -> tuple[int | None, int | None]:
        """The degrees of both phases.

        Raises:
            InputError: one degree is given for both phases, and another one for one of them.
        """
        each = self.forward_degree, self.backward_degree
        if self.degree is None:
            return each
        if each != (None, None):
            both, name = self.spelling("degree"), "forward-degree"
            one = self.spelling(name if each[0] is not None else "backward-degree")
            raise InputError(
                f"{both} and {one} exclude each other", f"{both} is for both phases: omit one"
            )
        return self.degree, self.degree

    @property
    def pin_spelling(self) -> Spelling:
        """The caller's names of pins: `degree` for those of both phases, where it was given."""
        if self.degree is None:
            return self.spelling
        both = self.spelling("degree")
        phases = {"forward-degree": both, "backward-degree": both}
        return replace(self.spelling, names={**self.spelling.names, **phases})

    def pins(self, plan: Plan) -> dict[str, str]:
        """Return what is asked of a plan, as constraints by flag.

        Raises:
            InputError: a value is none that it could have, or the plan has no such choice.
        """
        forward, backward = self.degrees
        found = {
            "forward-degree": forward, "backward-degree": backward, "strategy": self.strategy,
        }  # fmt: skip
        texts = {flag: str(value) for flag, value in found.items() if value is not None}
        if self.layout is not None:
            names = [self.spelling(name) for name in ("degree", "strategy")]
            raise InputError(
                f"{self.spelling('layout')} is for whole models, and plan {plan.id[:6]} is of one "
                "layer",
                f"ask with {' or '.join(names)}",
            )
        check_constraint_sizes(decode_constraints(texts, self.pin_spelling), self.pin_spelling)
        return texts


def compare_choices(plan: Plan, *, profile: Profile, question: WhyNot) -> WhyNotAnswer:
    """Return the best with what is asked pinned, beside the plan's own choice.

    Args:
        profile: the one that the plan was made with.

    Raises:
        InputError: a value is none that it could have, or the plan has no such choice.
        ProfileError: the profile lacks an operation that cannot be estimated.
    """
    asked = question.pins(plan)
    changed = WhatIf(changes={"constraints": asked}, spelling=question.pin_spelling)
    check_changes(plan, changed)
    limit = limit_of(plan.inputs, device_memory_bytes=profile.machine.plannable_bytes)
    answer = WhyNotAnswer(
        plan=plan.id, asked=asked, source="solved", chosen=choice_of(plan), limit_bytes=limit,
        notes=_drift_notes(plan, profile),
    )  # fmt: skip
    try:
        other = layer_again(plan, profile=profile, question=changed)
    except (InputError, InfeasiblePlanError) as error:
        refused = replace(answer, refused=Refusal(what=error.what, hint=error.hint))
        return _with_more_memory(plan, profile, changed, refused)
    return replace(
        answer,
        other=choice_of(other),
        probability_faster=probability_faster(plan, other, profile),
        kept_because=kept_because(plan, other),
        rule=_RULES.format(plan.decision.why),
        notes=(
            *answer.notes, *_placed_otherwise(plan, other),
            *(one for one in other.warnings if one not in plan.warnings),
        ),
    )  # fmt: skip


def _placed_otherwise(plan: Plan, other: Plan) -> Iterator[str]:
    if other.experts != plan.experts and other.placement is not None:
        how = "are placed by their loads" if other.experts else "keep their order"
        yield f"with this choice experts {how}, and not as in the plan: {other.placement.why}"


def answer_from_plan(plan: Plan, question: WhyNot) -> WhyNotAnswer | None:
    """Return the fastest candidate with what is asked that the plan has kept; None for none.

    Raises:
        InputError: a value is none that it could have, or the plan has no such choice.
    """
    asked = question.pins(plan)
    check_changes(plan, WhatIf(changes={"constraints": asked}, spelling=question.pin_spelling))
    own = choice_of(plan)
    answer = WhyNotAnswer(plan=plan.id, asked=asked, source="plan", chosen=own)
    if asked.items() <= own.decision.items():
        return replace(answer, other=own)
    found = [one for one in kept_choices(plan) if asked.items() <= one.choice.decision.items()]
    if not found:
        return None
    kept = min(found, key=lambda one: one.choice.step_seconds)
    return replace(
        answer,
        other=kept.choice,
        kept_because=kept.lost_because,
        notes=(only_kept_note(plan.inputs.profile, what="candidate"),),
    )


def _with_more_memory(
    plan: Plan, profile: Profile, question: WhatIf, refused: WhyNotAnswer
) -> WhyNotAnswer:
    """Return the answer with the choice if memory had no limit; without, where a rule refuses."""
    roomy = {**question.changes, "memory_limit_bytes": LARGEST_BYTES}
    try:
        found = layer_again(plan, profile=profile, question=replace(question, changes=roomy))
    except (InputError, InfeasiblePlanError):
        return refused
    return replace(refused, other=choice_of(found))


def _drift_notes(plan: Plan, profile: Profile) -> tuple[str, ...]:
    costs = costs_of(profile, allow_modelled=plan.inputs.pinned.allow_modelled)
    now = plan_step(plan=plan, costs=costs).seconds
    return drift_notes(now, plan.step_seconds, what="choice")
