"""How long a person waits for a page: a real browser, from the click to the drawn figures."""

from dataclasses import dataclass

from playwright.sync_api import sync_playwright

_CHROMIUM = "/usr/bin/chromium"
_DRAWN = """() => [...document.querySelectorAll('.plot')]
    .filter(one => one.getBoundingClientRect().top < innerHeight)
    .every(one => one.querySelector('.area').getBoundingClientRect().height > 0)"""
_NOW = "() => performance.now() / 1000"
_READABLE = (
    """() => performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd / 1000"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Seconds since the navigation began."""

    readable: float
    drawn: float


def page_seconds(url: str, *, from_url: str, num_visits: int) -> list[Visit]:
    """Visit a page, as a reader who comes back to it from another one.

    The first time nothing of it is in the browser's cache.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        visits = []
        for _ in range(num_visits):
            page.goto(url, wait_until="commit")
            page.wait_for_selector(".plot", state="attached")
            page.wait_for_function(_DRAWN)
            drawn = page.evaluate(_NOW)
            visits.append(Visit(readable=page.evaluate(_READABLE), drawn=drawn))
            page.goto(from_url)
        browser.close()
        return visits
