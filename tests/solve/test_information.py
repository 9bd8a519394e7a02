"""Worth of knowing operations, against problems small enough to enumerate."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import pytest

from moetune.domain.model_plan import Confidence
from moetune.solve.layer.information import ENOUGH, Judge, expected_gain
from moetune.solve.layer.uncertainty import confidence_of

NUM = 400


def judge_of(choices: Sequence[Mapping[str, float]], spreads: Mapping[str, float]) -> Judge:
    """Return the confidence in the first choice; each is a sum of its operations' seconds.

    Args:
        spreads: of each operation's log-normal factor.
    """
    rng = np.random.default_rng(0)
    drawn = {name: np.exp(spread * rng.normal(size=NUM)) for name, spread in spreads.items()}

    def judge(known: frozenset[str]) -> Confidence:
        factors = {name: np.ones(NUM) if name in known else drawn[name] for name in drawn}
        times = [
            sum((seconds * factors[name] for name, seconds in one.items()), np.zeros(NUM))
            for one in choices
        ]
        best = np.minimum.reduce(times)
        return confidence_of(list(zip(times[0].tolist(), best.tolist(), strict=True)))

    return judge


def regret_by_hand(spread: float, *, chosen: float, other: float, common: float) -> float:
    """Return E[max(chosen·f / other − 1, 0)] where only the factor f of `chosen` is uncertain."""
    rng = np.random.default_rng(0)
    factors = np.exp(spread * rng.normal(size=NUM))
    first, second = chosen * factors + common, np.full(NUM, other + common)
    return float(np.mean(first / np.minimum(first, second) - 1))


def test_the_only_uncertain_operation_is_worth_all_of_the_regret() -> None:
    choices = [{"a": 1.0, "c": 2.0}, {"b": 1.02, "c": 2.0}]
    judge = judge_of(choices, {"a": 0.2, "b": 0.0, "c": 0.0})
    gain = expected_gain(judge, "abc", rough=judge)
    by_hand = regret_by_hand(0.2, chosen=1.0, other=1.02, common=2.0)
    (worth,) = gain.worths
    assert worth.family == "a"
    assert worth.regret_saved == pytest.approx(by_hand)
    assert worth.range_saved == pytest.approx(1.0)
    assert gain.before.expected_regret == pytest.approx(by_hand)
    assert gain.after.expected_regret == 0.0


def test_an_operation_of_every_choice_moves_the_range_and_no_choice() -> None:
    choices = [{"a": 1.0, "c": 5.0}, {"b": 1.02, "c": 5.0}]
    judge = judge_of(choices, {"a": 0.3, "b": 0.3, "c": 0.2})
    gain = expected_gain(judge, "abc", rough=judge)
    first, *others = gain.worths
    assert first.family in {"a", "b"}
    by_name = {one.family: one for one in gain.worths}
    assert by_name["c"].range_saved > 0.5
    assert all(one.regret_saved > by_name["c"].regret_saved for one in [first, *others[:-1]])


@pytest.mark.parametrize("seed", range(8))
def test_as_few_operations_are_worth_it_as_of_any_set_that_saves_as_much(seed: int) -> None:
    """Two to four of six operations matter; all 64 sets are tried."""
    rng = np.random.default_rng(seed)
    names = "abcdef"
    important = rng.choice(list(names), size=int(rng.integers(2, 5)), replace=False)
    spreads = {name: 0.4 if name in important else 0.004 for name in names}
    choices = [{name: float(rng.uniform(0.8, 1.2)) for name in names} for _ in range(3)]
    choices.sort(key=lambda one: sum(one.values()))
    judge = judge_of(choices, spreads)
    gain = expected_gain(judge, names, rough=judge)
    before = gain.before

    def saves_enough(known: frozenset[str]) -> bool:
        after, best = judge(known), judge(frozenset(names))
        widths = [one.p95_step_seconds - one.p05_step_seconds for one in (before, after, best)]
        regrets = [one.expected_regret for one in (before, after, best)]
        return all(
            one[0] - one[1] >= ENOUGH * (one[0] - one[2]) - 1e-12 for one in (widths, regrets)
        )

    sets = [frozenset(one) for size in range(7) for one in combinations(names, size)]
    fewest = min(len(one) for one in sets if saves_enough(one))
    chosen = frozenset(one.family for one in gain.worths)
    assert saves_enough(chosen)
    assert len(chosen) <= fewest + 1
    assert chosen <= set(important.tolist())


def test_nothing_is_worth_it_where_all_operations_together_save_nothing() -> None:
    judge = judge_of([{"a": 1.0}, {"b": 9.0}], {"a": 0.0, "b": 0.3})
    gain = expected_gain(judge, "ab", rough=judge)
    assert gain.worths == ()
    assert gain.after == gain.before


@pytest.mark.parametrize(("share", "is_worth_it"), [(0.05, False), (0.2, True)])
def test_a_small_share_of_the_loss_is_left_as_it_is(share: float, *, is_worth_it: bool) -> None:
    def judge(known: frozenset[str]) -> Confidence:
        regret = 0.04 * (1 - share) if known else 0.04
        return Confidence(
            probability_best=0.5, expected_regret=regret, p05_step_seconds=1.0,
            p95_step_seconds=2.0,
        )  # fmt: skip

    assert bool(expected_gain(judge, "a", rough=judge).worths) == is_worth_it


def test_a_small_range_is_left_as_it_is() -> None:
    """The error of the model is in every draw, whatever is known."""
    draws = np.exp(0.1 * np.random.default_rng(0).normal(size=NUM))

    def judge(known: frozenset[str]) -> Confidence:
        spread = 1.0 if known else 1.05
        times = (1.0 + spread * (draws - 1.0)).tolist()
        return confidence_of([(one, one) for one in times])

    assert expected_gain(judge, "a", rough=judge).worths == ()
