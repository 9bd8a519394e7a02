"""What is around every page: the frame, its words for an error, and the kind of answer."""

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.responses import HTMLResponse

from moetune.domain.errors import MoetuneError
from moetune.report.html import age, environment
from moetune.service.pages.sheet import Sheet
from moetune.service.pages.static import Addresses
from moetune.service.problems import problem_of

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_Handler = Callable[[Request], Coroutine[Any, Any, Response]]
NAVIGATION = (
    ("plans", "/", "Plans"),
    ("machines", "/machines", "Machines"),
    ("observed", "/observed", "Observed"),
    ("whatif", "/whatif", "What if"),
    ("compare", "/compare", "Compare"),
)


class Shell:
    """Renders pages.

    Args:
        location: of the store, without a password.

    Raises:
        MoetuneError: Jinja2 is not installed.
    """

    def __init__(self, *, addresses: Addresses, location: str) -> None:
        self._addresses = addresses
        self._location = location
        self._templates = environment(_TEMPLATES)

    def page(self, sheet: Sheet) -> HTMLResponse:
        """Return a page in the frame.

        Args:
            sheet: its context has `title`; `here` is the entry of `NAVIGATION` that the page
                belongs to.
        """
        text = self._templates.get_template(sheet.template).render(
            navigation=NAVIGATION,
            addresses=self._addresses,
            location=self._location,
            version=version("moetune"),
            has_figures=bool(sheet.pictures),
            **{"here": "", **sheet.context},
        )  # fmt: skip
        return HTMLResponse(text, sheet.status, headers={"Cache-Control": "no-cache"})

    def problem(self, error: MoetuneError) -> HTMLResponse:
        """Return the page that says what is wrong and what to do next."""
        problem = problem_of(error)
        title = problem.title.capitalize()
        answer = self.page(
            Sheet(
                template="problem.html",
                context={"title": title, "what": error.what, "hint": error.hint},
                status=int(problem.status),
            )
        )
        answer.headers.update(problem.headers)
        return answer

    def route_class(self) -> type[APIRoute]:
        """Return routes whose errors are pages."""
        problem = self.problem

        class PageRoute(APIRoute):
            def get_route_handler(self) -> _Handler:
                handler = super().get_route_handler()

                async def handle(request: Request) -> Response:
                    try:
                        return await handler(request)
                    except MoetuneError as error:
                        return problem(error)

                return handle

        return PageRoute


def age_now(created_at: str) -> str:
    """Return how long ago a row was made."""
    return age(created_at, datetime.now(UTC))
