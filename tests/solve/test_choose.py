"""Choices of degrees, against brute force over phases that are timed one by one."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.constraints import Bounds, Strategy
from moetune.domain.costs import LinearCost
from moetune.domain.layer import PHASES, Workload
from moetune.domain.profile import Profile
from moetune.solve.layer.choose import NOISE, WORTH, DegreeChooser, DegreeTable
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.times import phase_time
from tests.report.lab import LAYER
from tests.solve.costs_by_hand import LinearCosts
from tests.solve.test_reuse import DISTURBED
from tests.solve.test_uncertainty import WORKLOAD

COSTS = LinearCosts(
    has_points=True,
    interference=DISTURBED,
    copy_mode="pinned",
    copy_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=2e-10),
)
LARGEST = 12


def a100() -> Profile:
    return load_profile_file(bundled_profiles()["a100-x4"])


LAB = Workload(layer=LAYER, world_size=8, tokens_per_rank=16384)


@pytest.mark.parametrize("strategy", ["none", "S4"])
def test_absurd_costs_have_no_best_degree(strategy: Strategy) -> None:
    absurd = LinearCost(alpha_seconds=1e308, beta_seconds=1e300)
    layer = layer_costs(workload=LAB, costs=replace(COSTS, transfer_cost=absurd))
    chooser = DegreeChooser(costs=layer, bounds=Bounds(), strategy=strategy)
    with pytest.raises(ArithmeticError, match="no finite numbers"):
        chooser.degree(4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting(DegreeChooser):
    """A chooser that a rule of the test's bounds, not memory."""

    rule: Callable[[int], bool]

    def fits(self, tokens: int, degree: int) -> bool:
        return DegreeChooser.fits(self, tokens, degree) and self.rule(degree)


FITS: dict[str, Callable[[int], bool]] = {
    "all": lambda _: True,
    "many": lambda degree: degree > LARGEST / 2,
    "odd": lambda degree: degree % 3 == 1,
    "none": lambda _: False,
}


def table_of(
    strategy: Strategy, rule: Callable[[int], bool], *, wire: float, is_measured: bool
) -> DegreeTable:
    costs = replace(
        COSTS, has_points=is_measured,
        transfer_cost=LinearCost(alpha_seconds=2e-4, beta_seconds=wire),
    )  # fmt: skip
    chooser = Fitting(
        costs=layer_costs(workload=WORKLOAD, costs=costs), bounds=Bounds(max_degree=LARGEST),
        strategy=strategy, rule=rule,
    )  # fmt: skip
    return chooser.table(4096)


def times_of(table: DegreeTable) -> dict[int, float]:
    """Return the seconds of both phases at every degree that fits, each timed by itself."""
    chooser = table.chooser
    return {
        degree: sum(
            phase_time(
                costs=chooser.costs, phase=phase, tokens=4096, degree=degree,
                strategy=chooser.strategy,
            ).seconds
            for phase in PHASES
        )
        for degree in range(1, LARGEST + 1)
        if table.fits(degree)
    }  # fmt: skip


cases = pytest.mark.parametrize(
    ("strategy", "wire", "is_measured"),
    [*itertools.product(["none", "S1", "S4"], [3e-11, 3e-10, 3e-9], [True, False])],
)


@cases
@pytest.mark.parametrize("rule", FITS.values(), ids=FITS)
def test_the_choice_has_the_fewest_chunks_of_all_that_tie(
    strategy: Strategy, wire: float, rule: Callable[[int], bool], *, is_measured: bool
) -> None:
    table = table_of(strategy, rule, wire=wire, is_measured=is_measured)
    times = times_of(table)
    if not times:
        assert table.best() is None
        return
    least = min(times.values())
    limit = least * (1 + (NOISE if is_measured else 1e-12))
    expected = min(degree for degree, seconds in times.items() if seconds <= limit)
    fewest = min(times)
    if is_measured and strategy == "none" and least > times[fewest] * (1 - WORTH):
        expected = fewest  # nothing is around the phases here
    assert table.best() == expected
