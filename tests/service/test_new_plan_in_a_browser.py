"""The page New plan in a real browser: with the keyboard alone, on a phone, in the dark, and
without its script."""

import itertools
import json
import re
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Page

from tests.service.asking import Served, served
from tests.service.browsing import TIMEOUT_MS, focused, tab_to, watched
from tests.service.test_new_plan import CONFIG

LAYER = "/new?kind=layer&model=gpt-s&profile=rtx2080ti-x64&world_size=64&tokens_per_rank=4096"
MOST_MOVES = 500
DESK = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("new-plan")
    with served(home, db=home / "store.db") as running:
        yield running


def asked(page: Page) -> dict[str, str]:
    found = parse_qs(urlsplit(page.url).query)
    return {name: some[0] for name, some in found.items()}


def wait_for_address(page: Page, part: str) -> None:
    page.wait_for_function(
        "part => location.search.includes(part) && !document.querySelector('[aria-busy]')",
        arg=part,
    )


@pytest.mark.parametrize(
    "options",
    [{**DESK, "color_scheme": "light"}, {**DESK, "color_scheme": "dark"},
     {**PHONE, "color_scheme": "dark"}],
    ids=["light", "dark", "phone"],
)  # fmt: skip
def test_a_plan_follows_its_sliders_by_the_keyboard_alone(
    browser: Browser, site: Served, options: dict[str, object]
) -> None:
    with watched(browser, site.url, **options) as page:
        page.goto(LAYER)
        before = page.locator("#layouts table").first.inner_text()
        tab_to(page, "tokens_per_rank", "dataset.for")
        at = page.evaluate("scrollY")
        page.keyboard.press("ArrowRight")
        wait_for_address(page, "tokens_per_rank=6144")
        assert page.locator("#tokens_per_rank").input_value() == "6144"
        assert focused(page, "dataset.for") == "tokens_per_rank"
        assert focused(page, "getAttribute('aria-valuetext')") == "6144"
        assert page.evaluate("scrollY") == at
        assert page.locator("#layouts table").first.inner_text() != before
        assert " a step" in page.locator(".state").inner_text()
        page.keyboard.press("Tab")
        page.keyboard.press("Control+A")
        page.keyboard.type("12k")
        wait_for_address(page, "tokens_per_rank=12k")
        assert "12,288 tokens per GPU" in page.locator("#draft").inner_text()
        assert page.locator("[data-for=tokens_per_rank]").get_attribute("aria-valuetext") == "12k"
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= page.evaluate("innerWidth")
        tab_to(page, "Keep this plan", "textContent")
        page.keyboard.press("Enter")
        page.wait_for_url("**/plans/*")
        assert "12,288 tokens per GPU" in page.locator("main").inner_text()


@pytest.mark.parametrize(
    "options", [{**DESK, "color_scheme": "dark"}, PHONE], ids=["dark", "phone"]
)
def test_a_model_is_chosen_and_its_export_copied(
    browser: Browser, site: Served, options: dict[str, object]
) -> None:
    with watched(browser, site.url, permissions=["clipboard-read", "clipboard-write"],
                 **options) as page:  # fmt: skip
        page.goto("/new?kind=layer&decoder=olmoe&profile=h100-x8&world_size=8&global_batch=32")
        tab_to(page, "kind-layer", "id")
        page.keyboard.press("ArrowRight")
        wait_for_address(page, "kind=model")
        assert "OLMoE" in page.locator("#draft h2").first.inner_text()
        assert page.locator("[data-of=layer]").is_hidden()
        for name in ("memory-parts", "timeline", "phases"):
            assert page.locator(f"[data-figure={name}] rect").count()
        page.locator("#front [data-figure=front]").wait_for(state="attached")
        assert page.locator("#front tbody tr").count() > 3
        assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth")
        tab_to(page, "export-megatron", "dataset.copies")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.activeElement.textContent === 'Copied'")
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == page.locator("#export-megatron").text_content()
        page.locator("#seq").fill("2048")
        wait_for_address(page, "seq=2048")
        with page.expect_download() as downloading:
            page.get_by_role("button", name="Download the plan file").click()
        plan = json.loads(downloading.value.path().read_text())
        assert plan["inputs"]["seq"] == 2048
        page.get_by_role("button", name="Keep this plan").click()
        page.wait_for_url(f"**/plans/{plan['id']}")


def test_a_pasted_configuration_is_in_the_address(browser: Browser, site: Served) -> None:
    with watched(browser, site.url, **DESK) as page:
        page.goto("/new?kind=model&decoder=olmoe&profile=h100-x8&world_size=8&global_batch=32")
        page.get_by_text("Paste a configuration").click()
        page.locator("#config_text").fill(json.dumps(CONFIG))
        wait_for_address(page, "decoder=pasted")
        assert "Pasted qwen3_moe" in page.locator("#draft h2").first.inner_text()
        shown = page.locator("#layouts table").first.inner_text()
        layouts = page.get_by_role("region", name="Layouts")
        layouts.get_by_role("button", name="memory").click()
        assert layouts.locator("th[aria-sort=ascending]").count() == 1
        page.reload()
        assert page.locator("#layouts table").first.inner_text() == shown
        assert json.loads(page.locator("#config_text").input_value()) == CONFIG


def test_a_layers_answer_comes_while_its_slider_still_moves(browser: Browser, site: Served) -> None:
    with watched(browser, site.url, **DESK) as page:
        page.goto(LAYER)
        answer = page.locator("[data-answer]")
        first = answer.get_attribute("data-address")
        tab_to(page, "tokens_per_rank", "dataset.for")
        moves = itertools.cycle(("ArrowRight", "ArrowLeft"))
        for move in itertools.islice(moves, MOST_MOVES):
            page.keyboard.press(move)
            if answer.get_attribute("data-address") != first:
                return
        raise AssertionError("no answer came before the slider rested")


def test_the_last_change_wins_and_a_wrong_one_is_said(browser: Browser, site: Served) -> None:
    context = browser.new_context(base_url=site.url, **DESK)  # type: ignore[arg-type] # a mapping
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    page.goto(LAYER)
    tab_to(page, "tokens_per_rank", "dataset.for")
    for _ in range(6):
        page.keyboard.press("ArrowRight", delay=60)
    wait_for_address(page, "tokens_per_rank=32768")
    assert "32,768 tokens per GPU" in page.locator("#draft").inner_text()
    page.locator("#world_size").fill("7")
    page.get_by_role("alert").wait_for()
    assert "divide" in page.get_by_role("alert").inner_text()
    page.evaluate("document.querySelector('#world_size').value = '123456789'")
    page.locator("#world_size").press("End")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.get_by_text("GPUs must be from").first.wait_for()
    context.close()


def test_it_works_as_a_form_without_its_script(browser: Browser, site: Served) -> None:
    with watched(browser, site.url, java_script_enabled=False, **PHONE) as page:
        page.goto(LAYER)
        page.locator("#tokens_per_rank").fill("6k")
        page.get_by_role("button", name="Plan", exact=True).click()
        page.wait_for_url("**tokens_per_rank=6k**")
        assert "6,144 tokens per GPU" in page.locator("#draft").inner_text()
        assert page.locator("input[type=range]:visible").count() == 0
        page.get_by_label("a whole Hugging Face model").check()
        page.locator("#profile").select_option("h100-x8")
        page.locator("#world_size").fill("8")
        page.locator("#global_batch").fill("32")
        page.get_by_text("Paste a configuration").click()
        page.locator("#config_text").fill(json.dumps(CONFIG))
        page.get_by_role("button", name="Plan this configuration").click()
        page.wait_for_url("**config=**")
        assert asked(page)["decoder"] == "pasted"
        assert re.search("Pasted qwen3_moe on 8 ranks", page.locator("#draft").inner_text())
