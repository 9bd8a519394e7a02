"""Write `tests/README.md`: what users rely on, by the file of tests that holds it.

`python -m tests.properties` writes it anew, of the first line of each file's docstring.
"""

import ast
from itertools import groupby
from pathlib import Path

from tests.conftest import FOLDER, THOROUGH

README = FOLDER / "README.md"
HEAD = """# What the tests hold

A line for each file of tests: a property that users rely on, held against something independent
of the code: brute force, dense float64, autograd, torch's own schedules, the runtimes' classes,
real ranks, a real PostgreSQL, a real browser. Files with a † run in `make test-thorough` alone; of
the others the cases that need a browser or PostgreSQL do. `python -m tests.properties` writes this
page.
"""


def page() -> str:
    """Return the page."""
    files = sorted(FOLDER.rglob("test_*.py"), key=lambda file: (file.parent, file.name))
    lines = [HEAD]
    for folder, those in groupby(files, key=lambda file: file.parent.relative_to(FOLDER)):
        lines.append(f"\n## {folder.as_posix() if folder.parts else 'The whole'}\n\n")
        lines += [_line(file) for file in those]
    return "".join(lines)


def _line(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    held = text.partition("\n\n")[0].replace("\n", " ")
    places = {FOLDER / name for name in THOROUGH}
    mark = "" if places.isdisjoint((file, *file.parents)) else " †"
    return f"- `{file.name}`{mark}: {held}\n"


if __name__ == "__main__":
    README.write_text(page(), encoding="utf-8")
