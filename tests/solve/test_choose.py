"""Choices of degrees, against brute force over phases that are timed one by one."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from moetune.domain.constraints import Bounds, Order, Strategy
from moetune.domain.costs import Costs, LinearCost
from moetune.domain.layer import PHASES, LayerShape, Workload
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.solve.layer.budget import Degrees
from moetune.solve.layer.choose import (
    HOPELESS,
    NOISE,
    NUM_CONTENDERS,
    WORTH,
    DegreeChooser,
    DegreeTable,
    rounded,
)
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.times import phase_seconds, phase_time
from moetune.workflows.files import bundled_profiles, load_profile_file
from tests.report.lab import LAYER, lab_profile
from tests.solve.costs_by_hand import LinearCosts
from tests.solve.test_reuse import DISTURBED
from tests.solve.test_uncertainty import WORKLOAD

COSTS = LinearCosts(
    is_measured=True,
    interference=DISTURBED,
    copy_mode="pinned",
    copy_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=2e-10),
)
TOKENS = (64, 1000, 16384, 300_000)
DEGREES = tuple(range(1, 33))
LARGEST = 12


def a100() -> Profile:
    return load_profile_file(bundled_profiles()["a100-x4"])


LAB = Workload(layer=LAYER, world_size=8, tokens_per_rank=16384)
BIG = Workload(
    layer=LayerShape(d_model=2048, d_hidden=8192, num_experts=16), world_size=4,
    tokens_per_rank=16384, dtype="bfloat16",
)  # fmt: skip
MACHINES: dict[str, Callable[[], tuple[Costs, Workload]]] = {
    "samples": lambda: (costs_of(lab_profile()), LAB),
    "tables": lambda: (costs_of(a100(), allow_modelled=True), BIG),
    "tensor": lambda: (
        costs_of(a100(), allow_modelled=True), replace(BIG, expert_parallel="tensor")
    ),
    "shards": lambda: (
        costs_of(a100(), allow_modelled=True),
        replace(BIG, expert_parallel="tensor", sequence_parallel=True),
    ),
    "lines": lambda: (COSTS, LAB),
    "one rank": lambda: (costs_of(lab_profile()), replace(LAB, world_size=1)),
}  # fmt: skip
CASES = [
    (machine, strategy)
    for machine, strategy in itertools.product(MACHINES, ("none", "S2", "S3"))
    if strategy == "none" or machine not in {"tensor", "shards"}
]


@pytest.mark.parametrize(("machine", "strategy"), CASES)
@pytest.mark.parametrize("order", ["dispatch_first", "interleaved"])
def test_many_cases_at_once_take_as_long_as_one_by_one(
    machine: str, strategy: Strategy, order: Order
) -> None:
    costs, workload = MACHINES[machine]()
    layer = layer_costs(workload=workload, costs=costs)
    cases = np.array([*itertools.product(TOKENS, DEGREES)])
    for phase in PHASES:
        found = phase_seconds(
            costs=layer, phase=phase, tokens=cases[:, 0], degrees=cases[:, 1], order=order,
            strategy=strategy,
        )  # fmt: skip
        alone = [
            phase_time(
                costs=layer, phase=phase, tokens=tokens, degree=degree, order=order,
                strategy=strategy,
            ).seconds
            for tokens, degree in cases.tolist()
        ]  # fmt: skip
        assert found.tolist() == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("strategy", ["none", "S4"])
def test_absurd_costs_have_no_best_degree(strategy: Strategy) -> None:
    absurd = LinearCost(alpha_seconds=1e308, beta_seconds=1e300)
    layer = layer_costs(workload=LAB, costs=replace(COSTS, transfer_cost=absurd))
    chooser = DegreeChooser(costs=layer, bounds=Bounds(), strategy=strategy)
    with pytest.raises(ArithmeticError, match="no finite numbers"):
        chooser.degrees(4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting(DegreeChooser):
    """A chooser that a rule of the test's bounds, not memory."""

    rule: Callable[[Degrees], bool]

    def fits(self, tokens: int, degrees: Degrees) -> bool:
        return DegreeChooser.fits(self, tokens, degrees) and self.rule(degrees)


FITS: dict[str, Callable[[Degrees], bool]] = {
    "all": lambda _: True,
    "many": lambda degrees: sum(degrees) > LARGEST,
    "odd": lambda degrees: degrees[0] % 2 == 1 and degrees[1] % 3 == 0,
    "none": lambda _: False,
}


def table_of(
    strategy: Strategy, rule: Callable[[Degrees], bool], *, wire: float, is_measured: bool
) -> DegreeTable:
    costs = replace(
        COSTS, is_measured=is_measured,
        transfer_cost=LinearCost(alpha_seconds=2e-4, beta_seconds=wire),
    )  # fmt: skip
    chooser = Fitting(
        costs=layer_costs(workload=WORKLOAD, costs=costs), bounds=Bounds(max_degree=LARGEST),
        strategy=strategy, rule=rule,
    )  # fmt: skip
    return chooser.table(4096)


def pairs_of(table: DegreeTable) -> dict[Degrees, float]:
    """Return the seconds of both phases of every pair that fits, each timed by itself."""
    chooser = table.chooser
    times = [
        {
            one: phase_time(
                costs=chooser.costs, phase=phase, tokens=4096, degree=one,
                strategy=chooser.strategy,
            ).seconds
            for one in range(1, LARGEST + 1)
        }
        for phase in PHASES
    ]  # fmt: skip
    return {
        (one, other): times[0][one] + times[1][other]
        for one, other in itertools.product(times[0], times[1])
        if table.fits((one, other)) and (one == other or not chooser.is_paired)
    }


cases = pytest.mark.parametrize(
    ("strategy", "wire", "is_measured"),
    [*itertools.product(["none", "S1", "S4"], [3e-11, 3e-10, 3e-9], [True, False])],
)


@cases
@pytest.mark.parametrize("rule", FITS.values(), ids=FITS)
def test_the_choice_has_the_fewest_chunks_of_all_pairs_that_tie(
    strategy: Strategy, wire: float, rule: Callable[[Degrees], bool], *, is_measured: bool
) -> None:
    table = table_of(strategy, rule, wire=wire, is_measured=is_measured)
    pairs = pairs_of(table)
    if not pairs:
        assert table.best() is None
        return
    least = min(pairs.values())
    limit = least * (1 + (NOISE if is_measured else 1e-12))
    ties = [pair for pair, seconds in pairs.items() if seconds <= limit]
    expected = min(ties, key=lambda pair: (sum(pair), pair))
    fewest = min(pairs)
    if is_measured and strategy == "none" and least > pairs[fewest] * (1 - WORTH):
        expected = fewest  # nothing is around the phases here
    assert table.best() == expected


@cases
def test_alternatives_are_the_fastest_other_pairs(
    strategy: Strategy, wire: float, *, is_measured: bool
) -> None:
    table = table_of(strategy, FITS["all"], wire=wire, is_measured=is_measured)
    pairs = pairs_of(table)
    chosen = table.best()
    assert chosen is not None
    order = sorted(pairs, key=lambda pair: (rounded(pairs[pair]), pair))
    assert table.next_best(chosen, 5) == [pair for pair in order if pair != chosen][:5]


@cases
def test_contenders_are_the_nearest_and_the_powers_of_two_that_are_not_hopeless(
    strategy: Strategy, wire: float, *, is_measured: bool
) -> None:
    table = table_of(strategy, FITS["all"], wire=wire, is_measured=is_measured)
    chosen = table.best()
    assert chosen is not None
    for at, phase in enumerate(PHASES):
        seconds = table.backward if at else table.forward
        reuses_one = strategy != "none" and (table.chooser.is_paired or chosen[1 - at] == 1)
        others = [one for one in seconds if one != chosen[at] and not (one == 1 and reuses_one)]
        others.sort(key=lambda one: (rounded(seconds[one]), one))
        near = [one for one in others if seconds[one] <= seconds[chosen[at]] * HOPELESS]
        powers = [one for one in near[NUM_CONTENDERS:] if one.bit_count() == 1]
        found = table.contenders(phase, chosen)
        assert found[0] == chosen[at]
        assert [*found[1:]] == [*near[:NUM_CONTENDERS], *powers]
