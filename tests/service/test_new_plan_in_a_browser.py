"""The page New plan in a real browser: with the keyboard, on a phone, and without its script."""

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.service.asking import Served, served
from tests.service.browsing import tab_to, watched
from tests.service.test_new_plan import CONFIG, MODEL

DESK = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "java_script_enabled": False}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("new-plan")
    with served(home, db=home / "store.db") as running:
        yield running


@pytest.mark.parametrize("options", [DESK, PHONE], ids=["desk", "phone"])
def test_a_model_is_planned_pinned_kept_and_found(
    browser: Browser, site: Served, options: dict[str, object]
) -> None:
    with watched(browser, site.url, **options) as page:
        page.goto("/new")
        for name in ("model", "world_size", "global_batch", "seq"):
            page.locator(f"[name={name}]").fill(MODEL[name])
        page.get_by_text("Pin the layout of a whole model").click()
        page.get_by_label("Tensor parallel").fill("2")
        page.get_by_role("button", name="Plan", exact=True).click()
        page.wait_for_url("**/new?model=olmoe*tp=2*")
        answer = page.locator("#answer")
        assert "tp 2" in answer.locator("h2").first.inner_text()
        assert answer.locator("[data-figure=memory-parts] rect").count()
        if options is DESK:
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= page.evaluate("innerWidth")
            tab_to(page, "Plan and keep")
            page.keyboard.press("Enter")
        else:
            page.get_by_role("button", name="Plan and keep").click()
        page.wait_for_url("**/plans/*")
        page.get_by_role("link", name="New plan like this").click()
        assert page.locator("[name=tp]").input_value() == "2"


def test_a_pasted_configuration_stays_in_its_field(browser: Browser, site: Served) -> None:
    with watched(browser, site.url, **DESK) as page:
        page.goto("/new")
        page.locator("[name=model]").fill("")
        page.locator("[name=world_size]").fill("8")
        page.get_by_text("Paste a configuration").click()
        page.locator("[name=config_text]").fill(json.dumps(CONFIG))
        page.get_by_role("button", name="Plan", exact=True).click()
        page.wait_for_url("**config=**")
        assert "Training pasted" in page.locator("#answer h2").first.inner_text()
        assert json.loads(page.locator("[name=config_text]").input_value()) == CONFIG
