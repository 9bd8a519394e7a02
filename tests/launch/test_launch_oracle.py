"""Free plans of drawn questions are put through the runtimes' own checks: none is refused.

`make launch-oracle N=1000` draws more, for all versions whose sources are there.
"""

from pathlib import Path

import pytest

from tests.launch.__main__ import verdicts
from tests.launch.draw import Drawn, answered, questions

PYTHON = Path(".venv-launch/bin/python")
NUM_PLANS = 200
TARGETS = ("megatron@0.16", "bridge@0.3")


def refused(count: int, *, seed: int) -> tuple[list[str], int]:
    """Return what runtimes or exports refuse of so many drawn plans, and the plans judged."""
    drawn = [answered(question) for question in questions(count, seed=seed, targets=TARGETS)]
    judged = verdicts([case.job for case in drawn if case.job], python=str(PYTHON), folder="")
    wrong = [words for case in drawn if (words := _words(case, judged))]
    return wrong, len(judged)


def _words(drawn: Drawn, refusals: dict[int, str]) -> str:
    what = drawn.refused if drawn.is_refused_by_export else refusals.get(drawn.question.number, "")
    return what and f"{drawn.question.command}: {what}"


@pytest.mark.unmeasured
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not PYTHON.is_file(), reason="no .venv-launch: run make launch")
def test_no_drawn_plan_is_refused() -> None:
    wrong, num_judged = refused(NUM_PLANS, seed=510)
    assert not wrong
    assert num_judged >= NUM_PLANS // 3
