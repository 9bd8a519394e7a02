"""The answers of before: plans, explanations, what-ifs, traces, pages and sessions hold."""

import json
from pathlib import Path

import pytest

from tests.golden import drawn
from tests.golden.answers import answer, differences, frozen
from tests.golden.cases import CASES, DOCUMENTS
from tests.golden.facts import FILE, facts
from tests.golden.pages import PAGES, frozen_page, page
from tests.golden.screens import PLANS, SCREENS, frozen_screen, screen
from tests.golden.sessions import SESSIONS, frozen_session, session


@pytest.mark.parametrize("name", [*CASES, *DOCUMENTS])
def test_answers_hold(name: str, tmp_path: Path) -> None:
    lines = differences(frozen(name), answer(name, tmp_path))
    assert not lines, "\n".join(lines[:20])


@pytest.mark.parametrize("name", PAGES)
def test_pages_hold(name: str) -> None:
    shown = page(name)
    json.dumps(shown, allow_nan=False)
    lines = differences(frozen_page(name), shown)
    assert not lines, "\n".join(lines[:20])


@pytest.mark.parametrize("name", [*PLANS, *SCREENS])
def test_screens_hold(name: str, tmp_path: Path) -> None:
    assert screen(name, tmp_path) == frozen_screen(name)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.thorough) if name in {"rare", "compared"} else name
    for name in SESSIONS
])  # fmt: skip
def test_sessions_hold(name: str, tmp_path: Path) -> None:
    assert session(name, tmp_path) == frozen_session(name)


def test_facts_hold() -> None:
    lines = differences(json.loads(FILE.read_text(encoding="utf-8")), facts())
    assert not lines, "\n".join(lines[:20])


def test_steps_and_memory_of_drawn_layouts_hold() -> None:
    lines = differences(json.loads(drawn.FILE.read_text(encoding="utf-8")), [*drawn.steps()])
    assert not lines, "\n".join(lines[:20])


def test_plans_of_drawn_layers_hold() -> None:
    lines = differences(json.loads(drawn.LAYERS_FILE.read_text("utf-8")), [*drawn.layers()])
    assert not lines, "\n".join(lines[:20])
