"""Uses of chunks in a step, against the real model's parameters and order."""

from dataclasses import replace

import pytest
import torch

from examples.language_model import LanguageModel
from moetune.domain.chunks import pack
from moetune.domain.constraints import Bounds
from moetune.domain.layer import LayerShape
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.runtime.moe.layer import MoELayer
from moetune.solve.chunks.uses import modules_of, timed, uses_of
from moetune.solve.model.prices import Prices
from moetune.solve.runtime import MOETUNE
from tests.solve.costs_by_hand import LinearCosts

WITH_EXPERTS = Transformer(
    moe=LayerShape(d_model=16, d_hidden=32, num_experts=4), num_layers=3, num_heads=2, length=8,
    vocab_size=50,
)  # fmt: skip
DENSE = Transformer(
    moe=LayerShape(d_model=16, d_hidden=32, num_experts=1), num_layers=2, num_heads=2, length=8,
    vocab_size=50, moe_every=0,
)  # fmt: skip
GATED = replace(
    WITH_EXPERTS,
    moe=LayerShape(d_model=16, d_hidden=32, num_experts=4, activation="swiglu"),
    moe_every=1,
)
MODELS = pytest.mark.parametrize(
    "shape", [WITH_EXPERTS, DENSE, GATED], ids=["experts", "dense", "swiglu"]
)


def layout_of(*, dp: int = 1, ep: int = 1) -> Layout:
    return Layout(expert_parallel="all_to_all", dp=dp, ep=ep, tp=1, pp=1)


def real_model(shape: Transformer) -> LanguageModel:
    layer = shape.moe
    return LanguageModel(
        shape,
        lambda: MoELayer(
            layer.d_model,
            layer.d_hidden,
            layer.num_experts,
            activation=layer.activation,
            pipeline=False,
        ),
    )


@MODELS
def test_parameters_are_those_of_the_real_model(shape: Transformer) -> None:
    found = {
        each.name: each.num_elements
        for module in modules_of(shape, layout=layout_of(), dtype="float32")
        for each in module.parameters
    }
    real = dict(real_model(shape).named_parameters())
    assert found == {name: parameter.numel() for name, parameter in real.items()}


@MODELS
def test_modules_come_in_the_order_in_which_the_real_model_runs_them(shape: Transformer) -> None:
    model = real_model(shape)
    names = [one.name for one in modules_of(shape, layout=layout_of(), dtype="float32")]
    ran: list[str] = []
    for name, module in model.named_modules():
        if name in names:
            module.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    model(torch.zeros(1, shape.length, dtype=torch.int64))
    assert ran == names


@MODELS
@pytest.mark.parametrize("recompute", [False, True])
def test_the_uses_of_a_step_add_up_to_the_layouts_own_price(
    shape: Transformer, *, recompute: bool
) -> None:
    prices = Prices(
        model=shape,
        dtype="float32",
        costs=LinearCosts(),
        bounds=Bounds(),
        per_node=8,
        runtime=MOETUNE,
    )
    layout = layout_of()
    priced = prices.priced(
        layout=layout, groups=prices.groups(layout), sequences=2, one_chunk=False
    )
    modules = timed(modules_of(shape, layout=layout, dtype="float32"), model=shape, priced=priced)
    chunks = pack([one for module in modules for one in module.parameters], chunk_bytes=2**13)
    order = uses_of(modules, dict(enumerate(chunks)), recompute=recompute)
    (stage,) = prices.stages(1)
    expected = priced.seconds.stage(stage, recompute=recompute)
    assert sum(use.seconds for use in order) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_every_chunk_leaves_once_and_is_needed_no_more(*, recompute: bool) -> None:
    modules = modules_of(WITH_EXPERTS, layout=layout_of(dp=4, ep=2), dtype="float32")
    chunks = pack([one for module in modules for one in module.parameters], chunk_bytes=2**14)
    order = uses_of(modules, dict(enumerate(chunks)), recompute=recompute)
    assert sorted(chunk for use in order for chunk in use.leaves) == list(range(len(chunks)))
    gone: set[int] = set()
    for use in order:
        assert not gone & set(use.chunks)
        gone |= set(use.leaves)


def test_experts_are_shared_by_their_replicas_alone() -> None:
    modules = modules_of(WITH_EXPERTS, layout=layout_of(dp=8, ep=4), dtype="float32")
    groups = {one.name: one.group.ranks for module in modules for one in module.parameters}
    assert groups["blocks.1.ffn.experts.w1"] == 2
    assert groups["blocks.1.ffn.gate.weight"] == groups["blocks.0.ffn.up.weight"] == 8
