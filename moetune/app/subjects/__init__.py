"""Subjects of questions: plans of either kind, priced again with their profile.

Both kinds have the same methods, so that each question needs code only once.
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
    """Return a plan as a subject; `model` is the `config.json` of a model without a name.

    Raises:
        InputError: a model is named for the plan of a layer.
    """
    if plan.kind == "training":
        return ModelSubject(plan=plan, profile=profile, missing=missing, model=model)
    refuse_model(model)
    return LayerSubject(plan=plan, profile=profile, missing=missing)


def refuse_model(model: str | None) -> None:
    """Raise InputError if a model is named for a layer's plan, which needs no model."""
    if model is not None:
        raise InputError(
            "--model is for the plans of Hugging Face models, and this plan names its model",
            "omit --model",
        )
