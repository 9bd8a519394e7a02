"""Times of phases in many numbers of tokens and chunks, against each of them by itself."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from moetune.domain.constraints import Strategy
from moetune.domain.costs import Costs, LinearCost
from moetune.domain.layer import PHASES, LayerShape, Phase, Workload
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.simulated import Cases, near_best_of, simulations
from moetune.solve.layer.times import phase_time
from moetune.workflows.files import bundled_profiles, load_profile_file
from tests.report.lab import LAYER, lab_profile
from tests.solve.costs_by_hand import LinearCosts
from tests.solve.test_near_best import COSTS

TOKENS = (64, 1000, 16384, 300_000)
DEGREES = tuple(range(1, 33))
TOLERANCE = 0.01


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
    "lines": lambda: (COSTS, LAB),
    "one rank": lambda: (costs_of(lab_profile()), replace(LAB, world_size=1)),
}


def alone(
    costs: Costs, workload: Workload, strategy: Strategy, phases: Sequence[Phase], tokens: int
) -> list[float]:
    """Return the time of the phases in each of `DEGREES`."""
    layer = layer_costs(workload=workload, costs=costs)
    return [
        sum(
            phase_time(
                costs=layer, phase=phase, tokens=tokens, degree=degree, strategy=strategy
            ).seconds
            for phase in phases
        )
        for degree in DEGREES
    ]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("strategy", ["S2", "S3"])
def test_each_degree_takes_as_long_as_alone(machine: str, strategy: Strategy) -> None:
    costs, workload = MACHINES[machine]()
    layer = layer_costs(workload=workload, costs=costs)
    for tokens in TOKENS:
        found = simulations(
            costs=layer, strategies=["S4", strategy], tokens=tokens, degrees=DEGREES
        )
        expected = [alone(costs, workload, strategy, [phase], tokens) for phase in PHASES]
        assert found[strategy].tolist() == expected


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("phases", [PHASES, ("forward",), ("backward",)], ids=len)
def test_what_is_near_the_best_is_what_all_times_say(
    machine: str, phases: tuple[Phase, ...]
) -> None:
    costs, workload = MACHINES[machine]()
    cases = np.array([(tokens, degree) for tokens in TOKENS for degree in DEGREES])
    asked = Cases(phases, cases[:, 0], cases[:, 1])
    near = near_best_of(
        [Cases(PHASES[: len(phases)], cases[:5, 0], cases[:5, 1]), asked],
        costs=layer_costs(workload=workload, costs=costs), strategy="S1", tolerance=TOLERANCE,
    )  # fmt: skip
    for at, tokens in enumerate(TOKENS):
        expected = alone(costs, workload, "S1", phases, tokens)
        limit = min(expected) * (1 + TOLERANCE)
        found = [near[5 + at * len(DEGREES) + one] for one in range(len(DEGREES))]
        assert found == [seconds <= limit for seconds in expected]


def test_absurd_costs_have_no_best_degree() -> None:
    absurd = LinearCost(alpha_seconds=1e308, beta_seconds=1e300)
    costs: LinearCosts = replace(COSTS, transfer_cost=absurd)
    with pytest.raises(ArithmeticError, match="no finite numbers"):
        simulations(
            costs=layer_costs(workload=LAB, costs=costs), strategies=["S4"], tokens=4096,
            degrees=DEGREES,
        )  # fmt: skip
