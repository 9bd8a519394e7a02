"""Checkpoints of experts: saved on some ranks and in some order, loaded on others in another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import moetune
from moetune.domain.errors import InputError
from tests.ranks import run_ranks
from tests.runtime.companion_nets import (
    WHOLE,
    Net,
    adam,
    alone,
    batch,
    check_equal,
    sharded,
    share_of,
    train,
    whole_state,
)

BATCHES = [batch(index) for index in range(4)]
"""Of the global batch, which any number of ranks divides."""
OTHER_SEED = 99
EXPERTS = 8
PLACED = {"placed": (7, 0, 3, 4, 1, 6, 5, 2), "turned": (2, 4, 6, 0, 1, 3, 7, 5)}
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
Made = tuple[Net, torch.nn.Module, torch.optim.Optimizer]


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _continued(steps: int) -> dict[str, torch.Tensor]:
    """The parameters after so many steps on the global batch."""
    net = alone(num_experts=EXPERTS)
    train(net, adam(net), BATCHES, steps)
    return net.state_dict()


def made(kind: str, **options: Any) -> Made:
    """Return a net, its wrapper and its optimizer.

    Args:
        kind: "ddp", or "fsdp"; "pairs ddp" and "pairs fsdp" have two replicas of each expert, the
            experts of "placed" and "turned" are in two orders of a plan, under DDP.
    """
    options = {"num_experts": EXPERTS, "placement": PLACED.get(kind)} | options
    if "pairs" in kind:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "ep"))
    net = Net(**options)
    if _num_ranks() == 1:
        return net, net, adam(net)
    if "fsdp" not in kind:
        wrapped = DistributedDataParallel(moetune.prepare_ddp(net))
        return net, wrapped, adam(net)
    sharded(net, init_device_mesh("cpu", (_num_ranks(),)))
    return net, net, adam(net)


def save(folder: Path, kind: str, steps: int) -> None:
    """Train, and save the layer's and the optimizer's states in every way."""
    _, wrapped, optimizer = made(kind)
    train(wrapped, optimizer, share_of(BATCHES), steps)
    model, states = get_state_dict(wrapped, optimizer)
    dcp_save({"model": model, "optimizer": states}, checkpoint_id=folder / "sharded")
    whole = get_model_state_dict(wrapped, options=WHOLE)
    states = get_optimizer_state_dict(wrapped, optimizer, options=WHOLE)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"model": whole, "optimizer": states}, folder / "whole.pt")


def load_sharded(folder: Path, kind: str) -> Made:
    net, wrapped, optimizer = made(kind, seed=OTHER_SEED)
    model, states = get_state_dict(wrapped, optimizer)
    dcp_load(
        {"model": model, "optimizer": states}, checkpoint_id=folder / "sharded",
        no_dist=not dist.is_initialized(),
    )  # fmt: skip
    set_state_dict(wrapped, optimizer, model_state_dict=model, optim_state_dict=states)
    return net, wrapped, optimizer


def load_whole(folder: Path, kind: str) -> Made:
    net, wrapped, optimizer = made(kind, seed=OTHER_SEED)
    saved = torch.load(folder / "whole.pt")
    set_model_state_dict(wrapped, saved["model"], options=WHOLE)
    set_optimizer_state_dict(wrapped, optimizer, saved["optimizer"], options=WHOLE)
    return net, wrapped, optimizer


def load_from_first(folder: Path, kind: str) -> Made:
    net, wrapped, optimizer = made(kind, seed=OTHER_SEED)
    is_first = dist.get_rank() == 0
    saved = torch.load(folder / "whole.pt") if is_first else {"model": {}, "optimizer": {}}
    set_model_state_dict(wrapped, saved["model"], options=BROADCAST)
    set_optimizer_state_dict(wrapped, optimizer, saved["optimizer"], options=BROADCAST)
    return net, wrapped, optimizer


LOADS: tuple[Callable[[Path, str], Made], ...] = (load_sharded, load_whole, load_from_first)


def load_and_go_on(folder: Path, kind: str, steps: int, num_loads: int = 3) -> None:
    """Load kinds of checkpoints into other values, and take one more step."""
    before, after = _continued(steps), _continued(steps + 1)
    for load in LOADS[:num_loads]:
        net, wrapped, optimizer = load(folder, kind)
        check_equal(whole_state(net), before)
        train(wrapped, optimizer, share_of(BATCHES), 1)
        check_equal(whole_state(net), after)


def save_on_two(folder: Path, num: int) -> None:
    for kind in ("ddp", "fsdp", "placed"):
        save(folder / kind, kind, 2)
    for saved, kind, num_loads in (
        ("ddp", "fsdp", 3), ("placed", "turned", 2), ("ddp", "ddp", 3), ("fsdp", "fsdp", 3),
        ("placed", "placed", 2), ("placed", "ddp", 2), ("ddp", "placed", 2),
    )[:num]:  # fmt: skip
        load_and_go_on(folder / saved, kind, 2, num_loads)
    a_layers_state_dict_is_of_all_ranks(folder / "layer")
    plain_tensors_are_taken_where_they_have_all_experts()
    files_of_single_ranks_go_back_to_their_ranks(folder)
    an_optimizer_loads_before_its_first_step()
    an_optimizer_that_sums_over_experts_is_refused()


def load_on_four_and_save(folder: Path, num: int) -> None:
    for kind, num_loads in (("pairs fsdp", 3), ("ddp", 1), ("fsdp", 1), ("pairs ddp", 3))[:num]:
        load_and_go_on(folder / "ddp", kind, 2, num_loads)
        save(folder / "of four" / kind, kind, 2)
    for saved, kind in (("placed", "turned"), ("fsdp", "pairs ddp"))[:num]:
        load_and_go_on(folder / saved, kind, 2, 1)


def load_on_fewer(folder: Path) -> None:
    for saved in (folder / "of four").iterdir():
        load_and_go_on(saved, "ddp", 2, 2)
    load_and_go_on(folder / "placed", "ddp", 2, 2)


def a_layers_state_dict_is_of_all_ranks(folder: Path) -> None:
    layer, other = Net().moe, Net(seed=OTHER_SEED).moe
    dcp_save(layer.state_dict(), checkpoint_id=folder)
    state = other.state_dict()
    dcp_load(state, checkpoint_id=folder)
    for name, parameter in layer.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), name
        assert type(parameter) is torch.nn.Parameter
    w1 = layer.state_dict()["experts.w1"]
    assert isinstance(w1, DTensor)
    assert w1.to_local().data_ptr() == layer.experts.w1.data_ptr()
    assert layer.state_dict(keep_vars=True)["experts.w1"] is layer.experts.w1
    meta = Net(device="meta").moe.state_dict()["experts.w1"]
    assert meta.shape == w1.shape


def plain_tensors_are_taken_where_they_have_all_experts() -> None:
    net, whole = Net(seed=OTHER_SEED), alone()
    for assign in (False, True):
        net.load_state_dict(whole.state_dict(), assign=assign)
        check_equal(whole_state(net), whole.state_dict(), tolerance=0)
        assert net.moe.experts.w1.untyped_storage().nbytes() == net.moe.experts.w1.nbytes
    local = {name: each.detach() for name, each in net.named_parameters()}
    with pytest.raises(InputError, match=r"moe\.experts\.w1 has 2 of 4 experts"):
        net.load_state_dict(local)
    with pytest.raises(RuntimeError, match="size mismatch"):
        net.load_state_dict(alone(num_experts=8).state_dict())


def files_of_single_ranks_go_back_to_their_ranks(folder: Path) -> None:
    rank = dist.get_rank()
    net, other = Net(), Net(seed=OTHER_SEED)
    torch.save(net.state_dict(), folder / f"{rank}.pt")
    other.load_state_dict(torch.load(folder / f"{rank}.pt"))
    check_equal(whole_state(other), whole_state(net), tolerance=0)
    with pytest.raises(InputError, match=f"this is rank {rank} of 2"):
        other.load_state_dict(torch.load(folder / f"{1 - rank}.pt"))


def an_optimizer_loads_before_its_first_step() -> None:
    """Its hooks come with its first step, and find what was loaded without them."""
    net, _, optimizer = made("ddp")
    train(net, optimizer, share_of(BATCHES), 1)
    state = optimizer.state_dict()
    exp_avg = state["state"][3]["exp_avg"]
    assert isinstance(exp_avg, DTensor)
    assert len(exp_avg) == 2 * len(exp_avg.to_local())
    wanted = alone(num_experts=EXPERTS)
    whole = adam(wanted)
    train(wanted, whole, BATCHES, 1)
    for saved in (state, whole.state_dict()):
        again, _, fresh = made("ddp")
        fresh.load_state_dict(saved)
        train(again, fresh, share_of(BATCHES), 1)
        moment = fresh.state[again.moe.experts.w1]["exp_avg"]
        assert type(moment) is torch.Tensor
        assert moment.shape == again.moe.experts.w1.shape
        assert moment.untyped_storage().nbytes() == moment.nbytes
        fresh.load_state_dict(saved)
        assert fresh.state[again.moe.experts.w1]["exp_avg"].shape == moment.shape


def an_optimizer_that_sums_over_experts_is_refused() -> None:
    net = Net()
    optimizer = torch.optim.Adafactor(net.parameters())
    train(net, optimizer, share_of(BATCHES), 1)
    with pytest.raises(InputError, match="AdamW"):
        optimizer.state_dict()


@pytest.fixture(scope="module", params=[(2, 1), pytest.param((7, 4), marks=pytest.mark.thorough)])
def saved(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Checkpoints of two ranks, and of four, loaded by so many kinds."""
    folder = tmp_path_factory.mktemp("checkpoints")
    num_of_two, num_of_four = request.param
    assert run_ranks(save_on_two, 2, folder, num_of_two) == [""] * 2
    assert run_ranks(load_on_four_and_save, 4, folder, num_of_four) == [""] * 4
    return folder


def test_two_ranks_load_what_four_saved(saved: Path) -> None:
    assert run_ranks(load_on_fewer, 2, saved) == [""] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process is meant
def test_one_rank_loads_what_four_saved(saved: Path) -> None:
    load_on_fewer(saved)
