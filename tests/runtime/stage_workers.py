"""What ranks do in the tests of the stages, and what one process does in their place.

B sequences, S tokens each.
"""

import datetime as dt
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from examples.language_model import (
    LanguageModel,
    next_token_loss,
    staged_language_model,
)
from moetune.domain.layer import ExpertParallel, LayerShape
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.runtime.moe.expert_layer import ExpertLayer
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.local_parts import is_dtensor, local_part
from moetune.runtime.parallel.groups import join
from moetune.runtime.parallel.stages import Stages

SEED = 3
BATCH, LENGTH = 8, 6
SAME = 1e-9
FAR_FROM_A_TIE = 1e-7
LEARNING_RATE, MOMENTUM = 0.1, 0.9
VOCABULARY = 257
"""Divides by no number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout, how its batch is cut, and the losses of one process alone."""

    layout: Layout
    shape: Transformer
    losses: tuple[float, ...]
    num_micro_batches: int = 1
    stages_per_rank: int = 1


def layout_of(
    kind: ExpertParallel, *, dp: int = 1, ep: int = 1, tp: int = 1, pp: int = 1
) -> Layout:
    return Layout(expert_parallel=kind, dp=dp, ep=ep, tp=tp, pp=pp)


def shape_of(*, num_blocks: int, moe_every: int, top_k: int = 1) -> Transformer:
    return Transformer(
        moe=LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=top_k),
        num_layers=num_blocks,
        num_heads=4,
        length=LENGTH,
        vocab_size=VOCABULARY,
        moe_every=moe_every,
    )


def text_of(step: int) -> torch.Tensor:
    """Return the global batch (B, S + 1): one of two, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step % 2)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def whole_model(shape: Transformer) -> LanguageModel:
    layer = shape.moe

    def make_moe() -> MoELayer:
        sizes = layer.d_model, layer.d_hidden, layer.num_experts, layer.top_k
        return MoELayer(*sizes, pipeline=False)

    model = LanguageModel(shape, make_moe).double()
    model.reset_parameters(SEED)
    return model


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return one whose steps grow with the gradients: a wrong scale must show."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def losses_of_one_process(shape: Transformer, num_steps: int) -> tuple[float, ...]:
    """Train the whole model on whole batches; no choice of experts may be near a tie."""
    model = whole_model(shape)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(num_steps):
        text_BS = text_of(step)
        with _choices_are_clear(model):
            loss = next_token_loss(model(text_BS[:, :-1]), text_BS[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return tuple(losses)


@contextmanager
def _choices_are_clear(model: torch.nn.Module) -> Iterator[None]:
    """Check that layouts, which round differently, cannot choose other experts."""

    def check(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, ExpertLayer)
        probabilities = torch.softmax(inputs[0] @ layer.gate.weight.T, dim=-1)
        best = probabilities.topk(layer.shape.top_k + 1, dim=-1).values
        assert float((best[..., :-1] - best[..., 1:]).detach().min()) > FAR_FROM_A_TIE

    layers = [module for module in model.modules() if isinstance(module, ExpertLayer)]
    hooks = [layer.register_forward_pre_hook(check) for layer in layers]
    yield
    for hook in hooks:
        hook.remove()


def stages_of(case: Case, balance: float = 0.0) -> Stages:
    return staged_language_model(
        case.shape,
        join(case.layout, timeout=dt.timedelta(seconds=30)),
        num_sequences=BATCH // case.layout.dp,
        num_micro_batches=case.num_micro_batches,
        stages_per_rank=case.stages_per_rank,
        seed=SEED,
        dtype=torch.float64,
        balance=balance,
        pipeline=False,
    )


def backward(stages: Stages, step: int) -> torch.Tensor:
    text_BS = text_of(step).chunk(stages.ranks.layout.dp)[stages.ranks.replica]
    return stages.backward(text_BS[:, :-1], text_BS[:, 1:])


def batches_receive_first(case: Case) -> None:
    """Behind a late rank's sends on gloo, its neighbours would wait until they may send."""
    orders: list[list[bool]] = []
    issue = dist.batch_isend_irecv

    def issued(ops: list[dist.P2POp]) -> list[dist.Work]:
        orders.append([one.op is dist.irecv for one in ops])
        return issue(ops)

    stages = stages_of(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", issued)
        backward(stages, 0)
    assert [True, False] in orders
    assert all(one == sorted(one, reverse=True) for one in orders)


def layouts_train_alike(cases: Sequence[Case]) -> None:
    for case in cases:
        stages = stages_of(case)
        optimizer = optimizer_of(stages.parts)
        shares = []
        for step in range(len(case.losses)):
            shares.append(backward(stages, step))
            optimizer.step()
        found = stages.total_loss(torch.stack(shares))
        assert found.tolist() == pytest.approx(case.losses, rel=0, abs=SAME), case
        replicas_are_equal(stages)


def replicas_are_equal(stages: Stages) -> None:
    """Hold what several ranks have, bit for bit, against the first of them."""
    ranks = stages.ranks
    parameters = {name: local_part(one)[0] for name, one in stages.parts.named_parameters()}
    experts = {name for name in parameters if ".ffn.experts." in name}
    cut = {name for name, one in stages.parts.named_parameters() if is_dtensor(one)}
    for group, names in (
        (ranks.replicas, experts),
        (ranks.mesh.get_group("dp"), parameters.keys() - experts),
        (ranks.mesh.get_group("tp"), parameters.keys() - experts - cut),
    ):
        if names and dist.get_world_size(group) > 1:
            mine = torch.cat([parameters[name].flatten() for name in sorted(names)])
            first = mine.clone()
            dist.broadcast(first, group=group, group_src=0)
            assert torch.equal(first, mine)


def balance_reaches_every_stage(
    case: Case, balance: float, wanted: dict[str, torch.Tensor]
) -> None:
    stages = stages_of(case, balance)
    backward(stages, 0)
    names = {name.split(".", 1)[1]: each for name, each in stages.parts.named_parameters()}
    gates = [name for name in names if name.endswith("gate.weight")]
    assert gates
    for name in gates:
        torch.testing.assert_close(names[name].grad, wanted[name], rtol=1e-10, atol=1e-14)


def gate_gradients_with_balance(
    shape: Transformer, balance: float, num_micro_batches: int
) -> dict[str, torch.Tensor]:
    """Return what one process gets from the micro-batches one after another."""
    model = whole_model(shape)
    for text_BS in text_of(0).chunk(num_micro_batches):
        loss = next_token_loss(model(text_BS[:, :-1]), text_BS[:, 1:])
        layers = [module for module in model.modules() if isinstance(module, ExpertLayer)]
        loss = loss + balance * torch.stack([layer.aux_loss for layer in layers]).mean()
        (loss / num_micro_batches).backward()
    return {
        name: each.grad
        for name, each in model.named_parameters()
        if name.endswith("gate.weight") and each.grad is not None
    }


def a_rank_dies(case: Case) -> None:
    stages = stages_of(case)
    stages.total_loss(backward(stages, 0))
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(1)
    with pytest.raises(Exception, match=r"(?i)connection|closed|reset|timed out|failed"):
        stages.total_loss(backward(stages, 1))
