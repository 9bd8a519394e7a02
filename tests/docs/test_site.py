"""The site: it builds without a warning, needs no other host, and fits a phone."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = ROOT / "docs" / "decisions"
PHONE = {"width": 390, "height": 844}
LOADED = re.compile(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?:)?//[^"]+"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder),
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        match = LOADED.search(page.read_text(encoding="utf-8"))
        assert match is None or 'rel="canonical"' in match[0], f"{page.name}: {match[0]}"


def test_every_name_of_the_front_door_is_on_the_page_of_the_api(site: Path) -> None:
    import moetune

    text = (site / "api.html").read_text(encoding="utf-8")
    assert [
        name
        for name in moetune.__all__
        if not re.search(rf'<h[2-4] id="moetune\.[\w.]*{name}"', text)
    ] == []


def test_the_picture_of_the_readme_is_drawn_from_its_plan() -> None:
    drawn = runpy.run_path(str(ROOT / "docs/hooks/picture.py"))["picture"]()
    assert drawn == (ROOT / "docs/assets/plan.svg").read_text(encoding="utf-8")


def test_formulas_are_drawn_without_a_script(site: Path) -> None:
    text = (site / "mathematics.html").read_text(encoding="utf-8")
    assert text.count('<div class="formula"><math') > 10
    assert "arithmatex" not in text


def test_every_decision_is_on_one_page_and_in_the_index() -> None:
    index = (DECISIONS / "index.md").read_text(encoding="utf-8")
    pages = [page for page in DECISIONS.glob("*.md") if page.name != "index.md"]
    anchors = [
        (number, page.name)
        for page in pages
        for number in re.findall(r'<a id="(\d{4})"></a>', page.read_text(encoding="utf-8"))
    ]
    assert len(anchors) > 100
    assert len({number for number, _ in anchors}) == len(anchors)
    for number, name in anchors:
        assert f"[{number}]({name}#{number})" in index
    for page in pages:
        assert f"]({page.name})" in index
        assert page.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("folder", ["moetune", "benchmarks", "profiles"])
def test_decisions_that_code_cites_are_there(folder: str) -> None:
    cited = re.compile(r"docs/decisions/([a-z-]+\.md)#(\d{4})")
    for path in (ROOT / folder).rglob("*.*"):
        if path.suffix in {".py", ".toml"}:
            for name, number in cited.findall(path.read_text(encoding="utf-8")):
                text = (DECISIONS / name).read_text(encoding="utf-8")
                assert f'<a id="{number}"></a>' in text, f"{path.name}: {name}#{number}"


def test_pages_open_from_the_folder_on_a_phone(site: Path, browser: Browser) -> None:
    context = browser.new_context(viewport=PHONE, color_scheme="dark")  # type: ignore[arg-type] # a table
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request", lambda asked: None if asked.url.startswith("file:") else wrong.append(asked.url)
    )
    for file in sorted(site.rglob("*.html")):
        page.goto(file.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], f"{file.name} is {width} wide"
        assert page.locator("h1").first.is_visible(), file.name
    context.close()
    assert wrong == []
