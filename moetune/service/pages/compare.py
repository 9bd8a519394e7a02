"""The page that compares two plans."""

from moetune.app.planner import ServicePlanner
from moetune.app.views.comparison import comparison_sections
from moetune.report.section import Section
from moetune.service.pages.library import plan_field
from moetune.service.pages.page import Form, Link, Page, Text, address


def compare_page(planner: ServicePlanner, *, first: Text = "", second: Text = "") -> Page:
    """Return the form, and with two plans how the second one differs.

    Args:
        first, second: plans' ids or their beginnings.

    Raises:
        NotFoundError: one of the two does not exist.
    """
    sections: tuple[Section, ...] = ()
    links: tuple[Link, ...] = ()
    if first and second:
        plans = planner.sources.plan(first), planner.sources.plan(second)
        names = plans[0].id[:6], plans[1].id[:6]
        sections = comparison_sections(*plans, names=names)
        links = tuple(Link(name=plan.id[:6], href=address("plans", plan.id)) for plan in plans)
    form = Form(
        action="/compare",
        button="Compare",
        fields=tuple(
            plan_field(planner, name, f"{name.capitalize()} plan") for name in ("first", "second")
        ),
        values={"first": first[:12], "second": second[:12]},
    )  # fmt: skip
    return Page(
        title="Compare two plans", here="compare", links=links, forms=(form,), sections=sections
    )
