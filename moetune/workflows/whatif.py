"""What would a plan be if the batch, the ranks, the memory or the machine were others?"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moetune.domain.document import decode, encode
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.fit.scaled import Speeds, scale_profile
from moetune.workflows.asked_inputs import question_of, read_inputs
from moetune.workflows.plan import ALLOW_MODELLED, make_plan
from moetune.workflows.whatif_words import compare_plans, name_changes

WHATIF_SCHEMA = "moetune.whatif/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A question: a plan, or the inputs of one, and what is to be otherwise.

    Args:
        plan_id: of a plan, or its beginning; None where `inputs` say what the plan is for.
        changes: inputs that differ: `world_size`, `tokens_per_rank`, `memory_limit_bytes`,
            `dtype`, and `constraints`, which are put on top of the plan's. None takes one back.
        speeds: how many times as fast as measured `computation`, `communication` and `copies`
            are taken to be.
    """

    plan_id: str | None = None
    inputs: Mapping[str, object] = field(default_factory=dict)
    changes: Mapping[str, object] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfAnswer:
    """Both plans, and in words what changed and why; the second one is not stored.

    Args:
        words: sentences, the most important first.
        profile: what the second plan was made from.
    """

    before: Plan
    after: Plan
    words: tuple[str, ...]
    profile: Profile

    @property
    def document(self) -> dict[str, object]:
        """The answer as `moetune whatif --json` prints it; both plans name their profiles."""
        plans = {"before": encode(self.before), "after": encode(self.after)}
        return {"schema": WHATIF_SCHEMA, **plans, "words": list(self.words)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    world_size: int | None = None
    tokens_per_rank: int | None = None
    memory_limit_bytes: int | None = None
    dtype: str | None = None
    constraints: Mapping[str, str | None] = field(default_factory=dict)


def change_plan(
    before: Plan,
    *,
    profile: Profile,
    changes: Mapping[str, object],
    speeds: Mapping[str, float],
) -> WhatIfAnswer:
    """Return the plan for changed inputs, or for a faster or slower machine.

    A group size that was not measured takes an estimate, as with `--allow-modelled`, and the
    plan says so. With speeds the plan is made from a profile whose times are divided by them,
    and is labelled modelled.

    Args:
        profile: what `before` was made from.
        changes, speeds: as in `WhatIf`.

    Raises:
        InputError: nothing is changed, or a change is unknown or wrong; the text names it.
        InfeasiblePlanError: nothing satisfies the changed constraints or memory.
        ProfileError: the profile lacks an operation, and nothing can stand in for it.
    """
    faster = decode(Speeds, speeds, "speeds")
    if not changes and not faster.changed:
        raise InputError(
            "nothing is changed", "say what is to be otherwise: tokens, ranks, memory or speeds"
        )
    inputs = _changed_inputs(before, changes)
    used = scale_profile(profile, faster)
    after = _plan(inputs, used)
    return WhatIfAnswer(
        before=before,
        after=after,
        words=(
            name_changes(before.inputs, after.inputs, faster),
            *compare_plans(before, after),
        ),
        profile=used,
    )


def _changed_inputs(before: Plan, changes: Mapping[str, object]) -> dict[str, object]:
    """Return the inputs document without its profile."""
    asked = decode(_Changes, changes, "changes")
    inputs: dict[str, object] = encode(before.inputs)
    for name in ("profile", "profile_fingerprint", *(["layer"] if before.inputs.model else [])):
        del inputs[name]  # a model's experts may grow with the ranks
    constraints = {**before.inputs.constraints, **asked.constraints}
    kept = {name: value for name, value in constraints.items() if value is not None}
    return {**inputs, **changes, "constraints": kept}


def _plan(inputs: dict[str, object], profile: Profile) -> Plan:
    """Return the plan, with estimates where the profile lacks a size."""
    try:
        return _plan_measured(inputs, profile)
    except ProfileError as error:
        constraints = inputs["constraints"]
        if not isinstance(constraints, dict) or ALLOW_MODELLED in constraints:
            raise
        estimated = {**inputs, "constraints": {**constraints, ALLOW_MODELLED: "true"}}
        try:
            return _plan_measured(estimated, profile)
        except ProfileError:
            raise error from None


def _plan_measured(inputs: dict[str, object], profile: Profile) -> Plan:
    question = question_of(
        read_inputs(inputs), profile=profile, fingerprint=profile.digest, default_dtype=None
    )
    return make_plan(question.request, profile=profile)
