"""Questions for a changed plan, and the plan of a layer for changed inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moetune.app.plan import make_plan, read_inputs, read_limit
from moetune.domain.constraint_texts import check_constraint_sizes, decode_constraints
from moetune.domain.document import decode, encode
from moetune.domain.errors import ProfileError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.request import check_sizes
from moetune.domain.spelling import Spelling, spelled

AS_CHANGES = Spelling(key="changes.{}", constraint="changes.constraints.{}")
CHANGES = ("world_size", "tokens_per_rank", "memory_limit_bytes", "dtype")
"""Inputs that a question names beside the flags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A plan, or the inputs of one, and the changes.

    Args:
        plan_id: of a plan, or its beginning. None where `inputs` name the plan.
        changes: inputs that differ: `world_size`, `tokens_per_rank`, `memory_limit_bytes`,
            `dtype`, and `constraints`, other flags of `moetune plan`; None removes one.
        speeds: factors on the measured speeds of `computation`, `communication` and `copies`.
        spelling: the caller's names of the changed inputs, for errors.
    """

    plan_id: str | None = None
    inputs: Mapping[str, object] = field(default_factory=dict)
    changes: Mapping[str, object] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    spelling: Spelling = AS_CHANGES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    world_size: int | None = None
    tokens_per_rank: int | None = None
    memory_limit_bytes: int | None = None
    dtype: str | None = None
    constraints: Mapping[str, str | None] = field(default_factory=dict)


def layer_again(before: Plan, *, profile: Profile, question: WhatIf) -> Plan:
    """Return the plan of a layer for changed inputs.

    Raises:
        InputError, InfeasiblePlanError, ProfileError: nothing can be planned so.
    """
    document = read_inputs(_changed_inputs(before, question))
    with spelled(question.spelling):
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
