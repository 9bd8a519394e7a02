"""The drift alarm: a layer whose calls take another time for good is named, once."""

import logging
from dataclasses import dataclass
from itertools import count

import pytest
import torch

from moetune.domain.layer import LayerShape
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.plans.book import PlanBook
from tests.runtime.plans import small_plan

CHANGE, CALLS = 120, 180


@dataclass
class Ticks:
    """A stamp of a clock that moves by itself."""

    at: float

    def since(self, earlier: "Ticks") -> float:
        return self.at - earlier.at


def train(layer: MoELayer) -> None:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    layer(x).square().sum().backward()


@pytest.mark.parametrize(("factor", "words"), [(2.0, "longer"), (0.4, "shorter"), (1.02, "")])
def test_a_layer_whose_calls_change_is_named_once_within_fifty_calls(
    factor: float, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls, time = count(1), [0.0, 0]

    def clock(*_: object) -> Ticks:
        time[0] += 0.01 * (factor if time[1] >= CHANGE else 1.0)
        return Ticks(time[0])

    shape = LayerShape(d_model=16, d_hidden=32, num_experts=4, top_k=1)
    plan = small_plan(layer=shape, world_size=1, tokens=32, degrees=(1, 1))
    book = PlanBook([plan], clock=clock)
    layers = [MoELayer(16, 32, 4, 1, plan=book) for _ in range(2)]
    with caplog.at_level(logging.WARNING, logger="moetune"):
        for time[1] in calls:
            for layer in layers:
                train(layer)
            if time[1] == CALLS:
                break
    lines = [record.message for record in caplog.records if "moetune verify" in record.message]
    assert len(lines) == bool(words)
    for line in lines:
        assert f"take {words} since call" in line
        since = int(line.partition("since call ")[2].partition(":")[0])
        assert CHANGE - 10 <= since <= CHANGE + 10
        assert f"plan {plan.id[:6]} may no longer be the best" in line
