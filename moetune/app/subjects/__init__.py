"""The subject of a question: a plan of either kind that is priced again with its profile.

Both kinds have the same methods, and each question is written once over them.
"""

from typing import TypeAlias

from moetune.app.subjects.layer import LayerSubject
from moetune.app.subjects.model import ModelSubject
from moetune.app.subjects.values import WhyNot
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile

__all__ = ["LayerSubject", "ModelSubject", "Subject", "WhyNot", "refuse_model", "subject_of"]

Subject: TypeAlias = LayerSubject | ModelSubject


def subject_of(
    plan: AnyPlan, *, profile: Profile | None = None, missing: str = "", model: str | None = None
) -> Subject:
    """Return the subject that a plan is; `model` is the `config.json` of a model without a name.

    Raises:
        InputError: a model is named for the plan of a layer.
    """
    if plan.kind == "training":
        return ModelSubject(plan=plan, profile=profile, missing=missing, model=model)
    refuse_model(model)
    return LayerSubject(plan=plan, profile=profile, missing=missing)


def refuse_model(model: str | None) -> None:
    """Raise InputError where a model was named for a plan that has its own."""
    if model is not None:
        raise InputError(
            "--model is for the plans of Hugging Face models, and this plan says its own",
            "omit --model",
        )
