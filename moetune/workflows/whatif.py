"""Plans for changed inputs or another machine (what-if).

`Planner.whatif` finds the plan and its profile; `change_plan` makes the second plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moetune.domain.constraint_texts import check_constraint_sizes, decode_constraints
from moetune.domain.document import decode, encode
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.request import check_sizes
from moetune.domain.spelling import Spelling, spelled
from moetune.fit.scaled import Speeds, scale_profile
from moetune.workflows.plan import make_plan, read_inputs, read_limit
from moetune.workflows.plan_changes import compare_plans, name_changes

WHATIF_SCHEMA = "moetune.whatif/1"
AS_CHANGES = Spelling(key="changes.{}", constraint="changes.constraints.{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A plan, or the inputs of one, and the changes.

    Args:
        plan_id: of a plan, or its beginning; on the command line also its file. None where
            `inputs` name the plan.
        changes: inputs that differ: `world_size`, `tokens_per_rank`, `memory_limit_bytes`,
            `dtype`, and `constraints`, which override the plan's; None removes one.
        speeds: factors on the measured speeds of `computation`, `communication` and `copies`.
        spelling: the caller's names of the changed inputs, for errors.
    """

    plan_id: str | None = None
    inputs: Mapping[str, object] = field(default_factory=dict)
    changes: Mapping[str, object] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    spelling: Spelling = AS_CHANGES


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfAnswer:
    """Both plans and their differences; the second plan is not stored.

    Args:
        words: sentences on the differences, the most important first.
        profile: the one that the second plan was made with.
    """

    before: Plan
    after: Plan
    words: tuple[str, ...]
    profile: Profile

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune whatif` and of the service."""
        plans = {"before": encode(self.before), "after": encode(self.after)}
        return {"schema": WHATIF_SCHEMA, **plans, "words": list(self.words)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    world_size: int | None = None
    tokens_per_rank: int | None = None
    memory_limit_bytes: int | None = None
    dtype: str | None = None
    constraints: Mapping[str, str | None] = field(default_factory=dict)


def change_plan(before: Plan, *, profile: Profile, question: WhatIf) -> WhatIfAnswer:
    """Return the plan for changed inputs, or for a faster or slower machine.

    A group size that was not measured is estimated, as with `--allow-modelled`, and the plan warns
    of it. With speeds the profile's times are divided by them, and the plan is labelled modelled.

    Args:
        profile: the one that `before` was made with.
        question: its plan or inputs are those of `before`.

    Raises:
        InputError: nothing is changed, or a change is unknown or wrong; the message names it.
        InfeasiblePlanError: nothing satisfies the changed constraints or memory limit.
        ProfileError: the profile lacks an operation that cannot be estimated.
    """
    faster = decode(Speeds, question.speeds, "speeds")
    if not question.changes and not faster.changed:
        raise InputError(
            "nothing is changed", "change the tokens, ranks, memory, dtype, constraints or speeds"
        )
    inputs = _changed_inputs(before, question)
    used = scale_profile(profile, faster)
    after = _plan(inputs, used, question.spelling)
    return WhatIfAnswer(
        before=before,
        after=after,
        words=(
            name_changes(before.inputs, after.inputs, faster),
            *compare_plans(before, after),
        ),
        profile=used,
    )


def check_changes(before: Plan, question: WhatIf) -> None:
    """Raise InputError where no request has these changes, whatever the machine."""
    with spelled(question.spelling):
        read_inputs(_changed_inputs(before, question)).request(default_dtype=None)


def _changed_inputs(before: Plan, question: WhatIf) -> dict[str, object]:
    """Return the inputs document without its profile."""
    changed = decode(_Changes, read_limit(question.changes, "changes"), "changes")
    given = {name: text for name, text in changed.constraints.items() if text is not None}
    with spelled(question.spelling):
        check_sizes(changed)
        check_constraint_sizes(decode_constraints(given))
    inputs: dict[str, object] = encode(before.inputs)
    for name in ("profile", "profile_fingerprint", *(["layer"] if before.inputs.model else [])):
        del inputs[name]  # the layer of a named model depends on the changed number of ranks
    constraints = {**before.inputs.constraints, **changed.constraints}
    texts = {name: value for name, value in constraints.items() if value is not None}
    return {**inputs, **question.changes, "constraints": texts}


def _plan(inputs: Mapping[str, object], profile: Profile, spelling: Spelling) -> Plan:
    """Return the plan, with estimates of group sizes that the profile lacks."""
    document = read_inputs(inputs)
    with spelled(spelling):
        request = document.request(default_dtype=None)
    fingerprint = profile.digest
    document.check(request.inputs_for(profile, fingerprint=fingerprint))
    try:
        return make_plan(request, profile=profile, fingerprint=fingerprint)
    except ProfileError as error:
        if request.constraints.allow_modelled:
            raise
        constraints = replace(request.constraints, allow_modelled=True)
        estimated = replace(request, constraints=constraints)
        try:
            return make_plan(estimated, profile=profile, fingerprint=fingerprint)
        except ProfileError:
            raise error from None
