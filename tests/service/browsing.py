"""Pages in a real browser: watched for errors, and gone through with the keyboard."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, Response

TIMEOUT_MS = 120_000
MOST_TABS = 150


@contextmanager
def watched(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """Open a page whose errors, and requests to other hosts, fail the test."""
    context = browser.new_context(base_url=url, **options)  # type: ignore[arg-type] # options of any kind
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    wrong: list[str] = []
    own = urlsplit(url).netloc

    def answered(response: Response) -> None:
        if response.status >= 400:
            wrong.append(f"{response.status} {response.url}")

    page.on(
        "console",
        lambda message: (
            wrong.append(message.text) if message.type in {"error", "warning"} else None
        ),
    )
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda asked: (
            wrong.append(asked.url) if urlsplit(asked.url).netloc not in {own, ""} else None
        ),
    )
    page.on("response", answered)
    yield page
    context.close()
    assert wrong == []


def focused(page: Page, attribute: str = "textContent") -> str:
    return str(page.evaluate(f"document.activeElement.{attribute} || ''")).strip()


def tab_to(page: Page, name: str, attribute: str = "textContent") -> None:
    """Press Tab until an element is focused whose attribute begins so."""
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        if focused(page, attribute).startswith(name):
            return
    raise AssertionError(f"{name} is not reached")
