"""One rank without torch.distributed: inputs, wrappers and the edges of routing."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.document import canonical_json
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Decision
from moetune.runtime.moe.layer import ExpertLayer, MoELayer, TensorExpertLayer
from moetune.runtime.plans.book import PlanBook
from tests.runtime.faults import make
from tests.runtime.plans import small_plan

SHAPE = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 0}, "d_model"),
        ({"top_k": 5}, r"top_k \(5\)"),
        ({"activation": "tanh"}, "tanh"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"pipeline": 0.5}, "pipeline"),
        ({"pipeline": -2}, "pipeline"),
        ({"memory_reuse": "S9"}, "S9"),
        ({"plan": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_wrong_arguments_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(**options)


def test_wrong_tensors_are_refused() -> None:
    layer = make()
    for x in (torch.randn(3, 7), torch.randn(3, 8).double(), torch.tensor(1.0)):
        with pytest.raises(InputError):
            layer(x)


@given(
    shape=st.lists(st.integers(0, 3), max_size=3), degree=st.integers(1, 9), top_k=st.integers(1, 4)
)
@settings(deadline=None, max_examples=30)
def test_output_has_the_shape_of_the_input(shape: list[int], degree: int, top_k: int) -> None:
    layer = make(pipeline=degree, top_k=top_k)
    x = torch.randn(*shape, 8, requires_grad=True)
    y = layer(x)
    assert y.shape == x.shape
    (y.sum() + layer.aux_loss).backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    if not x.numel():
        assert float(layer.aux_loss.detach()) == 0


def test_nan_in_one_token_stays_in_that_token() -> None:
    layer = make()
    x = torch.randn(6, 8)
    clean = layer(x).detach()
    x[3, 0] = math.nan
    y = layer(x).detach()
    assert y[3].isnan().all()
    others = [0, 1, 2, 4, 5]
    assert torch.allclose(y[others], clean[others], atol=1e-6)
    assert layer.aux_loss.isnan()


def test_no_grad_equals_training_and_keeps_nothing() -> None:
    layer, x = make(), torch.randn(20, 8)
    with torch.no_grad():
        y = layer(x)
    assert not y.requires_grad
    assert torch.equal(y, layer(x).detach())


@pytest.mark.parametrize("strategy", ["none", "S1", "S4"])
def test_two_passes_before_one_backward_do_not_share_buffers(strategy: str) -> None:
    layer = make(dtype=torch.float64, memory_reuse=strategy)
    x1, x2 = torch.randn(2, 9, 8, dtype=torch.float64)
    separate = copy.deepcopy(layer)
    separate(x1).square().sum().backward()
    separate(x2).square().sum().backward()
    (layer(x1).square().sum() + layer(x2).square().sum()).backward()
    for parameter, other in zip(layer.parameters(), separate.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_autocast_computes_experts_in_bfloat16_and_the_gate_in_float32() -> None:
    layer, x = make(top_k=1), torch.randn(30, 8, requires_grad=True)
    exact = layer(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.float32
    assert layer.aux_loss.dtype == torch.float32
    assert 0 < float((y.detach() - exact).norm() / exact.norm()) < 0.02
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_bfloat16_gradients_do_not_lose_precision_to_many_chunks() -> None:
    x = torch.randn(256, 8)
    errors = []
    exact = make(top_k=1, pipeline=1)
    exact(x).sum().backward()
    for degree in (1, 64):
        layer = make(top_k=1, pipeline=degree, dtype=torch.bfloat16)
        layer.load_state_dict(exact.state_dict())
        layer(x.bfloat16()).sum().backward()
        assert layer.experts.w2.grad is not None
        assert exact.experts.w2.grad is not None
        wanted = exact.experts.w2.grad
        errors.append(float((layer.experts.w2.grad.float() - wanted).norm() / wanted.norm()))
    assert errors[1] <= 1.5 * errors[0]


def test_state_dict_has_the_documented_names_and_shapes_and_round_trips() -> None:
    layer = make()
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {
        "gate.weight": (4, 8),
        "experts.w1": (4, 8, 16),
        "experts.b1": (4, 16),
        "experts.w2": (4, 16, 8),
        "experts.b2": (4, 8),
    }
    gated = make(activation="swiglu").state_dict()
    assert set(gated) == {"gate.weight", "experts.w1", "experts.w2", "experts.w3"}
    torch.manual_seed(77)
    other = MoELayer(8, 16, 4, 2, pipeline=3)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(5, 8)
    assert torch.equal(other(x), layer(x))


def test_every_expert_starts_from_different_values() -> None:
    w1 = make().experts.w1.detach()
    assert len({float(w1[expert, 0, 0]) for expert in range(4)}) == 4


def test_plan_gives_the_degrees_of_its_tokens_and_ranges(tmp_path: Path) -> None:
    plan = small_plan(layer=SHAPE, world_size=1)
    path = tmp_path / "plan.json"
    path.write_text(canonical_json(plan))
    for source in ({"plan": plan}, {"plan": path}, {"plan": PlanBook([plan])}):
        layer = make(pipeline=True, **source)
        layer(torch.randn(40, 8))
        assert layer.decision.forward_degree == 4
        layer(torch.randn(7, 8))
        assert layer.decision.forward_degree == 2
        layer(torch.randn(1000, 8))
        assert layer.decision.forward_degree == 4


@pytest.mark.parametrize(("kind", "usual"), [
    (MoELayer, "all_to_all"), (TensorExpertLayer, "all_gather"),
])  # fmt: skip
def test_dispatchers_that_do_not_run_are_refused_with_what_does(
    kind: type[ExpertLayer], usual: str
) -> None:
    kind(8, 16, 4, dispatcher=usual)
    for name, words in (
        ("deepep", "DeepEP"), ("hybrid_ep", "HybridEP"), ("symmetric_memory", "torch"),
        ("deep_ep", "unknown"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words) as caught:
            kind(8, 16, 4, dispatcher=name)
        assert usual in caught.value.hint


def test_layer_without_a_plan_runs_one_chunk_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = make(pipeline=True)
    for _ in range(3):
        layer(torch.randn(4, 8))
    assert layer.decision.forward_degree == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_plan_for_another_layer_is_refused() -> None:
    plan = small_plan(layer=SHAPE, world_size=2)
    with pytest.raises(InputError, match="2 ranks"):
        make(pipeline=True, plan=plan)


def test_other_chunks_backward_than_forward_are_refused() -> None:
    text = "4 chunks forward and 3 backward"
    with pytest.raises(InputError, match=text):
        make().pin(Decision(forward_degree=4, backward_degree=3))
    for options in ({"degrees": (4, 3)}, {"ranges": ((1, 100, 4, 3),)}):
        plan = small_plan(layer=SHAPE, world_size=1, **options)
        with pytest.raises(InputError, match=text):
            make(pipeline=True, plan=plan)
        with pytest.raises(InputError, match=text):
            make(pipeline=True, plan=PlanBook([plan]))(torch.randn(40, 8))


def test_edited_plan_file_is_refused(tmp_path: Path) -> None:
    document = json.loads(canonical_json(small_plan(layer=SHAPE, world_size=1)))
    document["inputs"]["tokens_per_rank"] = 41
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="hash"):
        make(pipeline=True, plan=path)
