"""What-if: a plan's question with changed values or another machine, solved and compared."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from moetune.app.plan import answers_again, plan_again
from moetune.app.planner import Planner
from moetune.app.requests import ask, check_served, is_of_model, layer_question, training_request
from moetune.app.subjects import refuse_model
from moetune.app.training import plan_training
from moetune.domain.any_plan import AnyPlan
from moetune.domain.document import decode, encode
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.pipeline import stage_words
from moetune.domain.profile import Profile
from moetune.domain.question import ASKS, Question
from moetune.domain.spelling import Spelling, flag_of, nearest_or, spelled
from moetune.domain.training_document import TrainingInputs
from moetune.fit.speeds import Speeds, scale_profile
from moetune.report.comparison import WhatIfAnswer
from moetune.solve.model.profiled import usable_bytes

AS_CHANGES = Spelling(key="changes.{}", constraint="changes.constraints.{}")
_ARGUMENTS: Mapping[str, str] = {"tokens_per_rank": "tokens", "memory_limit_bytes": "memory_limit"}
"""Arguments of `moetune.plan` for the keys of a plan's inputs that have another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Changes of a plan's question.

    Args:
        changes: changed flags of `moetune plan` or keys of a plan's inputs, of which any may be
            under `constraints`; None removes a flag.
        speeds: factors on the measured speeds of `computation`, `communication` and `copies`.
        spelling: the caller's names of the changed inputs, for errors.
    """

    changes: Mapping[str, object] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    spelling: Spelling = AS_CHANGES


def whatif(
    planner: Planner, before: AnyPlan, question: WhatIf, *, model: str | None = None
) -> WhatIfAnswer:
    """Return a plan and the plan for changed inputs, flags, machine or speeds.

    Nothing is stored. A profile that the command line names is the second plan's machine. Group
    sizes that were not measured are estimated, as with `--allow-modelled`, with a warning.

    Args:
        model: the `config.json` of a whole model without a name.

    Raises:
        InputError: nothing is changed, or a change is unknown or wrong.
        InfeasiblePlanError: nothing satisfies the changed flags or memory limit.
        ProfileError: a profile is missing, has changed, or lacks an operation.
    """
    if not planner.reads_files:
        with spelled(question.spelling):
            check_served(dict(_arguments(question)), is_of_layer=before.kind != "training")
    machine = planner.sources.profile_of(before)
    is_moved = machine.profile.digest != before.inputs.profile_fingerprint
    if is_moved and not planner.sources.must_match:
        _ = planner.explain(before).machine  # which says that it has changed
    planned_with = machine.profile if not is_moved else _profile_of(planner, before)
    return planner.run(
        before.inputs.profile, change_plan, before, profile=machine.profile, question=question,
        planned_with=planned_with, model=model,
    )  # fmt: skip


def change_plan(
    before: AnyPlan,
    *,
    profile: Profile,
    question: WhatIf,
    planned_with: Profile | None = None,
    model: str | None = None,
) -> WhatIfAnswer:
    """Return a plan and the changed plan on a profile's machine; errors: see `whatif`.

    `planned_with` is the profile of `before`; its usable memory is a whole model's default limit.
    """
    faster = decode(Speeds, question.speeds, "speeds")
    is_moved = profile.digest != before.inputs.profile_fingerprint
    if not question.changes and not faster.changed and not is_moved:
        pin = "tp=2" if before.kind == "training" else "forward-degree=2"
        raise InputError(
            "nothing is changed",
            "change the ranks, memory, dtype, speeds or machine, or a flag of the plan, such as "
            f"--constraint {pin}",
        )
    used = scale_profile(profile, faster)
    if before.kind == "training":
        asked = arguments_of(before.inputs, planned_with) | ({"model": model} if model else {})
        request = training_request(_changed(asked, question), used)
        if not is_moved and request.target == before.inputs.facts:
            request = replace(request, calibration=before.calibration)
        after: AnyPlan = plan_training(request, used)
    else:
        refuse_model(model)
        after = plan_again(_changed(answers_again(before.inputs), question), used)
    return WhatIfAnswer(before=before, after=after)


def _profile_of(planner: Planner, plan: AnyPlan) -> Profile | None:
    """Return the profile that a plan was made with; None if it is missing or has changed."""
    try:
        current = planner.sources.profile(plan.inputs.profile).profile
    except ProfileError:
        return None
    return current if current.digest == plan.inputs.profile_fingerprint else None


def arguments_of(inputs: TrainingInputs, profile: Profile | None) -> dict[str, object]:
    """Return a model's question as arguments of `moetune.plan`; a profile's limit is omitted."""
    pins = inputs.pins
    is_default = profile is not None and usable_bytes(profile.machine) == inputs.memory_limit_bytes
    return {
        "model": inputs.model_path or inputs.model, "world_size": inputs.world_size,
        "global_batch": inputs.global_batch, "seq": inputs.seq, "dtype": inputs.dtype,
        "routing": None if inputs.leaves_room else inputs.routing,
        "optimizer": inputs.optimizer, "target": inputs.runtime, **inputs.tuning.flags,
        **({} if inputs.packing is None else inputs.packing.flags),
        "memory_limit": None if is_default else inputs.memory_limit_bytes,
        **{name: encode(value) for name, value in pins.pinned.items()},
        **({} if pins.stages is None else {"stages": stage_words(pins.stages)}),
        **({} if (budget := inputs.budget) is None else {
            "train_tokens": budget.train_tokens, "price": budget.price_per_gpu_hour,
            "utilization": budget.utilization,
        }),
    }  # fmt: skip


def _changed(asked: dict[str, object], question: WhatIf) -> Question:
    """Return the question with the changed answers."""
    with spelled(question.spelling):
        changed = ask(asked | dict(_arguments(question)))
        return changed if is_of_model(changed) else layer_question(changed, None)


def _arguments(question: WhatIf) -> Iterator[tuple[str, object]]:
    """Yield changed arguments of `moetune.plan`; None for a removed flag."""
    changes = dict(question.changes)
    changes |= decode(dict[str, object], changes.pop("constraints", {}), "changes.constraints")
    for name, given in changes.items():
        argument = _ARGUMENTS.get(name, name).replace("-", "_")
        if argument not in ASKS:
            hint = "`moetune plan --help` has them all; another machine is another --profile"
            hint = hint if argument == "profile" else nearest_or(hint, argument, ASKS)
            raise InputError(f"{flag_of(argument)} is no flag of a plan", hint)
        yield argument, ASKS[argument].read(given) if isinstance(given, str) else given
