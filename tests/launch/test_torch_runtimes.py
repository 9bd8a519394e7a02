"""Free plans for torch's runtimes are put through their own start: none is refused.

transformers judges in the environment of the tests; torchtitan and DeepSpeed where
`make launch-torch` has made theirs.
"""

from pathlib import Path

import pytest

from tests.launch.__main__ import PYTHONS, verdicts
from tests.launch.draw import answered, questions


def refused(target: str, count: int, *, seed: int) -> tuple[list[str], int]:
    """Return what the runtime or its export refuses of drawn plans, and the plans judged."""
    drawn = [answered(question) for question in questions(count, seed=seed, targets=[target])]
    jobs = [case.job for case in drawn if case.job is not None]
    judged = verdicts(jobs, python=PYTHONS[target], folder="")
    wrong = [case.refused for case in drawn if case.is_refused_by_export]
    return [*wrong, *filter(None, judged.values())], len(judged)


@pytest.mark.unmeasured
def test_transformers_starts_what_is_drawn() -> None:
    wrong, num_judged = refused("transformers", 16, seed=3)
    assert not wrong
    assert num_judged >= 4  # others are refused by name


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["transformers", "torchtitan", "deepspeed"])
def test_a_torch_runtime_starts_all_of_many(target: str) -> None:
    if not Path(PYTHONS[target]).is_file():
        pytest.skip("no .venv-launch-torch: run make launch-torch")
    wrong, num_judged = refused(target, 60, seed=30)
    assert not wrong
    assert num_judged >= 20
