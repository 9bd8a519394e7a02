"""The page of two plans side by side."""

from moetune.app.views.comparison import comparison_sections
from moetune.report.section import Section
from moetune.service.pages.library import Library
from moetune.service.pages.page import Form, Link, Page, Text, address


def compare_page(library: Library, *, first: Text = "", second: Text = "") -> Page:
    """Return the form, and with two plans how the second one differs.

    Args:
        first, second: plans' ids or their beginnings.

    Raises:
        NotFoundError: one of the two does not exist.
    """
    sections: tuple[Section, ...] = ()
    links: tuple[Link, ...] = ()
    if first and second:
        plans = library.any_plan(first), library.any_plan(second)
        names = plans[0].id[:6], plans[1].id[:6]
        sections = comparison_sections(*plans, names=names, is_drawn=True)
        links = tuple(Link(name=plan.id[:6], href=address("plans", plan.id)) for plan in plans)
    form = Form(
        action="/compare",
        button="Compare",
        fields=(
            library.plan_field("first", "First plan"), library.plan_field("second", "Second plan"),
        ),
        values={"first": first[:12], "second": second[:12]},
    )  # fmt: skip
    return Page(title="Compare", here="compare", links=links, forms=(form,), sections=sections)
