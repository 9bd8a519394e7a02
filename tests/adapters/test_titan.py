"""torchtitan's routed experts in moetune's layer: results, gradients and what is refused."""

import importlib
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moetune
from moetune.adapters.layers import titan_family_of
from moetune.runtime.moe.layer import RoutedLayer
from tests.adapters import titan_interface, titan_workers
from tests.ranks import run_ranks

titan_interface.provide()  # stand-ins where torchtitan is not installed

from torchtitan.models.common import moe, token_dispatcher  # noqa: E402 - behind `provide`
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts  # noqa: E402 - behind `provide`

from moetune.adapters import torchtitan as adapter  # noqa: E402 - behind `provide`


@pytest.mark.parametrize("experts", [moe.GroupedExperts, GptOssGroupedExperts])
def test_one_rank_equals_the_dense_experts(experts: Any, tmp_path: Path) -> None:
    titan_workers.equal_dense(experts, titan_workers.plan_of(str(tmp_path), 1))


def test_two_ranks_equal_the_dense_experts_and_refuse_different_plans(tmp_path: Path) -> None:
    assert run_ranks(titan_workers.two_ranks, 2, str(tmp_path)) == [""] * 2


def test_parameters_keep_their_names() -> None:
    theirs = titan_workers.config_of().build()
    mine = titan_workers.build()
    mine.parallelize(titan_interface.dims())
    assert sorted(mine.state_dict()) == sorted(theirs.state_dict())
    assert any(isinstance(each, RoutedLayer) for each in mine.modules())


def test_a_step_is_repeated_whole_under_selective_checkpointing() -> None:
    module = titan_workers.build()
    x, scores, chosen, counts, dy = titan_workers.inputs(0)
    saved = [torch.ops.aten.mm.default, torch.ops.aten.expand.default]
    selective = partial(
        checkpoint, module, use_reentrant=False, early_stop=False,
        context_fn=lambda: create_selective_checkpoint_contexts(saved),
    )  # fmt: skip
    grads = []
    for run in (module, selective):
        module.zero_grad()
        module.moetune = None  # so that the first pass counts its rows as the repeated one does not
        run(x.clone().requires_grad_(), scores, chosen, counts).backward(dy)
        grads.append([each.grad for each in module.parameters()])
    for grad, other in zip(*grads, strict=True):
        assert torch.equal(grad, other)


def other_config() -> Any:
    @dataclass(kw_only=True)
    class Config(moe.GroupedExperts.Config):  # type: ignore[misc] # torchtitan is no dependency
        pass

    return SimpleNamespace(Config=Config)


def test_what_torchtitan_would_run_otherwise_is_refused_by_name() -> None:
    with pytest.raises(moetune.InputError, match="tokens travel by LocalTokenDispatcher"):
        adapter.routed_experts(
            titan_workers.config_of(dispatcher=token_dispatcher.LocalTokenDispatcher)
        )
    with pytest.raises(moetune.InputError, match="experts of "):
        adapter.routed_experts(titan_workers.config_of(other_config()))
    replaced = adapter.routed_experts(titan_workers.config_of())
    with pytest.raises(moetune.InputError, match="is replaced already"):
        adapter.routed_experts(replaced)
    with pytest.raises(moetune.InputError, match="over the tensor-parallel ranks"):
        titan_workers.build().parallelize(titan_interface.dims(tp=2))


@pytest.mark.parametrize("experts", [moe.GroupedExperts, GptOssGroupedExperts])
def test_one_graph_has_the_numbers_of_the_eager_layer(experts: Any) -> None:
    torch._dynamo.reset()
    eager, compiled = titan_workers.build(experts), titan_workers.build(experts)
    compiled._init_self_buffers()  # as torchtitan does before the first step
    compiled.compile(fullgraph=True, backend="aot_eager")
    grads = []
    for module in (eager, compiled):
        x, scores, chosen, counts, dy = titan_workers.inputs(0)
        module(x.requires_grad_(), scores.requires_grad_(), chosen, counts).backward(dy)
        grads.append([x.grad, scores.grad, *(each.grad for each in module.parameters())])
    for grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-12, atol=1e-12)


def test_checked_types_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = titan_workers.build()
    values = titan_workers.inputs(0)[:4]
    monkeypatch.setattr("spmd_types.is_type_checking", lambda: True)
    with pytest.raises(moetune.InputError, match="spmd_typechecking"):
        module(*values)


def test_plans_of_other_layers_and_unknown_experts_are_refused(tmp_path: Path) -> None:
    plan = titan_workers.plan_of(str(tmp_path), 2)
    with pytest.raises(moetune.InputError, match="on 2 ranks, the layer is"):
        titan_workers.build(plan=plan).parallelize(titan_interface.dims())
    linear: Any = nn.Linear(2, 2)
    with pytest.raises(moetune.InputError, match="Linear has parameters bias, weight"):
        titan_family_of(linear)


def test_an_older_torchtitan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "moetune.adapters.torchtitan")
    monkeypatch.setitem(sys.modules, "torchtitan.config.override", None)
    with pytest.raises(ImportError, match=r"needs torchtitan 0\.3, which has overrides"):
        importlib.import_module("moetune.adapters.torchtitan")
