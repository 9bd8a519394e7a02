"""A page and its rendering."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode

from fastapi import Query
from pydantic import AfterValidator
from starlette.responses import HTMLResponse

from moetune.report.html import environment
from moetune.report.section import Section
from moetune.service.problems import Problem

Text = Annotated[str, Query(max_length=200), AfterValidator(str.strip)]
"""A text in a page's address, without the spaces around it."""
_HEADERS = {"Referrer-Policy": "same-origin"}
"""A browser names this page when it sends a form here; other sites get no referrer."""
_TEMPLATES = Path(__file__).resolve().parent / "templates"
NAVIGATION = (
    ("new", "/new", "New plan"),
    ("check", "/check", "Check"),
    ("plans", "/", "Plans"),
    ("machines", "/machines", "Machines"),
    ("compare", "/compare", "Compare"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link under a page's title.

    Args:
        file: name of the download; "" for a page.
    """

    name: str
    href: str
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a form.

    Args:
        name: its name in an address.
        hint: such as a unit.
        flag: a command's flag that means the same; "" if there is none.
        placeholder: what an empty field stands for.
        choices: entries of a list, after an empty entry; () for a text field.
        suggested: texts to complete, each with a description.
    """

    name: str
    label: str
    hint: str = ""
    flag: str = ""
    placeholder: str = ""
    choices: tuple[str, ...] = ()
    suggested: Mapping[str, str] = field(default_factory=dict)
    is_required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form whose fields become an address.

    Args:
        button: label of its button.
        values: texts of its fields.
    """

    action: str
    button: str
    fields: tuple[Field, ...]
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page before it is rendered.

    Args:
        here: key of its entry in `NAVIGATION`.
        scope: scope of the first section, whose head is then omitted; "" if there is none.
        intro: a sentence under the title.
        problem: error of a request that cannot be answered.
        newer, older: addresses of the first page of a list, and of the next page.
        commands: commands to run next, by their descriptions.
        context: more variables of its template.
    """

    template: str = "page.html"
    title: str
    here: str = ""
    scope: str = ""
    intro: str = ""
    links: tuple[Link, ...] = ()
    problem: Problem | None = None
    forms: tuple[Form, ...] = ()
    sections: tuple[Section, ...] = ()
    newer: str = ""
    older: str = ""
    commands: Mapping[str, str] = field(default_factory=dict)
    context: Mapping[str, object] = field(default_factory=dict)


class PageRenderer:
    """Renderer of pages as HTML.

    Args:
        location: the store's address without a password, for the footer.

    Raises:
        MoetuneError: Jinja2 is not installed.
    """

    def __init__(self, *, location: str) -> None:
        self._location = location
        self._templates = environment(_TEMPLATES)

    def render(self, page: Page) -> HTMLResponse:
        """Return the page as HTML."""
        text = self._templates.get_template(page.template).render(
            navigation=NAVIGATION,
            location=self._location,
            version=version("moetune"),
            page=page,
            **page.context,
        )
        if page.problem is None:
            return HTMLResponse(text, headers=_HEADERS)
        headers = {**_HEADERS, **page.problem.headers}
        return HTMLResponse(text, int(page.problem.status), headers)

    def problem(self, problem: Problem) -> HTMLResponse:
        """Return an error as a page, with the next thing to do."""
        links = (Link(name="Plans", href="/"), Link(name="Machines", href="/machines"))
        return self.render(Page(title=problem.title.capitalize(), problem=problem, links=links))


def address(*parts: str, **query: str) -> str:
    """Return "/part/part?name=value", escaped, without empty values."""
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    pairs = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(pairs)}" if pairs else path
