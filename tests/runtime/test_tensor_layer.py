"""Experts inside a tensor-parallel group, against the dense reference and `MoELayer`."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from moetune.app.trace import overlap_of
from moetune.domain.errors import InputError, RankMismatchError
from moetune.domain.layer import ExpertParallel, LayerKey, LayerShape, Workload
from moetune.measure.steps import random_steps
from moetune.runtime.moe.layer import MoELayer, TensorExpertLayer
from moetune.runtime.plans.book import PlanBook
from tests.cuda_kit import FakeCuda, MirrorWorld
from tests.ranks import run_ranks
from tests.runtime.gpu_runs import GPU, decision, step
from tests.runtime.plans import small_plan
from tests.runtime.poison import poison
from tests.runtime.reference import dense_moe
from tests.runtime.slow_link import SlowLink
from tests.runtime.workers import (
    AUX_SCALE,
    D_HIDDEN,
    D_MODEL,
    NUM_EXPERTS,
    RELATIVE,
    Dense,
    all_weights,
    check_against_dense,
    relative_error,
)

TOP_K_AND_DEGREE = ((2, 1), (1, 3), (2, 5))


def tensor_layer(activation: str = "gelu", top_k: int = 1) -> TensorExpertLayer:
    torch.manual_seed(5)
    return TensorExpertLayer(
        D_MODEL,
        D_HIDDEN,
        NUM_EXPERTS,
        top_k,
        activation=activation,  # type: ignore[arg-type]  # the grid holds plain strings
        dtype=torch.float64,
    )


def same_inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100)
    size = (num_tokens, D_MODEL)
    x, dy = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in "xy")
    return x, dy


def agree() -> None:
    """What two ranks show in one launch."""
    _hold_equal_bits()
    checkpoints_fit_each_other()
    _refuse_other_inputs()


def equal_dense() -> None:
    """Hold the layer against the dense reference, on this number of ranks."""
    few = dist.is_initialized() and dist.get_world_size() > 2
    activations = ("relu", "swiglu") if few else ("relu", "gelu", "silu", "swiglu")
    grid = itertools.product(activations, TOP_K_AND_DEGREE, (17, 2, 0))
    for activation, (top_k, degree), num_tokens in grid:
        layer = tensor_layer(activation, top_k)
        layer.pin(decision(degree=degree))
        poison(layer)
        check_against_dense(layer, dense_of_group(layer, num_tokens))


def dense_of_group(layer: TensorExpertLayer, num_tokens: int) -> Dense:
    """Return the reference of all tokens."""
    weights, (x, dy) = all_weights(layer), same_inputs(num_tokens)
    x.requires_grad_()
    y, aux, dropped = dense_moe(
        x, weights, top_k=layer.shape.top_k, activation=layer.shape.activation,
        normalize=layer.gate.normalize_topk, capacity_factor=None,
    )  # fmt: skip
    (torch.sum(y * dy) + AUX_SCALE * aux).backward()
    assert x.grad is not None
    assert weights.gate.grad is not None
    return Dense(
        weights=weights, x=x.detach(), dy=dy, y=y.detach(), aux=aux.detach(),
        num_dropped=dropped, x_grad=x.grad, gate_grad=weights.gate.grad,
    )  # fmt: skip


def _hold_equal_bits() -> None:
    """Output, gradient of x and gradient of the gate are the same on all ranks to the last bit."""
    layer = tensor_layer("gelu", 2)
    layer.pin(decision(degree=3))
    x, dy = same_inputs(40)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    assert layer.gate.weight.grad is not None
    for mine in (y.detach(), x.grad, layer.gate.weight.grad):
        everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, mine.contiguous())
        assert all(torch.equal(value, mine) for value in everyones)


def checkpoints_fit_each_other() -> None:
    """The same weights in both kinds of layer make the same output and gradients."""
    torch.manual_seed(7)
    moe = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, dtype=torch.float64, pipeline=2)
    torch.manual_seed(8)
    tensor = TensorExpertLayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, dtype=torch.float64, pipeline=3)
    tensor.load_state_dict(moe.state_dict())
    num_ranks, rank = moe.communicator.num_ranks, moe.communicator.rank
    x, dy = same_inputs(8 * num_ranks)
    mine = slice(8 * rank, 8 * rank + 8)
    sharded = x[mine].clone().requires_grad_()
    x.requires_grad_()
    y, wanted = tensor(x), moe(sharded)
    assert relative_error(y[mine], wanted) <= RELATIVE
    wanted.backward(dy[mine])
    y.backward(dy)
    assert x.grad is not None
    assert sharded.grad is not None
    assert relative_error(x.grad[mine], sharded.grad) <= RELATIVE
    for (name, parameter), other in zip(
        moe.experts.named_parameters(), tensor.experts.parameters(), strict=True
    ):
        assert parameter.grad is not None
        assert other.grad is not None
        assert relative_error(other.grad, parameter.grad) <= RELATIVE, name
    gate_grad = moe.gate.weight.grad
    assert gate_grad is not None
    assert tensor.gate.weight.grad is not None
    if num_ranks > 1:
        dist.all_reduce(gate_grad)
    assert relative_error(tensor.gate.weight.grad, gate_grad) <= RELATIVE
    moe.load_state_dict(tensor.state_dict())


def _refuse_other_inputs() -> None:
    rank = dist.get_rank()
    layer = tensor_layer()
    with pytest.raises(RankMismatchError, match="tokens on every rank"):
        layer(torch.randn(3 + rank, D_MODEL, dtype=torch.float64))
    x = torch.ones(4, D_MODEL, dtype=torch.float64)
    before = layer(x)
    with pytest.raises(RankMismatchError, match=r"rank 1: error"):
        layer(x if rank == 0 else x[:, 1:])
    for degree in (1, 3):  # others than the one that the last call counted for
        layer.pin(decision(degree=degree))
        assert relative_error(layer(x), before) <= RELATIVE


LAYER = LayerShape(d_model=4, d_hidden=8, num_experts=2)


def test_one_rank_equals_dense() -> None:
    equal_dense()


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_equal_dense(num_ranks: int) -> None:
    assert run_ranks(equal_dense, num_ranks) == [""] * num_ranks


@pytest.mark.dist
def test_ranks_are_equal_to_the_bit_and_fit_the_other_layer_and_refuse_other_inputs() -> None:
    assert run_ranks(agree, 2) == ["", ""]


@pytest.mark.dist
def test_four_ranks_are_the_other_layer() -> None:
    assert run_ranks(checkpoints_fit_each_other, 4) == [""] * 4


def test_one_rank_is_the_other_layer() -> None:
    checkpoints_fit_each_other()


def test_chunks_are_computed_while_others_are_summed_forward_and_backward() -> None:
    layer = LayerShape(d_model=128, d_hidden=512, num_experts=2)
    workload = Workload(layer=layer, world_size=1, tokens_per_rank=512, expert_parallel="tensor")
    steps = random_steps(workload, device=torch.device("cpu"), communicator=SlowLink(0.02))
    spans = steps.record(decision(degree=4))
    assert [span.name for span in spans].count("sum") == 2 * 4
    overlap = overlap_of(spans)
    assert overlap.forward > 0
    assert overlap.backward > 0


def test_what_would_drop_pairs_or_reuse_memory_is_refused() -> None:
    for options in (
        {"capacity_factor": 1.0}, {"memory_reuse": "S4"}, {"placement": (1, 0)},
    ):  # fmt: skip
        (name,) = options
        with pytest.raises(InputError, match=f"{name} is not available in a tensor-parallel group"):
            TensorExpertLayer(4, 8, 2, **options)


@pytest.mark.parametrize("wanted", ["all_to_all", "tensor"])
def test_a_layer_runs_only_plans_for_its_way_to_share_experts(wanted: ExpertParallel) -> None:
    other: ExpertParallel = "tensor" if wanted == "all_to_all" else "all_to_all"
    kind = MoELayer if wanted == "all_to_all" else TensorExpertLayer
    fitting, foreign = (
        small_plan(layer=LAYER, world_size=1, expert_parallel=each) for each in (wanted, other)
    )
    with pytest.raises(InputError, match=f"--expert-parallel {wanted}"):
        kind(4, 8, 2, plan=foreign)
    layer = kind(4, 8, 2, plan=fitting)
    layer(torch.randn(40, 4))
    assert layer.decision == fitting.decide(40)
    key = LayerKey(layer=LAYER, expert_parallel=wanted, num_ranks=1, dtype="float32")
    assert PlanBook([foreign]).plans_for(key) == ()
    assert PlanBook([foreign, fitting]).plans_for(key) == [fitting]


def test_ranks_that_share_the_experts_look_up_a_plan_of_a_whole_model() -> None:
    plan = small_plan(layer=LAYER, world_size=2, expert_parallel="tensor")
    inputs = replace(plan.inputs, world_size=8)
    layout = replace(plan.layout, dp=2, pp=2)
    whole = replace(plan, id=inputs.plan_id, inputs=inputs, layout=layout)
    book = PlanBook([whole])
    key = partial(LayerKey, layer=LAYER, expert_parallel="tensor", dtype="float32")
    assert book.plans_for(key(num_ranks=2)) == [whole]
    assert book.plans_for(key(num_ranks=8)) == ()


def test_sums_of_many_choices_are_rounded_once_as_behind_a_dispatch() -> None:
    layers = []
    for kind in (MoELayer, TensorExpertLayer):
        torch.manual_seed(0)
        layers.append(kind(16, 24, 6, 5, dtype=torch.bfloat16, pipeline=2))
    x = torch.randn(40, 16).bfloat16()
    outputs = [layer(x) for layer in layers]
    assert torch.equal(*outputs)


def test_a_gpu_adds_nothing_up_by_atomics_where_their_order_is_seen() -> None:
    with FakeCuda() as cuda, MirrorWorld(cuda, rank=1):
        layer = TensorExpertLayer(8, 16, 8, 4, device=GPU, pipeline=2)
        step(layer)
        assert not [call for call in cuda.operations if call.label.startswith("index_add")]
