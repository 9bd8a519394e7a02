"""Steps in chunks: as many GEMMs are priced as the layer multiplies."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moetune import MoELayer
from moetune.domain.costs import LinearCost
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import SAFE_DECISION
from moetune.solve.layer.costs import LayerCosts, layer_costs
from moetune.solve.layer.times import step_time
from tests.solve.costs_by_hand import LinearCosts

NUM_EXPERTS = 3
NUM_TOKENS = 96
_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_}


class Products(TorchDispatchMode):
    """Counts matrix products whose factors are as wide as the experts."""

    def __init__(self, d_hidden: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.d_hidden, self.number = d_hidden, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        if func.overloadpacket in _PRODUCTS:
            sizes = {size for arg in args if isinstance(arg, torch.Tensor) for size in arg.shape}
            self.number += self.d_hidden in sizes
        return func(*args, **(kwargs or {}))


def _layer(**costs: object) -> LayerCosts:
    """Return costs of a start for each GEMM, and of nothing else."""
    free = LinearCost(alpha_seconds=0.0, beta_seconds=0.0)
    start = LinearCost(alpha_seconds=1.0, beta_seconds=0.0)
    by_hand = LinearCosts(gemm_cost=start, transfer_cost=free, has_points=True, **costs)  # type: ignore[arg-type]
    shape = LayerShape(d_model=16, d_hidden=40, num_experts=NUM_EXPERTS, top_k=1, activation="relu")
    workload = Workload(layer=shape, world_size=1, tokens_per_rank=NUM_TOKENS, dtype="float32")
    return layer_costs(workload=workload, costs=by_hand)


@pytest.mark.parametrize("degree", [1, 3, 4])
def test_a_step_is_priced_with_as_many_gemms_as_the_layer_multiplies(degree: int) -> None:
    torch.manual_seed(0)
    layer = MoELayer(
        d_model=16, d_hidden=40, num_experts=NUM_EXPERTS, top_k=1, activation="relu", bias=False
    )
    layer.pin(SAFE_DECISION.with_degree(degree))
    # Each expert has a token of every chunk.
    x = torch.randn(NUM_TOKENS, 16, requires_grad=True)
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[:, 0] = torch.tensor([1.0, 0.0, -1.0])
        x[:, 0] = torch.tensor([9.0, 0.0, -9.0]).repeat(NUM_TOKENS // 3)
        layer.gate.weight[1, 1], x[:, 1] = 1.0, 1.0
    with Products(40) as counted:
        layer(x).sum().backward()
    predicted = step_time(costs=_layer(), tokens=NUM_TOKENS, degree=degree).seconds
    assert counted.number == pytest.approx(NUM_EXPERTS * predicted)
