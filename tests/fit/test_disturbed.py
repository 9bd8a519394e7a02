"""Other programs that disturb half of a profile's visits hardly move what it predicts."""

import random

import pytest

from moetune.domain.cluster import Machine
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.profile import Profile
from moetune.domain.samples import (
    CollectivePoint,
    GemmPoint,
    InterferencePoint,
    Point,
    RowsPoint,
    Sample,
)
from moetune.fit.costs import costs_of
from moetune.measure.points import PointScope
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.times import step_time
from tests.fit.measured import fitted

LAYER = LayerShape(d_model=256, d_hidden=1024, num_experts=4, activation="gelu")
MACHINE = Machine(kind="cpu", device="test", num_devices=2, devices_per_node=2, memory_bytes=2**34)
POINTS = PointScope(machine=MACHINE, dtypes=("float32",), group_sizes=(2,), layers=(LAYER,),
                    max_tokens=2048).points().needed  # fmt: skip
NUM_VISITS = 6


def true_seconds(point: Point) -> float:
    """Return what the operation takes on a machine that is all ours."""
    match point:
        case GemmPoint():
            return 2e-5 + 2e-11 * point.macs
        case RowsPoint():
            return 2e-6 + 1e-9 * point.elements
        case CollectivePoint():
            return 3e-4 + 2e-8 * point.num_bytes
        case InterferencePoint(victim="comp"):
            return 3e-3 if point.others else 2.5e-3
        case _:
            return 1e-3


def visits(point: Point, generator: random.Random, *, slowed: float) -> list[Sample]:
    """Return visits with noise of 1 %, half of them slowed by up to that factor."""
    made = []
    for number in range(NUM_VISITS):
        factor = generator.uniform(1.2, slowed) if slowed > 1 and number % 2 else 1.0
        seconds = (true_seconds(point) * factor * generator.gauss(1, 0.01) for _ in range(5))
        made.append(Sample(point=point, seconds=tuple(seconds)))
    generator.shuffle(made)
    return made


def profile(seed: int, *, slowed: float) -> Profile:
    generator = random.Random(seed)
    samples = [visit for point in POINTS for visit in visits(point, generator, slowed=slowed)]
    return fitted(samples, MACHINE)


def step_seconds(lab: Profile, tokens: int, degree: int) -> float:
    costs = layer_costs(
        workload=Workload(layer=LAYER, world_size=2, tokens_per_rank=tokens), costs=costs_of(lab)
    )
    return step_time(costs=costs, tokens=tokens, degree=degree).seconds


@pytest.mark.parametrize("slowed", [1.5, 4.0])
def test_load_in_half_of_the_visits_moves_predictions_by_under_8_percent(slowed: float) -> None:
    quiet, loaded = profile(1, slowed=1.0), profile(2, slowed=slowed)
    for tokens in (256, 2048):
        for degree in (1, 2, 4, 16):
            undisturbed = step_seconds(quiet, tokens, degree)
            assert step_seconds(loaded, tokens, degree) == pytest.approx(undisturbed, rel=0.08)
