"""Where the degrees of one range of tokens give way to the next: all changes of a table at once."""

import pytest

from moetune.domain.constraints import Bounds, Strategy
from moetune.domain.layer import PHASES
from moetune.solve.layer.changes import RESOLUTION, Change, places_of
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.parallelism import layer_costs
from tests.solve.test_simulated import MACHINES

DEGREES = [(1, 2), (2, 4), (4, 7), (7, 12), (12, 20)]


def chooser_of(machine: str, strategy: Strategy) -> DegreeChooser:
    costs, workload = MACHINES[machine]()
    layer = layer_costs(workload=workload, costs=costs)
    return DegreeChooser(costs=layer, bounds=Bounds(max_degree=16), strategy=strategy)


def halved(chooser: DegreeChooser, change: Change) -> int:
    low, high, before, after = change
    while high - low > max(1, low // RESOLUTION):
        middle = (low + high) // 2
        first, second = (
            sum(
                chooser.time(phase, middle, one).seconds
                for phase, one in zip(PHASES, degrees, strict=True)
            )
            for degrees in (after, before)
        )
        is_faster = max(after) <= min(middle, 16) and first <= second
        low, high = (low, middle) if is_faster else (middle, high)
    return high


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("strategy", ["none", "S1", "S4"])
@pytest.mark.parametrize("most", [2, 6])
def test_changes_are_found_where_halving_one_after_another_finds_them(
    machine: str, strategy: Strategy, most: int
) -> None:
    chooser = chooser_of(machine, strategy)
    sizes = [(4, 900), (900, 2500), (2500, 9000), (9000, 30_000), (30_000, 200_000), (7, 8)]
    changes = [
        Change(low, high, (one, one), (other, other))
        for (low, high), (one, other) in zip(sizes, [*DEGREES, (2, 3)], strict=True)
    ][:most]
    assert places_of(chooser, changes) == [halved(chooser, one) for one in changes]


def test_without_a_change_there_is_no_place() -> None:
    assert places_of(chooser_of("samples", "S1"), []) == []
