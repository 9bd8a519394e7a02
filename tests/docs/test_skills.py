"""The skills are what agents read, and their evaluation tells right answers from wrong ones."""

import json
import re
from pathlib import Path

import pytest
import yaml

from benchmarks.skills.questions import read_questions
from benchmarks.skills.score import right_keys, truth_of

ROOT = Path(__file__).parents[2]
SKILLS = sorted(ROOT.glob("docs/skills/*/SKILL.md"))
QUESTIONS = {question.name: question for question in read_questions()}


@pytest.mark.parametrize("file", [ROOT / "SKILL.md", *SKILLS], ids=lambda file: file.parent.name)
def test_a_skill_has_the_front_matter_that_agents_choose_it_by(file: Path) -> None:
    _, front, text = file.read_text(encoding="utf-8").split("---\n", 2)
    facts = yaml.safe_load(front)
    assert set(facts) == {"name", "description"}
    assert facts["name"] == (file.parent.name if file in SKILLS else "moetune")
    assert "Use it " in facts["description"]
    assert len(facts["description"]) <= 1024
    assert len(text) < 4000


def test_questions_are_of_skills_and_of_nothing_that_their_examples_answer() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "SKILL.md", *SKILLS))
    names = [file.parent.name for file in SKILLS]
    assert sorted({f"moetune-{name.partition('-')[0]}" for name in QUESTIONS}) == names
    commands = " ".join(command for row in QUESTIONS.values() for command in row.commands)
    models = re.findall(r"(?:--model|(?<!-)memory) ([\w.-]+)", commands)
    assert models
    assert not [model for model in models if model in text]


@pytest.mark.parametrize("name", ["fit-unknown", "check-stops"])
def test_each_key_of_an_answer_is_scored_by_what_moetune_says(name: str) -> None:
    question = QUESTIONS[name]
    truth = truth_of(question)
    assert None not in truth.values()
    right = json.dumps(truth)
    assert all(right_keys(question, truth, f'At first {{"line": 1}}.\n```json\n{right}\n```\n'))
    assert not any(right_keys(question, truth, "It is fine."))
    for place, (key, value) in enumerate(truth.items()):
        for wrong in (None, "nothing", not value):
            marks = [*right_keys(question, truth, json.dumps(truth | {key: wrong}))]
            assert [number for number, is_right in enumerate(marks) if not is_right] == [place]
