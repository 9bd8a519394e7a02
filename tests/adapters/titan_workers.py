"""torchtitan's routed experts in moetune's layer against dense float64, on one and on two ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import moetune
from moetune.domain.document import canonical_json
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Decision
from tests.adapters import titan_interface

titan_interface.provide()  # stand-ins where torchtitan is not installed

from torchtitan.models.common import moe, token_dispatcher  # noqa: E402 - behind `provide`
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts  # noqa: E402 - behind `provide`

from moetune.adapters import torchtitan as adapter  # noqa: E402 - behind `provide`
from tests.runtime.plans import small_plan  # noqa: E402 - behind `provide`

SHAPE = LayerShape(d_model=6, d_hidden=10, num_experts=4, top_k=2, activation="swiglu")
SIZES = {"dim": 6, "hidden_dim": 10, "num_experts": 4}
BATCH, LENGTH = 3, 5


def config_of(
    experts: Any = moe.GroupedExperts, dispatcher: Any = token_dispatcher.AllToAllTokenDispatcher
) -> Any:
    return moe.RoutedExperts.Config(
        inner_experts=experts.Config(**SIZES),
        token_dispatcher=dispatcher.Config(num_experts=4, top_k=2),
    )


def build(experts: Any = moe.GroupedExperts, plan: str | None = None) -> Any:
    """Return routed experts with the same values on every rank."""
    module = adapter.routed_experts(config_of(experts), plan=plan).build().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return module


def inputs(rank: int) -> tuple[torch.Tensor, ...]:
    """Return a rank's tokens, scores, choices, counts, and the gradient of its results."""
    generator = torch.Generator().manual_seed(rank + 1)
    x, dy = torch.randn(2, BATCH, LENGTH, 6, generator=generator, dtype=torch.float64)
    scores = torch.rand(BATCH, LENGTH, 2, generator=generator, dtype=torch.float64)
    chosen = torch.rand(BATCH, LENGTH, 4, generator=generator).argsort(-1)[..., :2]
    return x, scores, chosen, chosen.flatten().bincount(minlength=4), dy


def dense(experts: nn.Module, x: torch.Tensor, scores: torch.Tensor, chosen: Any) -> torch.Tensor:
    """Return every expert's results for all tokens, weighted: torchtitan's formulas, unrounded."""
    values: Any = dict(experts.named_parameters())
    y = torch.zeros_like(x)
    for e in range(4):
        if "w1_EFD" in values:
            w1, w2, w3 = (values[name][e] for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
            out = (nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
        else:
            both = x @ values["mlp1_weight_EGD"][e].T + values["mlp1_bias_EG"][e]
            g, u = both[..., ::2].clamp(max=7), both[..., 1::2].clamp(-7, 7)
            hidden = g * torch.sigmoid(1.702 * g) * (u + 1)
            out = hidden @ values["mlp2_weight_EDF"][e].T + values["mlp2_bias_ED"][e]
        y = y + ((chosen == e) * scores).sum(-1, keepdim=True) * out
    return y


def equal_dense(experts: Any, plan: str | None = None) -> None:
    """Hold a step of this rank against the dense one of all ranks' tokens."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    whole, mine = build(experts), build(experts, plan)
    if num_ranks > 1:
        spread(mine)
    wanted: tuple[Any, ...] = ()
    for each in range(num_ranks):
        x, scores, chosen, _, dy = inputs(each)
        x.requires_grad_()
        scores.requires_grad_()
        y = dense(whole.inner_experts, x, scores, chosen)
        y.backward(dy)
        if each == rank:
            wanted = y.detach(), x.grad, scores.grad
    for degree in (None, 1, 3):
        mine.zero_grad()
        if degree is not None:
            mine.moetune.pin(Decision(forward_degree=degree, backward_degree=degree))
        x, scores, chosen, counts, dy = inputs(rank)
        y = mine(x.requires_grad_(), scores.requires_grad_(), chosen, counts)
        y.backward(dy)
        for value, other in zip((y, x.grad, scores.grad), wanted, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-10)
        for (name, part), parameter in zip(
            mine.inner_experts.named_parameters(), whole.inner_experts.parameters(), strict=True
        ):
            grad = part.grad
            assert type(grad) is type(part.data), name
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-10, atol=1e-10)


def spread(module: Any) -> None:
    """Shard experts as torchtitan does, as DTensors of all of them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    module.parallelize(titan_interface.dims(mesh, ep=mesh.size()))
    experts = module.inner_experts
    for name, value in list(experts.named_parameters()):
        sharded = distribute_tensor(value.detach(), mesh, [Shard(0)])
        setattr(experts, name, nn.Parameter(sharded))


def two_ranks(folder: str) -> None:
    """Equal the dense experts, with plans and without, and refuse what ranks cannot run."""
    for experts in (moe.GroupedExperts, GptOssGroupedExperts):
        equal_dense(experts)
    plan = plan_of(folder, 2)
    equal_dense(moe.GroupedExperts, plan)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    parallel = partial(titan_interface.dims, mesh, ep=2)
    other = plan if dist.get_rank() else None
    with pytest.raises(moetune.RankMismatchError, match="rank 0: no plan"):
        build(plan=other).parallelize(parallel())


def plan_of(folder: str, num_ranks: int) -> str:
    """Return the path of a plan of several chunks in float64."""
    path = Path(folder) / f"plan-{num_ranks}-{dist.get_rank() if dist.is_initialized() else 0}.json"
    plan = small_plan(layer=SHAPE, world_size=num_ranks, dtype="float64", tokens=15)
    path.write_text(canonical_json(plan), encoding="utf-8")
    return str(path)
