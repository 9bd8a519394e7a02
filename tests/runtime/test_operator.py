"""A layer in compiled blocks: one graph, the eager numbers, no step left over, errors by name."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from moetune.domain.errors import InputError, RankMismatchError
from moetune.domain.plan import Decision
from moetune.runtime.moe import operator
from moetune.runtime.moe.layer import ExpertLayer, MoELayer, TensorExpertLayer
from tests.ranks import run_ranks
from tests.runtime.poison import poison

WIDTH, EXACT = 8, 1e-12
THOROUGH = pytest.mark.thorough
DECISIONS = (
    Decision(forward_degree=1, backward_degree=1),
    Decision(forward_degree=3, backward_degree=3),
    *(
        Decision(forward_degree=2, backward_degree=2, strategy=strategy)
        for strategy in ("S1", "S2", "S3", "S4")
    ),
)


class Block(nn.Module):
    """What a transformer has around its experts."""

    def __init__(self, kind: type[ExpertLayer] = MoELayer, **options: Any) -> None:
        super().__init__()
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(WIDTH, dtype=torch.float64)
        self.moe = kind(WIDTH, 12, 4, 2, activation="swiglu", dtype=torch.float64, **options)
        poison(self.moe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.moe(self.norm(x))
        return y


def tokens(num: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def whole_graph(net: nn.Module, backend: str = "aot_eager") -> Any:
    return torch.compile(net, fullgraph=True, backend=backend, dynamic=True)


def step(block: Block, run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs, and all gradients, also those of the balance loss."""
    y = run(x)
    wanted = [each for each in (x, *block.parameters()) if each.requires_grad]
    loss = y.square().sum() + 0.1 * block.moe.aux_loss
    return [y.detach(), *torch.autograd.grad(loss, wanted)]


def same(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for value, expected in zip(actual, wanted, strict=True):
        torch.testing.assert_close(value, expected, rtol=EXACT, atol=EXACT)


def equal_eager(block: Block, backend: str, *decisions: Decision, uneven: int = 0) -> None:
    """One graph has the numbers of the block for any plan and any number of tokens."""
    counters.clear()
    whole = whole_graph(block, backend)
    for num, decision in enumerate(decisions, 9):
        block.moe.pin(decision)
        x = tokens(num + 3 * uneven, seed=uneven)
        same(step(block, whole, x), step(block, block, x))
        assert block.moe.decision == decision
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("aot_eager", {}),
        pytest.param("aot_eager", {"capacity_factor": 0.6}, marks=THOROUGH),
        pytest.param("inductor", {}, marks=THOROUGH),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # which inductor uses
def test_one_rank_has_the_numbers_of_eager_blocks(backend: str, options: Any) -> None:
    equal_eager(Block(**options), backend, *DECISIONS)


def two_ranks(backend: str) -> None:
    rank = dist.get_rank()
    block = Block()
    equal_eager(block, backend, *DECISIONS, uneven=rank)
    run: Any = whole_graph(block, backend) if rank else block
    step(block, run, tokens(5))  # ranks need not both be compiled
    equal_eager(Block(TensorExpertLayer), backend, *DECISIONS[:2])
    layer = Block().moe
    for bad in (torch.ones(5, 3, dtype=torch.float64), torch.ones(5, WIDTH)):
        with pytest.raises(RankMismatchError, match=r"error: x (has shape \(5, 3\)|is .*float32)"):
            whole_graph(layer, "eager")(bad if rank else tokens(5).detach())


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=THOROUGH)])
def test_two_ranks_have_the_numbers_and_the_errors_of_eager_blocks(backend: str) -> None:
    assert run_ranks(two_ranks, 2, backend) == [""] * 2


def test_steps_end_with_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = weakref.WeakSet[object]()

    class Counted(operator._SavedStep):
        def __init__(self, *values: Any) -> None:
            super().__init__(*values)
            alive.add(self)

    monkeypatch.setattr(operator, "_SavedStep", Counted)
    block = Block()
    whole = whole_graph(block)
    several = [tokens(num) for num in (6, 6, 9)]
    for decision in DECISIONS:
        block.moe.pin(decision)
        wanted = [torch.autograd.grad(block(x).square().sum(), x) for x in several]
        losses = [whole(x).square().sum() for x in several]
        assert len(alive) == len(several)
        for x, each in zip(several[::-1], wanted[::-1], strict=True):
            same(list(torch.autograd.grad(losses.pop(), x)), list(each))
        whole(several[0])  # without a backward pass
        with torch.no_grad():
            same([whole(several[0])], [block(several[0])])
        gc.collect()
        assert not alive
    block.moe.experts.w1.requires_grad_(False)  # noqa: FBT003 - torch's own
    same(step(block, whole, several[0]), step(block, block, several[0]))


def test_copies_are_separate_layers_and_end() -> None:
    block = Block()
    other = copy.deepcopy(block)
    with torch.no_grad():
        other.moe.experts.w2.zero_()
    x = tokens(6)
    assert torch.equal(whole_graph(other, "eager")(x), x)
    layer = weakref.ref(other.moe)
    del other
    torch._dynamo.reset()
    gc.collect()
    assert layer() is None


def test_what_an_operator_lacks_is_refused() -> None:
    layer = Block().moe
    with saved_tensors_hooks(torch.clone, lambda saved: saved):
        y = whole_graph(layer)(tokens(6))
        with pytest.raises(InputError, match="was saved for the backward pass as a copy"):
            y.sum().backward()


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_step_keeps_none_of_its_inputs_memory(top_k: int) -> None:
    """Inductor gives it to other tensors behind the operator."""
    layer = MoELayer(WIDTH, 12, 4, top_k, activation="swiglu", dtype=torch.float64)
    x, w = tokens(9).detach(), layer.experts
    routing = layer.gate(x)
    inputs = [x, routing.weights_TK.detach(), routing.experts_TK]
    parameters = [
        None if each is None else each.detach() for each in (w.w1, w.b1, w.w2, w.b2, w.w3)
    ]
    needs = [each is not None for each in parameters]
    for decision in DECISIONS:
        layer.pin(decision)
        grads = []
        for is_reused in (False, True):
            given = [each.clone() for each in inputs]
            y, saved = torch.ops.moetune.routed_experts(
                layer._handle, *given, None, *parameters, "", "", torch.is_grad_enabled()
            )
            for each in given if is_reused else ():
                each.zero_()
            grads.append(
                torch.ops.moetune.routed_experts_backward(
                    saved, torch.ones_like(y), *inputs[:2], *parameters, needs
                )
            )
        same(grads[1], grads[0])
        assert all(bool(each.any()) for each in grads[0])
