"""Agents' answers with and without the skills: `python -m benchmarks.skills`.

prompts FOLDER [--skills]               write NAME.md, a prompt for each question
run PROMPTS ANSWERS --agent 'COMMAND'   give each to a command's stdin, keep NAME.txt
score ANSWERS…                          print what is right in folders of answers
"""

import argparse
import shlex
import subprocess
from pathlib import Path

from benchmarks.skills.questions import read_questions
from benchmarks.skills.score import table

_PATIENCE_SECONDS = 1800


def main() -> None:
    """Do what the first word says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("prompts", "run", "score"))
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--skills", action="store_true")
    parser.add_argument("--agent", default="")
    given = parser.parse_args()
    first, last = given.folders[0], given.folders[-1]
    if given.action == "score":
        print(*table(read_questions(), given.folders), sep="\n")
        return
    last.mkdir(parents=True, exist_ok=True)
    if given.action == "prompts":
        for question in read_questions():
            text = question.text(with_skills=given.skills)
            (last / f"{question.name}.md").write_text(text, encoding="utf-8")
        return
    for prompt in sorted(first.glob("*.md")):
        with prompt.open("rb") as stdin, (last / f"{prompt.stem}.txt").open("wb") as stdout:
            words = shlex.split(given.agent)
            subprocess.run(
                words, stdin=stdin, stdout=stdout, check=False, timeout=_PATIENCE_SECONDS
            )


if __name__ == "__main__":
    main()
