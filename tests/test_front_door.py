"""Names of `moetune`: each can be imported, and nothing else is visible."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import moetune
from moetune.domain import errors
from tests.properties import README, page

HEAVY = {"torch", "numpy", "sqlalchemy", "alembic", "optuna", "click", "rich"}
BANNED = re.compile(
    "_*(one|found|own|others?|every|known|each|at|many|told|kept|alike|apart|heed|beside)_*"
)
IN_DOCUMENTS = {("domain", "others"), ("report", "other")}  # keys of plans' and profiles' JSON


def test_names_of_the_front_door_are_sorted_and_no_name_is_twice() -> None:
    assert list(moetune.__all__) == sorted(set(moetune.__all__))


@pytest.mark.parametrize("name", moetune.__all__)
def test_every_name_of_the_front_door_can_be_imported(name: str) -> None:
    value = getattr(moetune, name)
    assert value.__name__ == name
    assert getattr(importlib.import_module(value.__module__), name) is value


def test_every_error_has_a_name_at_the_front_door() -> None:
    tree = {errors.MoetuneError.__name__}
    known = errors.MoetuneError.__subclasses__()
    tree |= {kind.__name__ for kind in known if kind.__module__ == errors.__name__}
    assert tree <= set(moetune.__all__)


def test_nothing_but_the_front_door_is_visible() -> None:
    public = {name for name in dir(moetune) if not name.startswith("_")}
    submodules = {name for name in public if f"moetune.{name}" in sys.modules}
    assert public - submodules - {"importlib", "TYPE_CHECKING"} == set(moetune.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'MoeLayer'"):
        _ = moetune.MoeLayer


def test_import_moetune_loads_no_library() -> None:
    code = "import sys, moetune; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


def test_the_list_of_properties_is_that_of_the_tests() -> None:
    assert README.read_text(encoding="utf-8") == page()
    assert all(not line.endswith(": ") for line in page().splitlines())


def _stored_names(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case _:
                pass


def test_names_say_what_they_hold() -> None:
    root = Path(moetune.__file__).parent
    files = {file: file.relative_to(root).parts[0] for file in root.rglob("*.py")}
    stored = {(package, name) for file, package in files.items() for name in _stored_names(file)}
    empty = {row for row in stored - IN_DOCUMENTS if BANNED.fullmatch(row[1].lower())}
    assert not empty, sorted(empty)
