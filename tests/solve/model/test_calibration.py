"""Calibrations are what a normal law of machine, model and run expects, and leave no doubt out."""

import math
from itertools import pairwise, product

import numpy as np
import pytest

from moetune.domain.targets import TargetName
from moetune.solve.model.calibration import calibration_of, public_half_range
from moetune.solve.model.uncertainty import public_ratios
from tests.store.values import observed_run


def drawn(models: list[str], logs: list[float], scale: float) -> tuple[float, float]:
    """Return mean and spread of a run of model a, of joint draws near what was observed."""
    rng = np.random.default_rng(3)
    count, parts = 4_000_000, np.sqrt([0.2, 0.4, 0.4]) * scale
    machine = rng.normal(0, parts[0], count)
    of_model = {name: rng.normal(0, parts[1], count) for name in "ab"}
    near = np.ones(count, bool)
    for name, log in zip(models, logs, strict=True):
        near &= abs(machine + of_model[name] + rng.normal(0, parts[2], count) - log) < scale / 8
    runs = (machine + of_model["a"] + rng.normal(0, parts[2], count))[near]
    return float(runs.mean()), float(runs.std())


@pytest.mark.parametrize(
    ("models", "ratios"), [(["a"], [1.2]), (["b"], [1.2]), (["a", "b"], [1.2, 0.9])]
)
def test_the_expectation_is_that_of_draws_near_the_observed_runs(
    models: list[str], ratios: list[float]
) -> None:
    scale = public_half_range("megatron") / 1.6448536
    runs = [observed_run(*run, layout=str(run)) for run in zip(models, ratios, strict=True)]
    found = calibration_of(runs, model="a", target="megatron")
    mean, spread = drawn(models, [math.log(ratio) for ratio in ratios], scale)
    assert found is not None
    assert math.log(found.factor) == pytest.approx(mean, abs=0.004)
    half = math.log(found.high_factor / found.low_factor) / 2
    assert half == pytest.approx(1.6448536 * spread, rel=0.02)


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed"])
def test_more_runs_come_nearer_and_never_widen_the_range(target: TargetName) -> None:
    low, high = public_ratios(target)
    widths, factors = [math.log(high / low)], [1.0]
    for count in range(1, 9):
        runs = [observed_run("a", 1.3, layout=str(number)) for number in range(count)]
        found = calibration_of(runs, model="a", target=target)
        assert found is not None
        assert (found.num_runs, found.num_of_model) == (count, count)
        widths.append(math.log(found.high_factor / found.low_factor))
        factors.append(found.factor)
    assert factors == sorted(factors)
    assert 1.2 < factors[-1] < 1.3
    assert all(later < before * 1.02 for before, later in pairwise(widths))
    assert widths[-1] < 0.8 * widths[0]


def test_a_run_counts_once_and_one_that_is_far_off_not_at_all() -> None:
    assert calibration_of([], model="a", target="megatron") is None
    assert calibration_of([observed_run("a", 3.5)], model="a", target="megatron") is None
    again = [observed_run("a", ratio) for ratio in (1.1, 2.0, 2.5)]  # the newest first
    far = observed_run("a", 0.2, layout="other")
    found = calibration_of([*again, far], model="a", target="megatron")
    assert found is not None
    assert (found.num_runs, found.num_left_out) == (1, 1)
    assert found.factor == calibration_of(again[:1], model="a", target="megatron").factor  # type: ignore[union-attr] # is


def test_a_run_of_the_model_says_more_than_that_of_another() -> None:
    factors = {
        (mine, ratio): calibration_of([observed_run(mine, ratio)], model="a", target="megatron")
        for mine, ratio in product("ab", (0.8, 1.25))
    }
    found = {key: value.factor for key, value in factors.items() if value is not None}
    assert found["a", 0.8] < found["b", 0.8] < 1 < found["b", 1.25] < found["a", 1.25]
    assert found["a", 0.8] == pytest.approx(1 / found["a", 1.25])
