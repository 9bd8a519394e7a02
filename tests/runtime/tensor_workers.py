"""What ranks do in the tests of the tensor-parallel experts."""

import itertools

import pytest
import torch
import torch.distributed as dist

from moetune.comm.gloo import communicator_of
from moetune.domain.errors import RankMismatchError
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Decision
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.tensor_layer import TensorExpertLayer
from moetune.runtime.plans.book import PlanBook
from tests.runtime.plans import small_plan
from tests.runtime.reference import dense_moe
from tests.runtime.workers import (
    AUX_SCALE,
    D_HIDDEN,
    D_MODEL,
    NUM_EXPERTS,
    RELATIVE,
    all_weights,
    relative_error,
)

TOP_K_AND_DEGREE = ((2, 1), (1, 3), (2, 5))
SHARDS = {
    1: ((9,), (0,)),
    2: ((9, 4), (5, 5), (0, 3), (0, 0)),
    4: ((5, 1, 0, 7), (3, 3, 3, 3), (0, 0, 0, 2), (0, 0, 0, 0)),
}


def tensor_layer(
    activation: str = "gelu", top_k: int = 1, *, sequence_parallel: bool = False
) -> TensorExpertLayer:
    torch.manual_seed(5)
    return TensorExpertLayer(
        D_MODEL,
        D_HIDDEN,
        NUM_EXPERTS,
        top_k,
        activation=activation,  # type: ignore[arg-type]  # the grid holds plain strings
        dtype=torch.float64,
        sequence_parallel=sequence_parallel,
    )


def same_inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100)
    size = (num_tokens, D_MODEL)
    x, dy = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in "xy")
    return x, dy


def equal_dense() -> None:
    """Every kind of layer against the dense reference, on this number of ranks."""
    _equal_dense_everywhere()
    _equal_dense_in_shards()


def agree() -> None:
    """What two ranks show in one launch."""
    _hold_equal_bits()
    experts_without_tokens_have_gradients()
    checkpoints_fit_each_other()
    _refuse_other_inputs()
    _look_plans_up_by_the_tokens_of_all_shards()
    _know_when_a_reduce_scatter_ends()


def _equal_dense_everywhere() -> None:
    few = dist.is_initialized() and dist.get_world_size() > 2
    activations = ("relu", "swiglu") if few else ("relu", "gelu", "silu", "swiglu")
    grid = itertools.product(activations, TOP_K_AND_DEGREE, (17, 2, 0))
    for activation, (top_k, degree), num_tokens in grid:
        layer = tensor_layer(activation, top_k)
        layer.pin(Decision(forward_degree=degree, backward_degree=6 - degree))
        layer.poison_buffers()
        check_against_dense(layer, num_tokens, slice(0, num_tokens))


def _equal_dense_in_shards() -> None:
    """With a shard of the tokens on each rank, also uneven ones and none."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    for (top_k, degree), shards in itertools.product(TOP_K_AND_DEGREE, SHARDS[num_ranks]):
        layer = tensor_layer("swiglu" if degree == 3 else "relu", top_k, sequence_parallel=True)
        layer.pin(Decision(forward_degree=degree, backward_degree=6 - degree))
        layer.poison_buffers()
        first = sum(shards[: layer.communicator.rank])
        own = slice(first, first + shards[layer.communicator.rank])
        check_against_dense(layer, sum(shards), own)


def check_against_dense(layer: TensorExpertLayer, num_tokens: int, own: slice) -> None:
    """Hold output, aux loss and every gradient against the dense reference.

    Args:
        own: the tokens that this rank gives to the layer.
    """
    x, dy = same_inputs(num_tokens)
    wanted_x = x.clone().requires_grad_()
    x = x[own].clone().requires_grad_()
    y = layer(x)
    (torch.sum(y * dy[own]) + AUX_SCALE * layer.aux_loss).backward()

    weights = all_weights(layer)
    wanted, aux, _ = dense_moe(
        wanted_x, weights, top_k=layer.shape.top_k, activation=layer.shape.activation,
        normalize=layer.gate.normalize_topk, capacity_factor=None,
    )  # fmt: skip
    (torch.sum(wanted * dy) + AUX_SCALE * aux).backward()
    assert relative_error(y, wanted[own]) <= RELATIVE
    assert relative_error(layer.aux_loss, aux) <= RELATIVE
    assert layer.num_dropped == 0
    assert x.grad is not None
    assert wanted_x.grad is not None
    assert relative_error(x.grad, wanted_x.grad[own]) <= RELATIVE
    assert layer.gate.weight.grad is not None
    assert weights.gate.grad is not None
    assert relative_error(layer.gate.weight.grad, weights.gate.grad) <= RELATIVE
    rank, local = layer.communicator.rank, layer.experts.local_experts
    mine = slice(rank * local, (rank + 1) * local)
    for name, parameter in layer.experts.named_parameters():
        assert parameter.grad is not None, name
        assert relative_error(parameter.grad, getattr(weights, name).grad[mine]) <= RELATIVE, name


def _hold_equal_bits() -> None:
    """Output, gradient of x and gradient of the gate are the same on all ranks to the last bit."""
    layer = tensor_layer("gelu", 2)
    layer.pin(Decision(forward_degree=3, backward_degree=2))
    x, dy = same_inputs(40)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    assert layer.gate.weight.grad is not None
    for mine in (y.detach(), x.grad, layer.gate.weight.grad):
        everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, mine.contiguous())
        assert all(torch.equal(one, mine) for one in everyones)


def experts_without_tokens_have_gradients() -> None:
    layer = tensor_layer("gelu", 1)
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[0] = 1
    x = torch.rand(6, D_MODEL, dtype=torch.float64)
    layer(x).sum().backward()
    for name, parameter in layer.experts.named_parameters():
        assert parameter.grad is not None, name
        busy = parameter.grad.flatten(1).abs().sum(1) > 0
        expected = [expert == 0 and layer.communicator.rank == 0 for expert in range(len(busy))]
        assert busy.tolist() == expected, name


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
    for (name, one), other in zip(
        moe.experts.named_parameters(), tensor.experts.parameters(), strict=True
    ):
        assert one.grad is not None
        assert other.grad is not None
        assert relative_error(other.grad, one.grad) <= RELATIVE, name
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
    for degrees in ((1, 1), (3, 2)):  # others than those that the last call counted for
        layer.pin(Decision(forward_degree=degrees[0], backward_degree=degrees[1]))
        assert relative_error(layer(x), before) <= RELATIVE
    one_of_each = tensor_layer(sequence_parallel=rank == 1)
    with pytest.raises(RankMismatchError, match="shards of the tokens"):
        one_of_each(torch.randn(3, D_MODEL, dtype=torch.float64))


def _look_plans_up_by_the_tokens_of_all_shards() -> None:
    plans = [
        small_plan(
            layer=LayerShape(
                d_model=D_MODEL, d_hidden=D_HIDDEN, num_experts=NUM_EXPERTS, activation="gelu"
            ),
            tokens=40, dtype="float64", degrees=degrees, ranges=((1, 10, 1, 2), (11, 40, *degrees)),
            expert_parallel="tensor", sequence_parallel=in_shards,
        )
        for in_shards, degrees in ((False, (5, 6)), (True, (4, 3)))
    ]  # fmt: skip
    book, rank = PlanBook(plans), dist.get_rank()
    for num_tokens, degrees in (((25, 15), (4, 3)), ((2, 8), (1, 2)), ((20, 0), (4, 3))):
        layer = TensorExpertLayer(
            D_MODEL, D_HIDDEN, NUM_EXPERTS, dtype=torch.float64, planbook=book,
            sequence_parallel=True,
        )  # fmt: skip
        layer(torch.randn(num_tokens[rank], D_MODEL, dtype=torch.float64))
        decision = layer.decision
        assert (decision.forward_degree, decision.backward_degree) == degrees


def _know_when_a_reduce_scatter_ends() -> None:
    """gloo has no future of its own for it, and recorded timelines need one."""
    communicator = communicator_of(None)
    shards, total = torch.arange(6.0).split([2, 4]), torch.zeros(2 + 2 * communicator.rank)
    transfer = communicator.reduce_scatter(total, shards, "a sum")
    future = transfer.future()
    assert future is not None
    future.wait()
    transfer.wait()
    assert torch.equal(total, 2 * shards[communicator.rank])
