"""A device of the caller's, as `with torch.device("cuda"):`, changes nothing but where layers are.

Here it is "meta": a tensor of ours that the caller's device decides on has no values there.
"""

from collections.abc import Callable

import pytest
import torch

from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import SAFE_DECISION
from moetune.measure.steps import measure_steps, random_steps
from moetune.runtime.moe.layer import MoELayer
from tests.runtime.gpu_runs import decision
from tests.runtime.workers import results_of

CPU = torch.device("cpu")


def both_ways(run: Callable[[], list[torch.Tensor]]) -> None:
    """Hold what a function returns under a device of the caller's against the same without."""
    wanted = run()
    with torch.device("meta"):
        results = run()
    for value, expected in zip(results, wanted, strict=True):
        assert value.device == CPU
        assert torch.equal(value, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("capacity_factor", [None, 0.7])
def test_a_layer_is_drawn_and_steps(strategy: Strategy, capacity_factor: float | None) -> None:
    x = torch.randn(60, 8)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = MoELayer(8, 16, 4, 2, capacity_factor=capacity_factor, device=CPU)
        layer.pin(decision(strategy, 3))
        return results_of(layer, x) + results_of(layer, x)

    both_ways(run)


def test_a_layer_follows_the_callers_device() -> None:
    with torch.device("meta"):
        layer = MoELayer(8, 16, 4)
    assert {each.device.type for each in layer.parameters()} == {"meta"}


def test_the_steps_that_are_measured_run() -> None:
    shape = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)
    workload = Workload(layer=shape, world_size=1, tokens_per_rank=20)
    with torch.device("meta"):
        steps = random_steps(workload, device=CPU)
        (measured,) = measure_steps(steps, [SAFE_DECISION], num_rounds=2)
    assert measured.deviation == 0
