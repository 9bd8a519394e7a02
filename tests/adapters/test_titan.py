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
from moetune.adapters.families import titan_family_of
from moetune.runtime.moe.routed_layer import RoutedLayer
from tests.adapters import titan_interface, titan_workers, workers
from tests.ranks import run_ranks
from tests.runtime.workers import Events, Recorder

titan_interface.provide()  # stand-ins where torchtitan is not installed

from torchtitan.models.common import moe, token_dispatcher  # noqa: E402 - behind `provide`
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts  # noqa: E402 - behind `provide`

from moetune.adapters import torchtitan as adapter  # noqa: E402 - behind `provide`


@pytest.mark.parametrize("experts", [moe.GroupedExperts, GptOssGroupedExperts])
def test_one_rank_equals_the_dense_experts(experts: Any, tmp_path: Path) -> None:
    titan_workers.equal_dense(experts, titan_workers.plan_of(str(tmp_path), 1))


def test_two_ranks_equal_the_dense_experts_and_refuse_different_plans(tmp_path: Path) -> None:
    assert run_ranks(titan_workers.two_ranks, 2, str(tmp_path)) == [""] * 2


def test_shared_experts_beside_the_exchanges_have_the_same_numbers() -> None:
    titan_workers.shared_experts_beside()


def test_shared_experts_run_while_rows_travel() -> None:
    _, layer = titan_workers.layers_with_shared_experts()
    events: Events = []
    x = titan_workers.inputs(0)[0]
    layer(x)
    layer.shared_experts.register_forward_hook(lambda *_: events.append(("forward", "shared")))
    inner = layer.routed_experts.moetune
    inner.recorder, inner.communicator = Recorder(events), workers.Wire()
    layer(x)
    names = [name for _, name in events if "weights" not in name]
    assert names[:3] == ["issues dispatch 0", "shared", "has dispatch 0"]
    layer.shared_experts = None
    events.clear()
    layer(x)
    others = [name for _, name in events if "weights" not in name]
    assert others == [name for name in names if name != "shared"]


def test_other_layers_and_tensor_parallel_tokens_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(moetune.InputError, match="is no layer of torchtitan's own class"):
        adapter.moe_with_shared_experts(
            adapter.moe_with_shared_experts(titan_workers.layer_config())
        )
    _, layer = titan_workers.layers_with_shared_experts()
    monkeypatch.setattr(adapter, "is_dtensor", lambda _: True)
    with pytest.raises(moetune.InputError, match="tensor-parallel ranks"):
        layer(titan_workers.inputs(0)[0])


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
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


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
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_compiled_layer_runs_its_shared_experts_behind_the_others() -> None:
    torch._dynamo.reset()
    _, layer = titan_workers.layers_with_shared_experts()
    x = titan_workers.inputs(0)[0]
    layer.routed_experts._init_self_buffers()
    whole: Any = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(x), layer(x), rtol=1e-12, atol=1e-12)


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
