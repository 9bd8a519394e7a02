"""A layer of real ranks on two nodes, whose rows travel in two steps."""

import dataclasses
import os

import pytest
import torch

from moetune.domain.errors import InputError
from moetune.domain.plan import Decision, Plan
from moetune.runtime.moe.layer import MoELayer
from moetune.workflows.steps import measure_steps, random_steps
from moetune.workflows.verify import _decisions

DECISIONS = (
    Decision(forward_degree=1, backward_degree=1),
    Decision(forward_degree=3, backward_degree=2),
    Decision(forward_degree=3, backward_degree=4, strategy="S2", order="interleaved"),
    Decision(forward_degree=2, backward_degree=2, strategy="S4", order="interleaved"),
)


def results(layer: MoELayer, x_TD: torch.Tensor) -> list[torch.Tensor]:
    x_TD = x_TD.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y_TD = layer(x_TD)
    (y_TD.sin() * torch.linspace(0.5, 2.0, y_TD.shape[1])).sum().backward()
    grads = [x_TD.grad, *(parameter.grad for parameter in layer.parameters())]
    assert all(grad is not None for grad in grads)
    return [y_TD.detach(), *(grad.clone() for grad in grads if grad is not None)]


def hierarchical_layers_equal_flat_ones() -> None:
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks // 2)
    torch.manual_seed(3)
    layer = MoELayer(8, 16, 2 * num_ranks, top_k=2)
    layer.poison_buffers()
    generator = torch.Generator().manual_seed(rank)
    for num_tokens in (24 + 5 * rank, 0 if rank == 1 else 7):
        x_TD = torch.randn(num_tokens, 8, generator=generator)
        for flat in DECISIONS:
            layer.pin(flat)
            wanted = results(layer, x_TD)
            layer.pin(dataclasses.replace(flat, dispatcher="hierarchical"))
            found = results(layer, x_TD)
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def a_plan_is_followed(plan: Plan) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    layer = plan.inputs.layer
    sizes = (layer.d_model, layer.d_hidden, layer.num_experts, layer.top_k)
    moe = MoELayer(*sizes, plan=plan)
    moe(torch.zeros(plan.tokens_per_rank, layer.d_model)).sum().backward()
    assert moe.decision.dispatcher == plan.pipeline.dispatcher == "hierarchical"
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    alone = MoELayer(*sizes, plan=plan)
    with pytest.raises(InputError, match="the group has 4 ranks on 1 node of 4"):
        alone(torch.zeros(plan.tokens_per_rank, layer.d_model))


def both_are_verified(plan: Plan) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    decisions = _decisions(plan)
    assert [one.dispatcher for one in decisions].count("flat") == 1
    steps = random_steps(plan.workload, device=torch.device("cpu"))
    planned = plan.decide(plan.tokens_per_rank)
    chosen = [next(one for one in decisions if one.dispatcher == "flat"), planned]
    found = measure_steps(steps, chosen, num_rounds=1)
    assert [one.decision for one in found] == chosen
    assert all(one.deviation < 1e-5 for one in found)
    spans = steps.record(planned)
    assert {span.name for span in spans} >= {"dispatch", "experts", "combine"}


def every_check(plan: Plan) -> None:
    hierarchical_layers_equal_flat_ones()
    a_plan_is_followed(plan)
    both_are_verified(plan)
