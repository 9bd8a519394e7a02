"""Calibrations are what a normal law of machine, model and run expects, and leave no doubt out."""

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from moetune.domain.records import Calibration, ObservedRun
from moetune.domain.targets import TargetName, find_target
from moetune.solve.model.calibration import calibration_of, decided, public_half_range
from moetune.solve.model.uncertainty import public_ratios
from tests.store.values import observed_run


def calibrated(
    runs: list[ObservedRun], target: TargetName = "megatron", *, of: ObservedRun | None = None
) -> Calibration | None:
    """Return the calibration of a run of model a by others of the runtime's planned version."""
    facts = find_target(target)
    same = [replace(run, target=target, target_version=facts.number) for run in runs]
    return calibration_of(same, of=decided(of or observed_run("a")), target=facts)


def drawn(layouts: list[str], logs: list[float], scale: float) -> tuple[float, float]:
    """Return mean and spread of a run of model a with "dp 64", of joint draws near the observed.

    Layouts that begin with b are of another model; "dp 8 · tp 8" differs in three words.
    """
    rng = np.random.default_rng(3)
    count, parts = 4_000_000, np.sqrt([0.15, 0.75, 0.1]) * scale
    machine, plain = rng.normal(0, parts[0], count), rng.normal(0, parts[1], count)
    share = math.exp(-3 / 10)
    folded = share * plain + math.sqrt(1 - share**2) * rng.normal(0, parts[1], count)
    of_layout = {"dp 64": plain, "dp 8 · tp 8": folded, "b": rng.normal(0, parts[1], count)}
    near = np.ones(count, bool)
    for layout, log in zip(layouts, logs, strict=True):
        near &= abs(machine + of_layout[layout] + rng.normal(0, parts[2], count) - log) < scale / 8
    runs = (machine + plain + rng.normal(0, parts[2], count))[near]
    return float(runs.mean()), float(runs.std())


@pytest.mark.parametrize(
    ("layouts", "ratios"),
    [(["dp 64"], [1.2]), (["b"], [1.2]), (["dp 8 · tp 8"], [1.2]),
     (["dp 8 · tp 8", "b"], [1.2, 0.9])],
)  # fmt: skip
def test_the_expectation_is_that_of_draws_near_the_observed_runs(
    layouts: list[str], ratios: list[float]
) -> None:
    scale = public_half_range("megatron") / 1.6448536
    runs = [
        observed_run("b" if layout == "b" else "a", ratio, layout=layout)
        for layout, ratio in zip(layouts, ratios, strict=True)
    ]
    calibration = calibrated(runs)
    mean, spread = drawn(layouts, [math.log(ratio) for ratio in ratios], scale)
    assert calibration is not None
    assert math.log(calibration.factor) == pytest.approx(mean, abs=0.004)
    half = math.log(calibration.high_factor / calibration.low_factor) / 2
    assert half == pytest.approx(1.6448536 * spread, rel=0.02)


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed"])
def test_more_runs_come_nearer_and_never_widen_the_range(target: TargetName) -> None:
    low, high = public_ratios(target)
    widths, factors = [math.log(high / low)], [1.0]
    for count in range(1, 9):
        runs = [observed_run("a", 1.3, global_batch=64 + number) for number in range(count)]
        calibration = calibrated(runs, target)
        assert calibration is not None
        assert (calibration.num_runs, calibration.num_of_model) == (count, count)
        widths.append(math.log(calibration.high_factor / calibration.low_factor))
        factors.append(calibration.factor)
    assert factors == sorted(factors)
    assert 1.2 < factors[-1] < 1.3
    assert all(later < before * 1.02 for before, later in pairwise(widths))
    assert widths[-1] < 0.8 * widths[0]


def test_a_run_counts_once_and_a_run_that_is_far_off_not_at_all() -> None:
    assert calibrated([]) is None
    assert calibrated([observed_run("a", 3.5)]) is None
    again = [observed_run("a", ratio) for ratio in (1.1, 2.0, 2.5)]  # the newest first
    far = observed_run("a", 0.2, layout="other")
    calibration = calibrated([*again, far])
    assert calibration is not None
    assert (calibration.num_runs, calibration.num_left_out) == (1, 1)
    assert calibration == replace(calibrated(again[:1]) or calibration, num_left_out=1)


def test_a_run_of_the_model_says_more_than_that_of_another() -> None:
    factors = {
        (mine, ratio): calibrated([observed_run(mine, ratio)])
        for mine, ratio in product("ab", (0.8, 1.25))
    }
    values = {key: value.factor for key, value in factors.items() if value is not None}
    assert values["a", 0.8] < values["b", 0.8] < 1 < values["b", 1.25] < values["a", 1.25]
    assert values["a", 0.8] == pytest.approx(1 / values["a", 1.25])


def test_a_run_says_the_less_the_more_is_decided_otherwise_and_nothing_of_another_version() -> None:
    run = observed_run("a", 1.3)
    near = replace(run, dtype="fp8")
    values = [calibrated([run], of=of) for of in (run, near, replace(near, layout="dp 8 · tp 8"))]
    factors = [value.factor for value in values if value is not None]
    widths = [value.high_factor / value.low_factor for value in values if value is not None]
    assert factors == sorted(factors, reverse=True)
    assert widths == sorted(widths)
    assert 1 < calibrated([replace(run, model="b")]).factor < factors[-1]  # type: ignore[union-attr] # is
    older = replace(run, target_version="0.0.1")
    assert calibration_of([older], of=decided(run), target=find_target("megatron")) is None
