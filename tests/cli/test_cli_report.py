"""`moetune report` writes one file that needs nothing else."""

import re
from pathlib import Path

from playwright.sync_api import Browser

from tests.cli.running import Cli
from tests.report.lab import fill


def test_a_report_holds_the_profile_and_the_plans(
    cli: Cli, home: Path, database: Path, browser: Browser
) -> None:
    database.parent.mkdir(parents=True)
    plans = fill(database)
    result = cli("report", "--output", "out.html", "--json")
    assert (result.code, result.err) == (0, "")
    document = result.document
    assert document["schema"] == "moetune.report/1"
    assert document["profiles"] == ["lab"], "the one that the plans name"
    assert set(document["plans"]) == {plan.id for plan in plans}
    file = home / "work" / "out.html"
    text = file.read_text(encoding="utf-8")
    links = re.findall(r'(?:href|src)="([^"]+)"', text)
    assert all(link.startswith("#") for link in links)

    wrong: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request", lambda asked: wrong.append(asked.url) if asked.url != file.as_uri() else None
    )
    page.goto(file.as_uri())
    plots = page.locator(".plot")
    assert plots.count() == 2, "two timelines"
    assert page.locator(".plot .area").count() == plots.count()
    page.close()
    assert file.stat().st_size < 2 * 10**6
    assert wrong == []


def test_nothing_to_report_is_said_with_what_to_run_first(cli: Cli, home: Path) -> None:
    result = cli("report", "--json")
    assert result.code == 5
    assert "moetune profile --nproc 2" in result.document["hint"]
    assert not (home / "work" / "report.html").exists()
