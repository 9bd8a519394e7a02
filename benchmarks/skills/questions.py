"""The questions, as prompts: what a user asks, the files, and the keys of the answer's JSON."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moetune.domain.document import decode

_ROOT = Path(__file__).parents[2]
_FILE = Path(__file__).with_name("questions.toml")
_TOOL = "The planner moetune is installed: `python -m moetune --help` lists its commands.\n"
_ASKS = """
Answer in a few sentences, and end with one JSON object of these keys, null for what nobody knows:
- answerable: false where what I ask is impossible as I ask it, or the input is wrong; else true
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of an answer, and where its truth is.

    Args:
        means: for who answers.
        path: names into a command's document, with dots between them; "" for nothing.
        of: place of the command; the last one for -1.
        pattern: whose group in the text is the truth; "" for all of it.
        unit: bytes, or seconds, of 1 in the answer.
        within: relative error that is right; 0 for the same.
        named: whether a word of the truth is enough.
    """

    means: str
    path: str
    of: int = -1
    pattern: str = ""
    unit: float = 1.0
    within: float = 0.0
    named: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of a user; its name begins with its skill's.

    Args:
        commands: of moetune, that the truth is computed by.
        files: their texts by name.
    """

    name: str
    prompt: str
    commands: tuple[str, ...]
    keys: Mapping[str, Key]
    files: Mapping[str, str] = field(default_factory=dict)

    def text(self, *, with_skills: bool) -> str:
        """Return the whole prompt, behind the texts of the skills."""
        files = [f"\n{name}:\n```text\n{text.lstrip()}```\n" for name, text in self.files.items()]
        keys = [f"- {name}: {key.means}\n" for name, key in self.keys.items()]
        skills = _skills() if with_skills else ""
        return "".join((skills, _TOOL, self.prompt, *files, _ASKS, *keys))


def read_questions() -> tuple[Question, ...]:
    """Return the questions; raise InputError where the file has another key."""
    with _FILE.open("rb") as file:
        rows = tomllib.load(file)["questions"]
    return tuple(decode(Question, row, row["name"]) for row in rows)


def _skills() -> str:
    files = (_ROOT / "SKILL.md", *sorted(_ROOT.glob("docs/skills/*/SKILL.md")))
    return "".join(f"<skill>\n{file.read_text(encoding='utf-8')}</skill>\n\n" for file in files)
