"""The answers of before: plans, explanations, what-ifs and traces hold their numbers."""

from pathlib import Path

import pytest

from tests.golden.answers import answer, differences, frozen
from tests.golden.cases import CASES, DOCUMENTS


@pytest.mark.parametrize("name", [*CASES, *DOCUMENTS])
def test_answers_hold(name: str, tmp_path: Path) -> None:
    found = differences(frozen(name), answer(name, tmp_path))
    assert not found, "\n".join(found[:20])
