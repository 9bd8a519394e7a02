"""Sections carry values for programs, and every medium shows each of them."""

import re
import shlex
from html import unescape

import pytest

from moetune.cli.render import Screen
from moetune.report.html import environment
from moetune.report.section import Cell, Highlight, Section, Table, values_of
from moetune.report.text import WIDTH, text_of

TABLE = Table(
    name="phases",
    header=("phase", "chunks", "step", "memory", "share", "why"),
    rows=(
        (Cell.words("forward", mark="chosen"), Cell.count(12_345), Cell.seconds(0.0214),
         Cell.size(3 * 2**30), Cell.share(0.123), Cell.words("it hides most")),
        (Cell.words("backward"), Cell.count(2), Cell.seconds(None), Cell.size(None),
         Cell.share(None), Cell.words("it hides nothing <&>")),
    ),
    prose=("why",),
    notes=("share: of the step",),
)  # fmt: skip
SECTION = Section(
    name="answer",
    title="A layer",
    scope="64 experts",
    paragraphs=("Cut the tokens.", "Because."),
    highlights=(Highlight(name="Step", cell=Cell.seconds(0.0214), note="20 to 22 ms"),),
    summary="One step: 21.4 ms (20.0–22.0).",
    tables=(TABLE,),
    notes=("Run `moetune profile` there.",),
)


def on_screen(capsys: pytest.CaptureFixture[str], *sections: Section, color: bool = True) -> str:
    Screen(color=color).answer(sections)
    return capsys.readouterr().out


def on_page(*sections: Section) -> str:
    """Return the words of the sections as a page shows them."""
    template = '{% from "macros.html" import sections %}{{ sections(some) }}'
    html = environment().from_string(template).render(some=sections)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def test_programs_get_numbers_in_si_units() -> None:
    document = values_of(SECTION)
    assert document["highlights"] == [
        {"name": "Step", "value": 0.0214, "unit": "s", "note": "20 to 22 ms"}
    ]
    tables = document["tables"]
    assert isinstance(tables, list)
    (table,) = tables
    assert table["header"] == ["phase", "chunks", "step", "memory", "share", "why"]
    assert table["units"] == ["", "", "s", "B", "1", ""]
    assert table["rows"] == [
        ["forward", 12345, 0.0214, 3 * 2**30, 0.123, "it hides most"],
        ["backward", 2, None, None, None, "it hides nothing <&>"],
    ]


@pytest.mark.parametrize("fact", [
    "A layer", "64 experts", "Cut the tokens.", "Because.", "forward", "12,345", "21.4 ms",
    "3.00 GiB", "12.3 %", "it hides most", "it hides nothing <&>", "share: of the step",
    "moetune profile",
])  # fmt: skip
def test_screen_and_page_show_the_same_facts(capsys: pytest.CaptureFixture[str], fact: str) -> None:
    assert fact in " ".join(on_screen(capsys, SECTION).split())
    assert fact in on_page(SECTION)


def test_without_colour_it_reads_as_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = on_screen(capsys, SECTION, color=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    coloured = on_screen(capsys, SECTION)
    assert "\x1b[" in coloured
    stripped = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()


def test_a_table_fits_a_screen_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    long = Table(
        name="long",
        header=("a", "b", "c"),
        rows=tuple(tuple(Cell.words(f"{at} word" * 12) for _ in range(3)) for at in range(3)),
        wide=("b",),
    )
    text = on_screen(capsys, Section(name="long", tables=(long,)))
    assert max(map(len, text.splitlines())) <= 80
    assert "b" not in text.splitlines()[0]


def test_an_empty_table_says_so_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    section = Section(
        name="none", tables=(Table(name="none", header=("a",), rows=(), empty="No."),)
    )
    assert on_screen(capsys, section).strip() == "No."
    assert on_page(section) == "No."


def test_a_command_that_is_cut_goes_on_as_a_shell_reads_it() -> None:
    flags = " ".join(f"--flag-{number} value-{number}" for number in range(12))
    for text in (f"do this: moetune profile {flags}.", f"do `moetune profile {flags}` today."):
        lines = text_of([Section(name="one", paragraphs=(text,))]).splitlines()
        assert len(lines) > 2
        assert max(map(len, lines)) <= WIDTH
        typed = "\n".join(lines).partition("moetune")[2].partition("`")[0].replace("\\\n", "")
        assert shlex.split(f"moetune{typed}") == ["moetune", "profile", *flags.split()]


@pytest.mark.parametrize(("words", "code"), [
    ("run `moetune doctor` <now>", "moetune doctor"),
    ("1 more; measure it:  moetune profile --top-k 1 --name lab.",
     "moetune profile --top-k 1 --name lab"),
    ("Measure it:  torchrun -m moetune profile\n  or not", "torchrun -m moetune profile"),
    ("moetune cannot run pp 2: moetune", ""),
])  # fmt: skip
def test_a_page_sets_commands_as_code_and_keeps_their_flags_whole(words: str, code: str) -> None:
    page = str(environment().filters["ticked"](words))
    text = "".join(re.findall("<code>(.*?)</code>", page))
    assert re.sub("<[^>]*>", "", text) == code
    flags = re.findall(r"--[a-z-]+", code)
    assert re.findall('<span class="whole">(.*?)</span>', page) == flags
    assert unescape(re.sub("</?(?:code|span)[^>]*>", "", page)) == words.replace("`", "")
