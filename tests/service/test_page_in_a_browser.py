"""The page in a real browser: figures are drawn, and nothing goes wrong or goes elsewhere."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Response

from moetune.domain.plan import Plan
from moetune.store import open_store
from tests.cli.test_cli_check import SCRIPT
from tests.report.lab import fill, lab_profile
from tests.service.asking import Served, served
from tests.service.test_new_plan import CONFIG, MODEL
from tests.store.values import observed_run
from tests.training_plans import training_plan

TIMEOUT_MS = 120_000
MOST_TABS = 150
DESK = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "java_script_enabled": False}


@contextmanager
def watched(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """Open a page whose errors, and requests to other hosts, fail the test."""
    context = browser.new_context(base_url=url, **options)  # type: ignore[arg-type] # options of any kind
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    wrong: list[str] = []
    host = urlsplit(url).netloc

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
            wrong.append(asked.url) if urlsplit(asked.url).netloc not in {host, ""} else None
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


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def plans(home: Path) -> tuple[Plan, Plan]:
    made = fill(home / "full.db")
    with open_store(str(home / "full.db")) as store:
        store.save_plan(training_plan())
        for digest in (training_plan().inputs.profile_fingerprint, lab_profile().digest):
            store.add_observed_run(observed_run("qwen3-235b-a22b", profile_fingerprint=digest))
    return made


@pytest.fixture(scope="module")
def site(home: Path, plans: tuple[Plan, Plan]) -> Iterator[Served]:
    assert plans
    with served(home, db=home / "full.db") as running:
        yield running


@pytest.fixture(scope="module")
def empty_site(home: Path) -> Iterator[Served]:
    with served(home, db=home / "empty.db") as running:
        yield running


@pytest.fixture
def page(browser: Browser, site: Served) -> Iterator[Page]:
    with watched(browser, site.url, **DESK) as opened:
        yield opened


def draw_all(page: Page) -> int:
    """Return how many figures the page has, all of which it shows at once."""
    page.wait_for_load_state()
    areas = page.locator(".plot .area")
    heights = areas.evaluate_all("some => some.map(one => one.getBoundingClientRect().height)")
    assert all(height > 50 for height in heights)
    assert areas.count() == page.locator(".figure").count()
    return areas.count()


def colour(page: Page, selector: str, name: str) -> tuple[int, ...]:
    text = page.eval_on_selector(
        selector, f"one => getComputedStyle(one).getPropertyValue('{name}')"
    )
    return tuple(int(float(value)) for value in re.findall(r"[\d.]+", text)[:3])


def test_an_empty_store_tells_a_newcomer_what_to_run(browser: Browser, empty_site: Served) -> None:
    with watched(browser, empty_site.url) as page:
        page.goto("/")
        assert page.locator("h1").inner_text() == "Nothing measured yet"
        assert "--target megatron" in page.locator("pre").first.inner_text()
        assert "moetune profile --nproc 2" in page.locator("pre").nth(1).inner_text()
        page.get_by_role("link", name="machines page").click()
        page.get_by_role("link", name="rtx2080ti-x64").click()
        page.locator("[data-table=operations] tbody tr").nth(2).wait_for()


def test_tables_sort_and_filter(page: Page) -> None:
    page.goto("/profiles/lab")
    table = page.locator("[data-table=operations]")
    points = "rows => rows.map(row => row.cells[1].dataset.key).map(key => key && Number(key))"
    table.get_by_role("button", name="start-up").click()
    known = [value for value in table.locator("tbody tr").evaluate_all(points) if value is not None]
    assert known == sorted(known)
    assert table.locator("th").nth(1).get_attribute("aria-sort") == "ascending"
    table.get_by_role("button", name="start-up").click()
    known = [value for value in table.locator("tbody tr").evaluate_all(points) if value is not None]
    assert known == sorted(known, reverse=True)
    table.get_by_role("searchbox").fill("h2d both")
    shown = table.locator("tbody tr:visible")
    assert shown.count() == 1
    assert "pinned h2d copy, both ways" in shown.inner_text()


def test_a_plan_has_its_timeline(page: Page, plans: tuple[Plan, Plan]) -> None:
    page.goto("/")
    page.get_by_role("link", name=plans[0].id[:8]).click()
    assert draw_all(page) == 1
    timeline = page.locator("[data-figure=timeline]")
    degrees = plans[0].pipeline.forward_degree + plans[0].pipeline.backward_degree
    assert timeline.locator(".area rect").count() == 3 * degrees
    assert "experts 1" in (timeline.locator(".area rect title").first.text_content() or "")


def test_two_plans_are_compared(page: Page, plans: tuple[Plan, Plan]) -> None:
    page.goto("/compare")
    page.get_by_label("First plan").fill(plans[0].id[:8])
    page.get_by_label("Second plan").fill(plans[1].id[:8])
    page.get_by_role("button", name="Compare").click()
    assert draw_all(page) == 0
    assert "computation" in page.locator("[data-table=parts]").inner_text()


def test_the_page_and_its_figures_are_dark_where_the_reader_wants_it(
    browser: Browser, site: Served, plans: tuple[Plan, Plan]
) -> None:
    with watched(browser, site.url, color_scheme="dark") as page:
        page.goto(f"/plans/{plans[0].id}")
        draw_all(page)
        tick = "[data-figure=timeline] .tick"
        assert max(colour(page, "body", "background-color")) < 40
        assert min(colour(page, tick, "fill")) > 120
        button = page.get_by_role("button", name="Theme")
        button.click()
        assert button.inner_text() == "Theme: light"
        assert max(colour(page, tick, "fill")) < 120
        assert min(colour(page, "body", "background-color")) > 240
        page.goto("/machines")
        assert page.get_by_role("button", name="Theme").inner_text() == "Theme: light"
        assert min(colour(page, "body", "background-color")) > 240


def test_no_page_is_wider_than_a_phone(
    browser: Browser, site: Served, empty_site: Served, plans: tuple[Plan, Plan]
) -> None:
    first, second = (plan.id for plan in plans)
    pages = ("/", "/machines", "/profiles/lab", f"/plans/{first}",
             f"/plans/{second}", f"/plans/{training_plan().id}",
             f"/compare?first={first}&second={second}")  # fmt: skip
    size = {"width": 390, "height": 844}
    for url, paths in ((site.url, pages), (empty_site.url, ("/",))):
        with watched(browser, url, viewport=size, has_touch=True, is_mobile=True) as page:
            for path in paths:
                page.goto(path)
                draw_all(page)
                width = page.evaluate("document.documentElement.scrollWidth")
                assert width <= 390, f"{path} is {width} wide"
                cut = page.locator(".table.cut").evaluate_all(
                    "all => all.map(one => one.dataset.table)"
                )
                assert cut == [], f"tables of {path} are cut"
            page.get_by_role("link", name="Machines").first.click()
            assert page.locator("h1").inner_text() == "Machines"


@pytest.mark.parametrize("options", [DESK, PHONE], ids=["desk", "phone"])
def test_a_plan_answers_on_its_first_screen(
    browser: Browser, site: Served, options: dict[str, Any]
) -> None:
    with watched(browser, site.url, **options) as page:
        page.goto(f"/plans/{training_plan().id}")
        for words in ("One step", "Memory of a", "Lay it out", "binds", "The pins", "Next steps"):
            box = page.get_by_text(words).filter(visible=True).first.bounding_box()
            assert box is not None, words
            assert box["y"] + box["height"] <= options["viewport"]["height"], words


def test_no_table_is_cut_on_a_desk(page: Page, plans: tuple[Plan, Plan]) -> None:
    for path in ("/", "/machines", "/profiles/lab", f"/plans/{plans[0].id}"):
        page.goto(path)
        page.wait_for_load_state()
        assert page.locator(".table.cut").count() == 0, path


def test_everything_is_reached_by_the_keyboard_alone(page: Page, plans: tuple[Plan, Plan]) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    assert focused(page) == "To the content"
    page.keyboard.press("Enter")
    assert focused(page, "id") == "main"
    tab_to(page, "tokens per rank")
    page.keyboard.press("Enter")
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    tab_to(page, plans[0].id[:8])
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/plans/{plans[0].id}")
    tab_to(page, "Theme")
    page.keyboard.press("Enter")
    assert page.locator("html").get_attribute("data-theme") == "light"
    tab_to(page, "Compare")
    page.keyboard.press("Enter")
    page.wait_for_url("**/compare?**")


def test_plans_are_filtered_with_the_keyboard_alone(page: Page) -> None:
    page.goto("/")
    tab_to(page, "profile", "name")
    page.keyboard.type("lab-after")
    page.keyboard.press("Enter")
    page.wait_for_url("**profile=lab-after**")
    assert "No plan matches." in page.locator("main").inner_text()


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("options", [DESK, PHONE], ids=["desk", "phone"])
def test_a_launch_is_pasted_and_checked(
    browser: Browser, empty_site: Served, options: dict[str, Any], scheme: str
) -> None:
    with watched(browser, empty_site.url, **options, color_scheme=scheme) as page:
        page.goto("/check")
        page.get_by_label("pasted or dropped").fill(SCRIPT)
        page.get_by_label("Machine").select_option("h100-x8")
        page.get_by_role("button", name="Check").click()
        page.wait_for_url("**/check#checked")
        assert page.get_by_label("pasted or dropped").input_value() == SCRIPT
        assert "It starts and fits." in page.locator("#checked").inner_text()
        width = options["viewport"]["width"]
        picture = page.screenshot(full_page=True)
        assert int.from_bytes(picture[16:20], "big") <= width  # as PNG has it


def test_a_dropped_file_is_read_by_the_page(page: Page) -> None:
    page.goto("/check")
    page.locator("textarea").evaluate("""area => {
        const dropped = new DataTransfer();
        dropped.items.add(new File(["[training]"], "llama.toml"));
        area.dispatchEvent(new DragEvent("drop", {dataTransfer: dropped, cancelable: true}));
    }""")
    page.wait_for_function("document.querySelector('textarea').value === '[training]'")
    assert page.locator("[name=name]").input_value() == "llama.toml"


@pytest.mark.parametrize("options", [DESK, PHONE], ids=["desk", "phone"])
def test_a_model_is_planned_pinned_kept_and_found(
    browser: Browser, empty_site: Served, options: dict[str, object]
) -> None:
    with watched(browser, empty_site.url, **options) as page:
        page.goto("/new")
        for name in ("model", "world_size", "global_batch", "seq"):
            page.locator(f"[name={name}]").fill(MODEL[name])
        page.get_by_text("Pin the layout of a whole model").click()
        page.get_by_label("Tensor parallel").fill("2")
        page.get_by_role("button", name="Plan", exact=True).click()
        page.wait_for_url("**/new?model=olmoe*tp=2*")
        answer = page.locator("#planned")
        assert re.search(r"Lay it out as .*tp 2", answer.inner_text())
        assert answer.locator("[data-table=time] tbody tr").count()
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


def test_a_pasted_configuration_stays_in_its_field(browser: Browser, empty_site: Served) -> None:
    with watched(browser, empty_site.url, **DESK) as page:
        page.goto("/new")
        page.locator("[name=model]").fill("")
        page.locator("[name=world_size]").fill("8")
        page.get_by_text("Paste a configuration").click()
        page.locator("[name=config_text]").fill(json.dumps(CONFIG))
        page.get_by_role("button", name="Plan", exact=True).click()
        assert "Training pasted" in page.locator("#planned h2").first.inner_text()
        assert json.loads(page.locator("[name=config_text]").input_value()) == CONFIG
