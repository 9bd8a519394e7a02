"""PipeMoE's Theorem 1 on its Table IV, against enumeration."""

import pytest

from benchmarks.pipemoe import SAME, Problem, problems

TABLE_IV = tuple(problems())


def test_table_iv_has_the_papers_864_combinations() -> None:
    assert len(TABLE_IV) == 864
    assert len(set(TABLE_IV)) < 864  # the number of local experts changes nothing on a rank


def test_the_closed_form_equals_enumeration_on_all_of_table_iv() -> None:
    for problem in TABLE_IV:
        best = problem.seconds(problem.enumerated())
        assert problem.seconds(problem.ours()) <= best * (1 + SAME)


@pytest.mark.parametrize("rejects_failures", [False, True])
def test_theorem_1_is_never_better_and_sometimes_worse(rejects_failures: bool) -> None:  # noqa: FBT001 - a parameter
    regrets = [_regret(problem, rejects_failures) for problem in TABLE_IV[::18]]
    assert min(regrets) >= -SAME
    num_right = sum(regret <= SAME for regret in regrets)
    assert 0 < num_right < len(regrets)


def _regret(problem: Problem, rejects_failures: bool) -> float:  # noqa: FBT001 - a parameter
    theirs = problem.paper(rejects_failures=rejects_failures)
    return problem.seconds(theirs) / problem.seconds(problem.ours()) - 1
