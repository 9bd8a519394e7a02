"""What the host needs to launch a layer and its chunks, in the price of its steps."""

from dataclasses import replace

import numpy as np
import pytest

from moetune.domain.arrays import array_of
from moetune.domain.cost_keys import CostKey, RowsKey
from moetune.domain.costs import Estimate
from moetune.domain.layer import PHASES, LayerShape, Phase, Workload
from moetune.domain.samples import HOST_CHUNKS, LAUNCHES
from moetune.solve.layer.costs import LayerCosts, layer_costs
from tests.solve.costs_by_hand import LinearCosts

WORKLOAD = Workload(
    layer=LayerShape(d_model=64, d_hidden=128, num_experts=8, top_k=2), world_size=2,
    tokens_per_rank=64,
)  # fmt: skip
ONCE: dict[Phase, float] = {"forward": 2e-3, "backward": 3e-3}
EACH: dict[Phase, float] = {"forward": 4e-4, "backward": 8e-4}


class LaunchingCosts(LinearCosts):
    """A layer's launches: the phase's start and each chunk."""

    def knows(self, key: CostKey) -> bool:
        return key[0] in LAUNCHES or super().knows(key)

    def seconds(self, key: CostKey, size: float) -> Estimate:
        if not isinstance(key, RowsKey) or key.op not in LAUNCHES:
            return super().seconds(key, size)
        assert size in HOST_CHUNKS
        phases = PHASES if key.op.endswith("_step") else PHASES[:1]
        seconds = sum(ONCE[phase] + EACH[phase] * size for phase in phases)
        return Estimate(seconds=seconds, trust="measured")


def costs_of(costs: LinearCosts, **changes: object) -> LayerCosts:
    return layer_costs(workload=replace(WORKLOAD, **changes), costs=costs)  # type: ignore[arg-type]  # its fields


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["all_to_all", "tensor"])
def test_small_chunks_take_the_time_of_their_launches(phase: Phase, kind: str) -> None:
    costs = costs_of(LaunchingCosts(), expert_parallel=kind)
    assert costs.compute(phase=phase, rows=1.0).seconds == pytest.approx(EACH[phase])
    assert costs.phase_overhead(phase, tokens=8).seconds == pytest.approx(ONCE[phase])
    halves = costs.halves(phase, 1.0, recompute=True)
    assert sum(half.seconds for half in halves) == pytest.approx(EACH[phase])


@pytest.mark.parametrize("phase", PHASES)
def test_large_chunks_take_their_own(phase: Phase) -> None:
    costs, rows = costs_of(LaunchingCosts()), 1e7
    alone = costs_of(LinearCosts())
    assert costs.compute(phase=phase, rows=rows) == alone.compute(phase=phase, rows=rows)
    assert costs.halves(phase, rows, recompute=False) == alone.halves(phase, rows, recompute=False)
    many = costs.compute(phase=phase, rows=array_of([1.0, rows])).seconds
    assert np.asarray(many).tolist() == pytest.approx(
        [EACH[phase], alone.compute(phase=phase, rows=rows).seconds]
    )
