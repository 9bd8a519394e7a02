"""A layer's times under many refits at once, against each refit alone."""

from dataclasses import replace

import pytest

from moetune.domain.costs import Costs, Estimate, LinearCost
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.layer import ExpertParallel
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.stacked import each, stacked
from moetune.solve.layer.times import step_time
from tests.solve.costs_by_hand import LinearCosts
from tests.solve.test_uncertainty import WORKLOAD

REFITS = [
    LinearCosts(
        gemm_cost=LinearCost(alpha_seconds=5e-5 * factor, beta_seconds=4e-14 / factor),
        interference=Interference(
            comp=CompSpeed(comm=speed), comm=CommSpeed(comp=speed), mem=Interference().mem
        ),
        rows_seconds={"gate": 1e-10, "gather": 2e-10 * factor, "attention": 1e-12 * factor},
        pause_gain_seconds=1e-4,
    )
    for factor, speed in ((0.5, 1.0), (1.0, 0.7), (3.0, 0.4))
]


LAYER = layer_costs(workload=WORKLOAD, costs=REFITS[0])


@pytest.mark.parametrize("kind", ["all_to_all", "tensor"])
@pytest.mark.parametrize("degree", [1, 4, 7])
def test_a_stacked_step_is_that_of_each_refit(kind: ExpertParallel, degree: int) -> None:
    workload = replace(WORKLOAD, expert_parallel=kind)
    layers = [layer_costs(workload=workload, costs=one) for one in REFITS]

    def seconds(layer: LayerCosts) -> float:
        return step_time(
            costs=layer, tokens=4096, forward_degree=degree, backward_degree=degree
        ).seconds

    together = seconds(stacked(layers[0], REFITS))
    assert each(together, 3) == pytest.approx(list(map(seconds, layers)), rel=1e-14)


def test_stacked_costs_have_times_and_speeds_of_each_refit_and_no_lines() -> None:
    costs = stacked(LAYER, REFITS).costs
    assert each(costs.interference.comp.comm, 3) == [1.0, 0.7, 0.4]
    assert each(costs.interference.mem.comm, 3) == [1.0, 1.0, 1.0]
    assert costs.gemm_line(dtype="float32") is None
    assert costs.collective_line(op="all_to_all", group_size=8) is None
    assert costs.rows_op(op="gelu", dtype="float32", rows=2.0, width=4) is None

    def attention(one: Costs) -> Estimate | None:
        return one.attention(
            dtype="float32", num_sequences=2.0, length=8, num_heads=2, head_dim=4, backward=True
        )

    alone, found = [attention(one) for one in REFITS], attention(costs)
    assert found is not None
    assert each(found.seconds, 3) == [one.seconds for one in alone if one is not None]


def test_what_only_some_refits_know_is_refused() -> None:
    """Another order of the refits, the first one knowing it or not, changes nothing."""
    bare = replace(REFITS[0], rows_seconds={})
    known = REFITS[1]
    for refits in ([known, bare, known], [bare, known, known]):
        costs = stacked(LAYER, refits).costs
        with pytest.raises(TypeError, match="2 of 3 refits have gate"):
            costs.rows_op(op="gate", dtype="float32", rows=2.0, width=4)
        with pytest.raises(TypeError, match="2 of 3 refits have attention"):
            costs.attention(
                dtype="float32", num_sequences=2.0, length=8, num_heads=2, head_dim=4,
                backward=False,
            )  # fmt: skip
        assert costs.rows_op(op="gelu", dtype="float32", rows=2.0, width=4) is None
