"""Degrees near the best where memory is reused, against all of them simulated one by one."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from moetune.domain.constraints import Bounds, Strategy
from moetune.domain.costs import LinearCost
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.choose import NOISE, DegreeChooser
from moetune.solve.layer.near_best import EveryDegree, fewest_near_best, near_best
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.times import PhaseTime
from tests.solve.costs_by_hand import LinearCosts
from tests.solve.test_reuse import DISTURBED
from tests.solve.test_uncertainty import WORKLOAD

COSTS = LinearCosts(
    is_measured=True,
    interference=DISTURBED,
    copy_mode="pinned",
    copy_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=2e-10),
)
LARGEST = 12
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting(DegreeChooser):
    """A chooser that notes what it simulates."""

    simulated: list[tuple[Phase, int]] = field(default_factory=list)

    def time(self, phase: Phase, tokens: int, degree: int) -> PhaseTime:
        self.simulated.append((phase, degree))
        return DegreeChooser.time(self, phase, tokens, degree)


def chooser_of(strategy: Strategy, *, wire: float = 3e-10, is_measured: bool = True) -> Counting:
    costs = replace(
        COSTS,
        is_measured=is_measured,
        transfer_cost=LinearCost(alpha_seconds=2e-4, beta_seconds=wire),
    )
    return Counting(
        costs=layer_costs(workload=WORKLOAD, costs=costs),
        bounds=Bounds(max_degree=LARGEST),
        strategy=strategy,
    )


def by_degree(chooser: DegreeChooser, phase: Phase, tokens: int) -> dict[int, float]:
    return {one: chooser.time(phase, tokens, one).seconds for one in range(1, LARGEST + 1)}


@pytest.mark.parametrize("strategy", ["S1", "S2", "S3", "S4"])
@pytest.mark.parametrize("wire", [3e-11, 3e-10, 3e-9])
def test_degrees_near_the_best_are_those_of_all_simulated(strategy: Strategy, wire: float) -> None:
    chooser = chooser_of(strategy, wire=wire)
    for phase, tokens in itertools.product(PHASES, (200, 4096)):
        times = by_degree(chooser, phase, tokens)
        limit = min(times.values()) * (1 + NOISE)
        near = {degree for degree, seconds in times.items() if seconds <= limit}
        found = near_best(chooser, phase, tokens)
        assert near <= found.keys()
        assert all(times[degree] == seconds for degree, seconds in found.items())


FITS: dict[str, Callable[[Pair], bool]] = {
    "all": lambda _: True,
    "several": lambda degrees: max(degrees) > 1,
    "many": lambda degrees: sum(degrees) > LARGEST,
    "odd": lambda degrees: degrees[0] % 2 == 1 and degrees[1] % 3 == 0,
}


@pytest.mark.parametrize("fits", FITS.values(), ids=FITS)
@pytest.mark.parametrize("is_measured", [True, False])
def test_the_chosen_pair_has_the_fewest_chunks_of_all_pairs_that_tie(
    fits: Callable[[Pair], bool], *, is_measured: bool
) -> None:
    strategies: tuple[Strategy, ...] = ("S1", "S4")
    for strategy, wire in itertools.product(strategies, (3e-11, 3e-10, 3e-9)):
        chooser = chooser_of(strategy, wire=wire, is_measured=is_measured)
        forward, backward = (by_degree(chooser, phase, 4096) for phase in PHASES)
        pairs = {
            (one, other): forward[one] + backward[other]
            for one, other in itertools.product(forward, backward)
            if fits((one, other)) and (one == other or not is_measured)
        }
        limit = min(pairs.values()) * (1 + (NOISE if is_measured else 1e-12))
        ties = [pair for pair, seconds in pairs.items() if seconds <= limit]
        expected = min(ties, key=lambda pair: (sum(pair), pair))
        found = fewest_near_best(EveryDegree(chooser, 4096), fits)
        assert found is not None
        assert tuple(one.degree for one in found) == expected
        assert sum(one.seconds for one in found) == pairs[expected]


def test_where_no_pair_fits_there_is_none() -> None:
    assert fewest_near_best(EveryDegree(chooser_of("S4"), 4096), lambda _: False) is None


def test_few_degrees_are_simulated_and_each_once() -> None:
    chooser = chooser_of("S4")
    assert fewest_near_best(EveryDegree(chooser, 4096), lambda _: True) is not None
    assert len(chooser.simulated) == len(set(chooser.simulated)) < LARGEST
