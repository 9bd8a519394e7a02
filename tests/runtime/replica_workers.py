"""What ranks do in the tests of hot experts with replicas: everything equals single experts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import moetune
from moetune.domain.errors import InputError, RankMismatchError
from moetune.domain.placement import EMPTY, replicas_of
from moetune.domain.plan import Decision
from moetune.runtime.moe.expert_layer import ExpertLayer
from moetune.runtime.moe.layer import MoELayer
from tests.runtime import workers
from tests.runtime.companion_nets import (
    Net,
    adam,
    alone,
    backward,
    batch,
    check_equal,
    train,
    whole_state,
)

EXPERTS = workers.NUM_EXPERTS
ORDERS = {
    2: (9, 3, 0, 1, 6, 7, 8, 3, 4, 2, EMPTY, 5, 11, 10),
    4: (3, 0, 7, 5, 10, 3, 1, 2, 6, 3, 7, 4, 8, 11, EMPTY, 9),
}
"""Expert 3 on two or three ranks, 7 on two of four, and an empty place."""
BATCHES = [batch(index) for index in range(4)]
EXACT = 1e-10
Worker = Callable[[], None]


def _order() -> tuple[int, ...]:
    return ORDERS[dist.get_world_size()]


def _net(placement: tuple[int, ...] | None = None, seed: int = 11, **options: Any) -> Net:
    return Net(seed=seed, num_experts=EXPERTS, placement=placement, **options)


def _mine() -> list[torch.Tensor]:
    each, rank = len(BATCHES) // dist.get_world_size(), dist.get_rank()
    return BATCHES[rank * each : (rank + 1) * each]


def numbers_are_those_of_a_dense_layer() -> None:
    """Outputs, and gradients of tokens, gate and experts, in all the ways that rows travel."""
    kinds: list[tuple[dict[str, Any], tuple[int, int]]] = [
        ({}, (1, 1)), ({"capacity_factor": 0.7}, (3, 2)), ({"activation": "swiglu"}, (2, 4)),
        ({"memory_reuse": "S4"}, (3, 3)), ({"memory_reuse": "S1", "activation": "relu"}, (2, 2)),
    ]  # fmt: skip
    rank = dist.get_rank()
    for options, degrees in kinds:
        torch.manual_seed(5)
        natural = MoELayer(
            workers.D_MODEL, workers.D_HIDDEN, EXPERTS, 2, dtype=torch.float64, **options
        )
        dense = workers.dense_of(natural, workers.TOKENS)
        torch.manual_seed(5)
        layer = MoELayer(
            workers.D_MODEL, workers.D_HIDDEN, EXPERTS, 2, dtype=torch.float64,
            placement=_order(), **options,
        )  # fmt: skip
        layer.poison_buffers()
        layer.pin(Decision(forward_degree=degrees[0], backward_degree=degrees[1]))
        x, dy = workers.inputs_of(rank, workers.TOKENS)
        x.requires_grad_()
        y = layer(x)
        (torch.sum(y * dy) + workers.AUX_SCALE * layer.aux_loss).backward()
        assert x.grad is not None
        assert layer.gate.weight.grad is not None
        pairs = {
            "y": (y, dense.y), "x": (x.grad, dense.x_grad),
            "gate": (layer.gate.weight.grad, dense.gate_grad),
        }  # fmt: skip
        for name, (found, wanted) in pairs.items():
            error = workers.relative_error(found, wanted)
            assert error <= EXACT, f"{name} differs by {error}"
        assert layer.num_dropped == dense.num_dropped
        _check_experts(layer, dense)


def _check_experts(layer: MoELayer, dense: workers.Dense) -> None:
    placement = layer.experts.placement
    for name, parameter in layer.experts.named_parameters():
        reference = getattr(dense.weights, name)
        assert parameter.grad is not None
        for row, expert in enumerate(placement.experts):
            if expert == EMPTY:
                assert not parameter.grad[row].any()
                continue
            assert torch.equal(parameter[row], reference[expert]), name
            error = workers.relative_error(parameter.grad[row], reference.grad[expert])
            assert error <= EXACT, f"{name} of expert {expert} differs by {error}"


def replicas_share_the_rows() -> None:
    """Tokens that all choose one expert are divided evenly, whatever the number of chunks."""
    num_ranks, counts = dist.get_world_size(), []
    for degree in (1, 3):
        layer = _net(_order(), pipeline=degree).moe
        with torch.no_grad():
            layer.gate.weight.zero_()
            layer.gate.weight[3] = 1
        layer(torch.ones(12, 8, dtype=torch.float64)).sum().backward()
        rows = torch.tensor(layer._loads._totals_L)
        everywhere = [torch.empty_like(rows) for _ in range(num_ranks)]
        dist.all_gather(everywhere, rows)
        counts.append(torch.cat(everywhere).tolist())
        places = replicas_of(_order())[3]
        assert {counts[-1][place] for place in places} == {12 * num_ranks // len(places)}
        assert layer.routing_record().loads[3] == 12 * num_ranks
        assert len(layer.routing_record().loads) == EXPERTS
    assert counts[0] == counts[1]


def replicas_stay_equal() -> None:
    """After five steps they are so to the last bit, and a whole model is that of one process."""
    net = _net(_order())
    wrapped, optimizer = DistributedDataParallel(moetune.prepare_ddp(net)), adam(net)
    train(wrapped, optimizer, _mine(), 5)
    _check_bits(net.moe)
    single = alone(num_experts=EXPERTS)
    train(single, adam(single), BATCHES, 5)
    check_equal(whole_state(net), single.state_dict(), EXACT)


def _check_bits(layer: ExpertLayer) -> None:
    for parameter in layer.experts.parameters():
        rows = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, parameter.detach().contiguous())
        every = torch.cat(rows)
        for places in replicas_of(layer.experts.placement.order):
            for place in places:
                assert torch.equal(every[place], every[places[0]])


def checkpoints_move_between_replicas_and_none(folder: Path) -> None:
    """Train, save, load under replicas, another placement and none, and train on."""
    before, after = _alone(2), _alone(3)
    placements = (_order(), None, tuple(reversed(range(EXPERTS))))
    for index, saved in enumerate(placements):
        net = _net(saved)
        wrapped, optimizer = DistributedDataParallel(moetune.prepare_ddp(net)), adam(net)
        train(wrapped, optimizer, _mine(), 2)
        check_equal(whole_state(net), before, EXACT)
        path = folder / str(index)
        model, states = get_state_dict(wrapped, optimizer)
        assert len(net.moe.state_dict()["experts.w1"]) == EXPERTS
        dcp_save({"model": model, "optimizer": states}, checkpoint_id=path)
        for loaded in placements if index == 0 else placements[:1]:
            load_and_go_on(path, loaded, after)


def load_and_go_on(path: Path, placement: tuple[int, ...] | None, after: dict[str, Any]) -> None:
    net = moetune.prepare_ddp(_net(placement, seed=99))
    wrapped, optimizer = DistributedDataParallel(net), adam(net)
    model, states = get_state_dict(wrapped, optimizer)
    dcp_load({"model": model, "optimizer": states}, checkpoint_id=path)
    set_state_dict(wrapped, optimizer, model_state_dict=model, optim_state_dict=states)
    train(wrapped, optimizer, _mine(), 1)
    check_equal(whole_state(net), after, EXACT)


def load_what_two_saved(folder: Path) -> None:
    """A checkpoint of replicas on two ranks loads on four, with replicas of others."""
    load_and_go_on(folder / "0", _order(), _alone(3))


def _alone(steps: int) -> dict[str, Any]:
    net = alone(num_experts=EXPERTS)
    train(net, adam(net), BATCHES, steps)
    return net.state_dict()


def states_keep_their_rules() -> None:
    """Whole tensors load, meta layers have all experts, and replicas that differ are named."""
    net, wanted = _net(_order()), alone(num_experts=EXPERTS, seed=5)
    net.load_state_dict(wanted.state_dict())
    check_equal(whole_state(net), wanted.state_dict(), 0)
    assert _net(_order(), device="meta").state_dict()["moe.experts.w1"].shape[0] == EXPERTS
    if dist.get_rank() == 0:
        with torch.no_grad():
            net.moe.experts.w1[net.moe.experts.placement.experts.index(3)].add_(1e-9)
    with pytest.raises(InputError, match=r"experts 3 differ between its replicas on ranks \[0, 1"):
        net.state_dict()


def clipping_counts_each_expert_once() -> None:
    single = alone(num_experts=EXPERTS)
    backward(single, BATCHES)
    norm = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.01)
    net = moetune.prepare_ddp(_net(_order()))
    backward(DistributedDataParallel(net), _mine())
    check_equal({"norm": moetune.clip_grad_norm_(net, 0.01)}, {"norm": norm}, EXACT)
    check_equal({"norm": moetune.clip_grad_norm_(net, 1.0)}, {"norm": norm.new_tensor(0.01)}, 1e-3)


def frozen_experts_have_no_sums() -> None:
    net = _net(_order())
    net.moe.experts.requires_grad_(requires_grad=False)
    backward(net, _mine())
    assert all(each.grad is None for each in net.moe.experts.parameters())
    net.moe.experts.w2.requires_grad_()
    backward(net, _mine())
    assert net.moe.experts.w2.grad is not None


def what_does_not_go_with_replicas_is_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(InputError, match="FSDP2 writes checkpoints"):
        moetune.prepare_fsdp(_net(_order()), mesh)
    net = _net(_order())
    with pytest.raises(InputError, match="chunks keep them in the order of ranks"):
        moetune.shard(net, adam(net))
    every = tuple(range(EXPERTS))
    wrong = {
        (*every, 0): "13 places on 2 ranks",
        (*every[:-1], 0, 1, 2): "no place for expert 11",
        (0, 7, *every[1:7], *every[7:], 12): "a place for expert 12 of 12",
        (0, *every, 0): "expert 0 more than once on rank 0",
        (*every, *every): "12 places on each rank for 12 experts",
    }
    for placement, words in wrong.items():
        with pytest.raises((InputError, RankMismatchError), match=words):
            _net(placement)
