"""Experts inside a tensor-parallel group, against the dense reference and `MoELayer`."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel, LayerKey, LayerShape, Workload
from moetune.domain.plan import Decision
from moetune.measure.steps import random_steps
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.tensor_layer import TensorExpertLayer
from moetune.runtime.plans.book import PlanBook
from moetune.workflows.trace import overlap_of
from tests.cuda_kit import FakeCuda, MirrorWorld
from tests.ranks import run_ranks
from tests.runtime import tensor_workers
from tests.runtime.gpu_runs import GPU, step
from tests.runtime.plans import small_plan
from tests.runtime.slow_link import SlowLink

LAYER = LayerShape(d_model=4, d_hidden=8, num_experts=2)


def test_one_rank_equals_dense() -> None:
    tensor_workers.equal_dense()


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_equal_dense(num_ranks: int) -> None:
    assert run_ranks(tensor_workers.equal_dense, num_ranks) == [""] * num_ranks


@pytest.mark.dist
def test_ranks_are_equal_to_the_bit_and_fit_the_other_layer_and_refuse_other_inputs() -> None:
    assert run_ranks(tensor_workers.agree, 2) == ["", ""]


@pytest.mark.dist
def test_four_ranks_are_the_other_layer() -> None:
    assert run_ranks(tensor_workers.checkpoints_fit_each_other, 4) == [""] * 4


def test_one_rank_is_the_other_layer() -> None:
    tensor_workers.checkpoints_fit_each_other()
    tensor_workers.experts_without_tokens_have_gradients()


def test_chunks_are_computed_while_others_are_summed_forward_and_backward() -> None:
    layer = LayerShape(d_model=128, d_hidden=512, num_experts=2)
    workload = Workload(layer=layer, world_size=1, tokens_per_rank=512, expert_parallel="tensor")
    steps = random_steps(workload, device=torch.device("cpu"), communicator=SlowLink(0.02))
    spans = steps.record(Decision(forward_degree=4, backward_degree=3))
    assert [span.name for span in spans].count("sum") == 4 + 3
    overlap = overlap_of(spans)
    assert overlap.forward > 0
    assert overlap.backward > 0


def test_what_would_drop_pairs_or_reuse_memory_is_refused() -> None:
    with pytest.raises(InputError, match="drop no pair"):
        TensorExpertLayer(4, 8, 2, capacity_factor=1.0)
    with pytest.raises(InputError, match="not available in a tensor-parallel group"):
        TensorExpertLayer(4, 8, 2, memory_reuse="S4")


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
    assert PlanBook([foreign]).layer_plans(key) is None
    assert PlanBook([foreign, fitting]).plans_for(key) == [fitting]


def test_a_layer_between_sequence_shards_runs_only_plans_for_those() -> None:
    plans = [
        small_plan(layer=LAYER, world_size=1, expert_parallel="tensor", sequence_parallel=in_shards)
        for in_shards in (False, True)
    ]
    for in_shards, plan, other in zip((False, True), plans, reversed(plans), strict=True):
        layer = partial(TensorExpertLayer, 4, 8, 2, sequence_parallel=in_shards)
        planned = layer(plan=plan)
        planned(torch.randn(40, 4))
        assert planned.decision == plan.decide(40)
        flags = "--expert-parallel tensor" + " --sequence-parallel" * in_shards
        with pytest.raises(InputError, match="tensor with sequence shards") as caught:
            layer(plan=other)
        assert f"{flags}`" in caught.value.hint
        key = LayerKey(
            layer=LAYER, expert_parallel="tensor", sequence_parallel=in_shards, num_ranks=1,
            dtype="float32",
        )  # fmt: skip
        assert PlanBook(plans).plans_for(key) == [plan]


def test_a_plan_of_a_whole_model_is_found_by_the_ranks_that_share_the_experts() -> None:
    plan = small_plan(layer=LAYER, world_size=2, expert_parallel="tensor")
    inputs = replace(plan.inputs, world_size=8)
    layout = replace(plan.layout, dp=2, pp=2)
    whole = replace(plan, id=inputs.plan_id, inputs=inputs, layout=layout)
    book = PlanBook([whole])
    key = partial(LayerKey, layer=LAYER, expert_parallel="tensor", dtype="float32")
    assert book.layer_plans(key(num_ranks=2)) is not None
    assert book.layer_plans(key(num_ranks=8)) is None


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
        assert not [one for one in cuda.operations if one.label.startswith("index_add")]
