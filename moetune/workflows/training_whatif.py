"""What-if of a Hugging Face model's plan: its question with other values, planned again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moetune.domain.document import decode, encode
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.pipeline import stage_words
from moetune.domain.profile import Profile
from moetune.domain.question import ASKS
from moetune.domain.spelling import nearest_or
from moetune.domain.training import LayoutRequest
from moetune.domain.training_document import TrainingDocument
from moetune.fit.scaled import Speeds, scale_profile
from moetune.report.section import sentence
from moetune.solve.joint.pins import pinned
from moetune.workflows.planner import Planner
from moetune.workflows.requests import ask, training_request
from moetune.workflows.training import usable_bytes
from moetune.workflows.training_changes import input_differences, layout_changes, step_change
from moetune.workflows.whatif import WhatIf

SCHEMA = "moetune.training-whatif/1"
_CHANGES: Mapping[str, str] = {
    "world_size": "world_size", "memory_limit_bytes": "memory_limit", "dtype": "dtype",
}  # fmt: skip
"""Flags of `moetune plan` by the inputs that a question names."""
_NUMBERS = (int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWhatIf:
    """Both plans; the second is not stored."""

    before: TrainingDocument
    after: TrainingDocument

    @property
    def words(self) -> tuple[str, ...]:
        """Sentences on the differences: what was changed, the step, the layout."""
        changed = ", ".join(input_differences(self.before, self.after))
        return (
            _sentence(changed) if changed else "The plan is already made for these inputs.",
            step_change(self.before, self.after),
            *layout_changes(self.before, self.after),
        )

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune whatif` and of the service."""
        plans = {"before": self.before.document, "after": self.after.document}
        return {"schema": SCHEMA, **plans, "words": list(self.words)}


def whatif_training(
    planner: Planner, before: TrainingDocument, question: WhatIf, *, model: str | None = None
) -> TrainingWhatIf:
    """Return a plan, and the plan for changed inputs, pins, machine or speeds.

    Nothing is stored. A profile that the command line names is the second plan's machine.

    Args:
        model: the `config.json` of a plan whose model has no name.

    Raises:
        InputError: nothing is changed, or a change is unknown or wrong.
        InfeasiblePlanError: nothing satisfies the changed pins or memory limit.
        ProfileError: a profile is missing, has changed, or lacks an operation.
    """
    faster = decode(Speeds, question.speeds, "speeds")
    machine, own = planner.sources.profile_of(before), _own_profile(planner, before)
    is_moved = machine.digest != before.inputs.profile_fingerprint
    if is_moved and not planner.sources.must_match:
        planner.profile_behind(before)  # which says that it has changed
    if not question.changes and not faster.changed and not is_moved:
        raise InputError(
            "nothing is changed",
            "change the ranks, memory, dtype, speeds or machine, or a flag of the plan, such as "
            "--constraint tp=2",
        )
    options = arguments_of(before, own) | ({} if model is None else {"model": model})
    used = scale_profile(machine.profile, faster)
    request = training_request(ask(options | dict(_changes(question))), used)
    after = planner.plan_training(request, used)
    return TrainingWhatIf(before=before, after=after)


def _own_profile(planner: Planner, plan: TrainingDocument) -> Profile | None:
    """Return the profile that a plan was made with; None where it is not there or has changed."""
    try:
        found = planner.sources.profile(plan.inputs.profile)
    except ProfileError:
        return None
    return found.profile if found.digest == plan.inputs.profile_fingerprint else None


def arguments_of(plan: TrainingDocument, own: Profile | None) -> dict[str, object]:
    """Return the plan's question as arguments of `moetune.plan`."""
    inputs, pins = plan.inputs, plan.inputs.pins
    is_default = own is not None and usable_bytes(own.machine) == inputs.memory_limit_bytes
    return {
        "model": inputs.model_path or inputs.model, "world_size": inputs.world_size,
        "global_batch": inputs.global_batch, "seq": inputs.seq, "dtype": inputs.dtype,
        "routing": None if inputs.leaves_room else inputs.routing,
        "optimizer": inputs.optimizer, "target": inputs.runtime,
        "memory_limit": None if is_default else inputs.memory_limit_bytes,
        **{name: _pin(pins, name) for name in pinned(pins)},
    }  # fmt: skip


def _pin(pins: LayoutRequest, name: str) -> object:
    value = getattr(pins, name)
    return stage_words(value) if name == "stages" else encode(value)


def _changes(question: WhatIf) -> Iterator[tuple[str, object]]:
    """Yield changed arguments of `moetune.plan`; None for a flag that is removed.

    Raises:
        InputError: a change is for plans of layers.
    """
    for name, value in question.changes.items():
        if name == "constraints" and isinstance(value, Mapping):
            for flag, text in value.items():
                yield _flag(str(flag), question), _number(text)
        elif name in _CHANGES:
            yield _CHANGES[name], value
        else:
            raise InputError(
                f"{question.spelling(name)} is for layers: the plan of a training has sequences",
                "change their number or length, such as --constraint global-batch=512 or "
                "--constraint seq=8k",
            )


def _flag(name: str, question: WhatIf) -> str:
    """Return the argument of a flag.

    Raises:
        InputError: `moetune plan` has no such flag.
    """
    found = name.replace("-", "_")
    if found not in ASKS:
        hint = "`moetune plan --help` has them all; another machine is another --profile"
        nearest = nearest_or(hint, found, ASKS)
        raise InputError(f"{question.spelling(name)} is no flag of a plan", nearest)
    return found


def _sentence(changed: str) -> str:
    start = "" if changed.startswith("without ") else "with "
    return sentence(f"{start}{changed}")


def _number(text: Any) -> object:  # noqa: ANN401 - a text of a document
    """Return the number in a text; other texts and None as they are."""
    for kind in _NUMBERS:
        try:
            return kind(text)
        except (TypeError, ValueError):
            continue
    return text
