"""Every command and code block of the documentation runs, page by page, as a reader runs it."""

import os
import re
import runpy
import socket
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from moetune.config import Settings
from tests.docs.blocks import blocks_of
from tests.docs.launched import launch
from tests.docs.parsing import check_mention, command_names
from tests.docs.reader import ROOT, Reader

DOCS = ROOT / "docs"
SKILLS = sorted(DOCS.glob("skills/*/SKILL.md"))
PAGES = (ROOT / "README.md", ROOT / "SKILL.md", *sorted(DOCS.glob("*.md")), *SKILLS)
WRITTEN = tuple(page for page in PAGES if page.stem not in {"commands", "withdrawn"})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the profiles are that pages measure."""
    return tmp_path_factory.mktemp("measured")


@pytest.fixture
def reader(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    measured: Path,
) -> Iterator[Reader]:
    """Someone in an empty home, with nothing of this process's settings."""
    settings = [f"MOETUNE_{item.name.upper()}" for item in fields(Settings)]
    for name in (*settings, "MOETUNE_TOKEN", "RANK", "WORLD_SIZE", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    for name, folder in (("HOME", "home"), ("XDG_DATA_HOME", "data"), ("XDG_CONFIG_HOME", "config"),
                         ("XDG_CACHE_HOME", "cache")):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path / folder))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = Reader(tmp_path, port, capfd, measured)
    yield made
    made.leave()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_the_page_runs_in_order(reader: Reader, page: Path) -> None:
    reader.read(page)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_commands_within_sentences_exist(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))
    for mention in re.findall(r"`(moetune [^`]+)`", text):
        check_mention(mention)


def test_every_command_has_a_block_in_the_guide() -> None:
    shown = "\n".join(block.text for page in WRITTEN for block in blocks_of(page))
    assert [name for name in command_names() if f"moetune {name}" not in shown] == []


def _page(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


@pytest.mark.parametrize(("text", "complaint"), [
    ("```yaml\na: 1\n```\n", "neither run nor marked"),
    ("```\nls\n```\n", "neither run nor marked"),
    ("<!-- not run: -->\n```yaml\na: 1\n```\n", "neither run nor marked"),
    ("```sh\nfalse\n```\n", "false"),
    ("```sh\nmoetune models show no-such-model\n```\n", "no-such-model"),
    ("```console\n$ echo 12.5 ms\n12.6 ms\n```\n", r"12\.6 is not"),
    ("```console\n$ echo 1 2\n1\n```\n", "the output goes on"),
    ("<!-- not run: no cluster -->\n```sh\nsrun moetune plan --tp x\n```\n", "a number"),
    ("Text.\n\n    moetune plan\n", "without a fence"),
])  # fmt: skip
def test_wrong_pages_fail(reader: Reader, tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(Exception, match=complaint):
        reader.read(_page(tmp_path, text))


def test_a_script_that_fails_on_one_rank_is_noticed(reader: Reader) -> None:
    assert reader is not None
    text = "import os, sys\nrank = int(os.environ['RANK'])\nprint(sys.argv[1:], 1 // (1 - rank))\n"
    Path("fails.py").write_text(text, encoding="utf-8")
    code, out = launch(("torchrun", "--nproc-per-node", "2", "fails.py", "a"), environ=os.environ,
                       timeout_seconds=60)  # fmt: skip
    assert code == 1
    assert "['a'] 1" in out
    assert "ZeroDivisionError" in out


def test_links_of_pages_that_are_not_on_the_site_lead_somewhere() -> None:
    text = "".join((ROOT / f"{name}.md").read_text() for name in ("README", "SKILL", "CHANGELOG"))
    links = re.findall(r"\]\(((?!http)[^)#]+)", text)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_pages_that_follow_from_the_code_are_those_that_it_writes() -> None:
    pages = runpy.run_path(str(DOCS / "hooks/reference.py"))["pages"]()
    assert pages == {name: (DOCS / name).read_text(encoding="utf-8") for name in pages}


def test_the_table_of_settings_names_them_all() -> None:
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert [item.name for item in fields(Settings) if f"| `{item.name}` |" not in text] == []
