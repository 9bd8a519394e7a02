"""A plan of either kind as the sections of its page."""

from moetune.domain.training_document import AnyPlan, TrainingDocument
from moetune.report.section import Section
from moetune.workflows.planner import Planner
from moetune.workflows.views.explanation import reasons
from moetune.workflows.views.plan import page_sections
from moetune.workflows.views.training_page import training_page


def plan_page_sections(plan: AnyPlan, planner: Planner) -> tuple[Section, ...]:
    """Return the sections of a plan's page, the answer first.

    Args:
        planner: has the profile that a layer's terms come from.

    Raises:
        ProfileError: the profile lacks an operation.
    """
    if isinstance(plan, TrainingDocument):
        return training_page(plan)
    explanation = planner.explain(plan)
    return *page_sections(explanation), *reasons(explanation, is_drawn=True)
