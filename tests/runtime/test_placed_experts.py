"""Layers whose experts a plan has placed, on real ranks, against the natural order."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import moetune
from moetune.domain.errors import InputError, RankMismatchError
from moetune.domain.layer import LayerShape
from moetune.domain.placement import PlacementChoice
from moetune.domain.plan import Plan
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.plans.book import PlanBook
from tests.ranks import run_ranks
from tests.runtime.companion_nets import (
    Net,
    adam,
    alone,
    batch,
    check_equal,
    share_of,
    train,
    whole_state,
)
from tests.runtime.faults import same_text
from tests.runtime.plans import small_plan

EXPERTS = 8
SHAPE = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)
ORDER, OTHER = (7, 0, 3, 4, 1, 6, 5, 2), (2, 4, 6, 0, 1, 3, 7, 5)
BATCHES = [batch(index) for index in range(4)]
EXACT = 1e-10
pytestmark = pytest.mark.dist


def _net(placement: tuple[int, ...] | None = None, seed: int = 11, **options: Any) -> Net:
    return Net(seed=seed, num_experts=EXPERTS, placement=placement, **options)


def numbers_are_those_of_the_natural_order() -> None:
    """Outputs, gradients of tokens, gate and experts, in all the ways that rows travel."""
    kinds: list[dict[str, Any]] = [
        {"pipeline": 1}, {"pipeline": 3}, {"activation": "swiglu"}, {"memory_reuse": "S4"},
        {"capacity_factor": 1.0},
    ]  # fmt: skip
    for kind in kinds:
        natural, placed = _net(**kind), _net(ORDER, **kind)
        numbers = [_numbers(net.moe) for net in (natural, placed)]
        for name, wanted in numbers[0].items():
            error = float((numbers[1][name] - wanted).norm() / wanted.norm().clamp(min=1e-30))
            assert error <= EXACT, f"{kind}: {name} differs by {error}"
        assert placed.moe.num_dropped == natural.moe.num_dropped
        assert placed.moe.experts.placement.order == ORDER
        assert natural.moe.experts.placement.order == ()


def _numbers(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    assert isinstance(layer, MoELayer)
    x = batch(dist.get_rank()).requires_grad_()
    y = layer(x)
    (y.sin().sum() + layer.aux_loss).backward()
    numbers = {"y": y.detach(), "x": x.grad, "aux": layer.aux_loss.detach()}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        numbers[name] = _in_order(layer, grad) if name.startswith("experts.") else grad
    return {name: value for name, value in numbers.items() if value is not None}


def _in_order(layer: MoELayer, local: torch.Tensor | None) -> torch.Tensor:
    """Return all ranks' rows of experts by the experts' numbers, with torch's own gathers."""
    assert local is not None
    rows = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, local.contiguous())
    experts: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(experts, layer.experts.placement.experts)
    numbers = torch.tensor([each for mine in experts for each in mine])
    assert sorted(numbers.tolist()) == list(range(EXPERTS))
    return torch.cat(rows)[numbers.argsort()]


def states_keep_their_rules() -> None:
    """Optimizers that load before their first step, whole tensors, meta layers, unloaded copies."""
    saved, wanted = _net(ORDER), alone(num_experts=EXPERTS)
    optimizers = adam(moetune.prepare_ddp(saved)), adam(wanted)
    train(saved, optimizers[0], [batch(0)], 1)
    again = _net(OTHER)
    fresh = adam(moetune.prepare_ddp(again))
    file = io.BytesIO()  # torch would share the tensors of a state dict
    torch.save(optimizers[0].state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    again.load_state_dict(saved.state_dict())
    for net, optimizer in ((saved, optimizers[0]), (again, fresh)):
        train(net, optimizer, [batch(1)], 1)
    check_equal(whole_state(again), whole_state(saved), EXACT)
    again.load_state_dict(wanted.state_dict())
    check_equal(whole_state(again), wanted.state_dict(), 0)
    assert _net(ORDER, device="meta").state_dict()["moe.experts.w1"].shape[0] == EXPERTS
    state = saved.moe.state_dict()
    saved.moe(batch(0))
    with torch.no_grad():
        state["experts.w1"].to_local().zero_()
    with pytest.raises(InputError, match="call load_state_dict"):
        saved.moe(batch(0))
    saved.moe.load_state_dict(state)
    saved.moe(batch(0))
    assert not saved.moe.experts.w1.any()


def a_record_is_in_the_natural_order() -> None:
    natural, placed = _net(), _net(ORDER)
    for net in (natural, placed):
        for step in range(3):
            net(batch(dist.get_rank() + 10 * step)).sum().backward()
    wanted, record = natural.moe.routing_record(), placed.moe.routing_record()
    assert record.loads == wanted.loads
    assert len(set(record.loads)) > 2


def _placed(order: tuple[int, ...], tokens: int = 40) -> Plan:
    choice = PlacementChoice(
        experts=order, natural_skew=1.5, placed_skew=1.2, least_skew=1.2,
        natural_step_seconds=3.0, placed_step_seconds=2.0, why="because",
    )  # fmt: skip
    return replace(small_plan(layer=SHAPE, tokens=tokens), placement=choice)


def plans_place_experts() -> None:
    """By a plan and by a book; those without a placement go with any."""
    plan, none = _placed((3, 0, 1, 2)), small_plan(layer=SHAPE, tokens=41)
    both: tuple[Plan | PlanBook, ...] = plan, PlanBook([none, plan])
    for given in both:
        layer = MoELayer(8, 16, 4, 2, dtype=torch.float64, plan=given)
        assert layer.experts.placement.order == (3, 0, 1, 2)
        assert layer.experts.placement.experts == ((3, 0), (1, 2))[dist.get_rank()]
    assert plan.placement is not None
    natural = replace(plan, placement=replace(plan.placement, experts=()))
    assert MoELayer(8, 16, 4, 2, plan=natural).experts.placement.order == ()
    for other in (_placed((0, 3, 1, 2), 41), replace(natural, id=plan.id)):
        with pytest.raises(InputError, match="place the experts of"):
            MoELayer(8, 16, 4, 2, plan=PlanBook([plan, other]))
    book = PlanBook([plan, _placed((0, 3, 1, 2), 41)])
    layer = MoELayer(8, 16, 4, 2, plan=book, placement=(2, 3, 0, 1))
    assert layer.experts.placement.order == (2, 3, 0, 1)


def ranks_that_differ_raise_the_same() -> None:
    rank = dist.get_rank()
    mine = ((3, 0, 1, 2), (0, 3, 1, 2))[rank]
    both: list[dict[str, Any]] = [{"plan": _placed(mine)}, {"placement": mine}]
    for options in both:
        with pytest.raises(RankMismatchError) as caught:
            MoELayer(8, 16, 4, 2, **options)
        assert "rank 1: " in same_text(caught.value)
    with pytest.raises(RankMismatchError) as caught:
        MoELayer(8, 16, 4, 2, placement=(0, 0, 1, 2) if rank else (3, 0, 1, 2))
    assert "no place for expert 3" in same_text(caught.value)
    with pytest.raises(RankMismatchError) as caught:
        MoELayer(8, 16, 4, 2, dispatcher="deepep" if rank else None)
    assert "rank 1: the dispatcher 'deepep' does not run" in same_text(caught.value)
    for wrong, words in (((0, 1, 2), "3 places for 4"), ((0, 1, 2, 4), "no place for expert 3")):
        with pytest.raises(InputError, match=words):
            MoELayer(8, 16, 4, 2, placement=wrong)


def what_writes_other_checkpoints_is_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(InputError, match="FSDP2 writes checkpoints"):
        moetune.prepare_fsdp(_net(ORDER), mesh)
    net = _net(ORDER)
    with pytest.raises(InputError, match=r"moetune\.shard writes checkpoints"):
        moetune.shard(net, adam(net))
    mine = ORDER if dist.get_rank() % 2 else OTHER
    single = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    moetune.prepare_ddp(_net(mine, group=single))  # one rank has all experts, in their order


def replicas_have_the_same_places() -> None:
    """Two replicas of two ranks each, which differ."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "ep"))
    net = _net(ORDER if dist.get_rank() < 2 else OTHER, mesh=mesh)
    with pytest.raises(RankMismatchError, match="disagree on the placement of experts"):
        moetune.prepare_ddp(net)
    net = _net(ORDER, mesh=mesh)
    wrapped = DistributedDataParallel(moetune.prepare_ddp(net))
    train(wrapped, adam(net), share_of(BATCHES), 2)
    wanted = alone(num_experts=EXPERTS)
    train(wanted, adam(wanted), BATCHES, 2)
    check_equal(whole_state(net), wanted.state_dict(), EXACT)


@pytest.mark.parametrize(
    ("worker", "ranks"),
    [
        (numbers_are_those_of_the_natural_order, 2),
        pytest.param(numbers_are_those_of_the_natural_order, 4, marks=pytest.mark.thorough),
        (states_keep_their_rules, 2),
        (a_record_is_in_the_natural_order, 2),
        (plans_place_experts, 2),
        (ranks_that_differ_raise_the_same, 2),
        (what_writes_other_checkpoints_is_refused, 2),
        (replicas_have_the_same_places, 4),
    ],
)
def test_placed_experts(worker: Callable[[], None], ranks: int) -> None:
    assert run_ranks(worker, ranks) == [""] * ranks
