"""The layer under torch's wrappers, and other companions of training."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moetune
from moetune.comm.gloo import communicator_of
from moetune.comm.group import OneRank
from moetune.domain.errors import InputError
from moetune.runtime.moe.layer import MoELayer, TensorExpertLayer
from moetune.runtime.moe.weight_grads import GradientSum
from tests.ranks import run_ranks
from tests.runtime.companion_nets import (
    HIDDEN,
    WIDTH,
    Net,
    adam,
    alone,
    backward,
    batch,
    check_equal,
    loss_of,
    sharded,
    train,
    trained_alone,
    whole_state,
)

CPU = "cpu"
STEPS = 2


def _mine(num: int = 1) -> list[torch.Tensor]:
    """This rank's micro-batches, of those that all ranks have together."""
    rank = dist.get_rank()
    return [batch(rank * num + index) for index in range(num)]


def _world() -> Any:
    return init_device_mesh(CPU, (dist.get_world_size(),), mesh_dim_names=("dp",))


def _gradients_alone(num: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    """The gradients of one process on every rank's micro-batches."""
    net = alone(**options)
    backward(net, [batch(index) for index in range(num * dist.get_world_size())])
    return {name: each.grad for name, each in net.named_parameters() if each.grad is not None}


def _check_gradients(net: Any, wanted: dict[str, torch.Tensor]) -> None:
    """Hold this rank's gradients against those of one process, its own experts' among them."""
    for name, parameter in net.named_parameters():
        if name not in wanted:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        whole, grad = wanted[name], parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        elif ".experts." in name:
            ranks = net.moe.communicator
            whole = whole.chunk(ranks.num_ranks)[ranks.rank]
        check_equal({name: grad}, {name: whole})


def _check_sums(net: Net, wanted: dict[str, torch.Tensor]) -> None:
    """Hold experts' gradients, sums over the ranks' tokens, against those of one process."""
    for name, parameter in net.moe.experts.named_parameters():
        path = f"moe.experts.{name}"
        assert parameter.grad is not None
        mine = wanted[path].chunk(dist.get_world_size())[dist.get_rank()]
        check_equal({path: parameter.grad / dist.get_world_size()}, {path: mine})


def fsdp_equals_one_process() -> None:
    wanted = trained_alone(STEPS).state_dict()
    on_host = CPUOffloadPolicy(pin_memory=False)
    kinds: list[dict[str, Any]] = [{}, {"offload_policy": on_host}]
    for options in kinds:
        net = sharded(Net(), _world(), **options)
        assert isinstance(net.moe.experts.w1, DTensor)
        train(net, adam(net, fused=not options), _mine(), STEPS)
        check_equal(whole_state(net), wanted)


def micro_batches_add_up(mesh: DeviceMesh | None = None) -> None:
    wanted, (first, last) = _gradients_alone(2), _mine(2)
    for meanwhile in (DistributedDataParallel.no_sync, contextlib.nullcontext):
        net: Any = moetune.prepare_ddp(moetune.prepare_ddp(Net(mesh=mesh)))
        wrapped = DistributedDataParallel(net, find_unused_parameters=True)
        with meanwhile(wrapped):
            (loss_of(wrapped, first) / 2).backward()
        sums = communicator_of(None).all_gather_values(net.moe.experts.w1.grad.sum(), "sums")
        is_mean = mesh is not None and meanwhile is contextlib.nullcontext
        assert len(sums.unique()) == (2 if is_mean else dist.get_world_size())
        (loss_of(wrapped, last) / 2).backward()
        _check_gradients(net, wanted)
    fsdp = sharded(Net(mesh=mesh), _world())
    backward(fsdp, _mine(2))
    _check_gradients(fsdp, wanted)


def fsdp_computes_in_bfloat16_with_float32_masters() -> None:
    exact = _gradients_alone(dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = sharded(Net(dtype=torch.float32), _world(), mp_policy=policy)
    seen = list[torch.dtype]()
    net.moe.experts.register_forward_pre_hook(
        lambda _, args: seen.extend(each.dtype for each in args[:2])
    )
    backward(net, _mine())
    assert seen == [torch.bfloat16, torch.float32]  # tokens and combine weights
    grad = net.moe.experts.w1.grad
    assert isinstance(grad, DTensor)
    assert grad.dtype == torch.float32
    check_equal({"w1": grad.full_tensor()}, {"w1": exact["moe.experts.w1"]}, tolerance=0.05)


def fsdp_draws_what_was_made_on_the_meta_device() -> None:
    net = sharded(Net(device="meta"), _world()).to_empty(device=CPU)
    torch.manual_seed(7)
    net.moe.reset_parameters()
    torch.manual_seed(7)
    wanted = MoELayer(WIDTH, HIDDEN, 4, dtype=torch.float64, communicator=OneRank())
    check_equal(whole_state(net.moe), wanted.state_dict(), tolerance=0)


def fully_shard_is_refused_where_it_would_mix_experts() -> None:
    mesh = _world()
    for module in (Net(), Net().moe, Net().moe.experts):
        with pytest.raises(InputError, match="prepare_fsdp"):
            fully_shard(module, mesh=mesh)


def parameters_sharded_in_another_way_are_refused() -> None:
    mesh = _world()
    for placement in (Shard(1), Replicate()):
        layer = Net().moe
        layer.experts.w1 = nn.Parameter(
            distribute_tensor(torch.randn(4, WIDTH, HIDDEN), mesh, [placement])
        )
        with pytest.raises(InputError, match="2 whole experts"):
            layer(torch.randn(3, WIDTH))


def fully_shard_may_leave_experts_out() -> None:
    """Without `prepare_fsdp` their gradients are sums over the ranks' tokens, as always."""
    wanted, net, mesh = _gradients_alone(), Net(), _world()
    ignored = set(net.moe.experts.parameters())
    fully_shard(net.moe, mesh=mesh, ignored_params=ignored)
    fully_shard(net, mesh=mesh, ignored_params=ignored)
    backward(net, _mine())
    _check_sums(net, wanted)


def fsdp1_is_refused() -> None:
    for use_orig_params in (False, True):
        net = FullyShardedDataParallel(
            Net(), device_id=torch.device(CPU), use_orig_params=use_orig_params
        )
        with pytest.raises(InputError, match="fully_shard"):
            loss_of(net, batch(0))


def ddp_is_refused_without_preparation() -> None:
    for module in (Net(), Net().moe, Net(layer=TensorExpertLayer)):
        wrapped = DistributedDataParallel(module)
        with pytest.raises(InputError, match="prepare_ddp"):
            wrapped(batch(0))


def chunks_are_refused_over_fsdp() -> None:
    net = sharded(Net(), _world())
    with pytest.raises(InputError, match=r"before\.weight is sharded already"):
        moetune.shard(net, torch.optim.AdamW(net.parameters()))


def zero_redundancy_optimizer_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its own deprecation

    net = Net()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW)
    backward(net, _mine())
    with pytest.raises(InputError, match="ZeroRedundancyOptimizer"):
        optimizer.step()


def checkpointed_passes_have_the_same_gradients() -> None:
    """The layer runs again within the backward pass, in the same order on all ranks."""
    wanted = _gradients_alone()
    for memory_reuse in (False, "S1", "S2", "S3", "S4"):
        for use_reentrant in (False, True):
            net = Net(memory_reuse=memory_reuse)
            honest = net.moe.forward
            net.moe.forward = partial(checkpoint, honest, use_reentrant=use_reentrant)  # type: ignore[method-assign]
            backward(net, _mine())
            _check_sums(net, wanted)


def checkpointed_fsdp_has_the_same_gradients() -> None:
    wanted, net = _gradients_alone(), Net()
    moetune.prepare_fsdp(net, mesh := _world())
    net.moe.forward = partial(checkpoint, net.moe.forward, use_reentrant=False)  # type: ignore[method-assign]
    fully_shard(net.moe, mesh=mesh)
    fully_shard(net, mesh=mesh)
    backward(net, _mine())
    _check_gradients(net, wanted)


@contextlib.contextmanager
def _counted_products() -> Iterator[list[int]]:
    """Count the blocks of rows whose products go into gradients of weights."""
    counts, honest = list[int](), GradientSum.add_gemm

    def add_gemm(self: GradientSum, *args: Any) -> None:
        counts.append(len(args[-1].blocks))
        honest(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientSum, "add_gemm", add_gemm)
        yield counts


def frozen_experts_cost_no_products() -> None:
    """Only the gate and the dense layers are trained, as with adapters."""
    wanted = _gradients_alone()
    for memory_reuse in (False, "S1", "S4"):
        net = Net(memory_reuse=memory_reuse)
        net.moe.experts.requires_grad_(requires_grad=False)
        wrapped = DistributedDataParallel(moetune.prepare_ddp(net))
        with _counted_products() as products:
            backward(wrapped, _mine())
        assert not products
        trained = {name: each for name, each in wanted.items() if ".experts." not in name}
        _check_gradients(net, trained)
        net.zero_grad()
        net.moe.experts.w2.requires_grad_()
        with _counted_products() as products:
            backward(wrapped, _mine())
        assert len(products) == net.moe.decision.backward_degree
        assert net.moe.experts.w2.grad is not None
        assert net.moe.experts.w1.grad is None


def autocast_rounds_no_gradient() -> None:
    """Products in bfloat16, but gradients of float32 masters that are no bfloat16 numbers."""
    exact = _gradients_alone(dtype=torch.float32)
    for degree in (1, 3):
        net = Net(dtype=torch.float32, pipeline=degree)
        wrapped = DistributedDataParallel(moetune.prepare_ddp(net))
        with torch.autocast(CPU, torch.bfloat16):
            loss = loss_of(wrapped, _mine()[0])
        loss.backward()
        for name in ("w1", "w2"):
            grad = getattr(net.moe.experts, name).grad
            assert grad.dtype == torch.float32
            made = grad[grad != 0]  # none of an expert without tokens
            assert (made != made.bfloat16().float()).float().mean() > 0.5
            whole = exact[f"moe.experts.{name}"]
            mine = whole.chunk(dist.get_world_size())[dist.get_rank()]
            check_equal({name: grad}, {name: mine}, tolerance=0.05)


def a_layer_takes_the_groups_of_a_mesh() -> None:
    mesh = init_device_mesh(CPU, (1, dist.get_world_size()), mesh_dim_names=("copies", "ep"))
    wanted = trained_alone(STEPS).state_dict()
    for chosen in (mesh, mesh["ep"]):
        net = Net(mesh=chosen)
        assert net.moe.communicator.group is mesh.get_group("ep")  # type: ignore[attr-defined]
        wrapped = DistributedDataParallel(moetune.prepare_ddp(net))
        train(wrapped, adam(net), _mine(), STEPS)
        check_equal(whole_state(net), wanted)
    net = sharded(Net(mesh=mesh), _world())
    assert isinstance(net.moe.experts.w1, DTensor)
    assert net.moe.experts.w1.device_mesh == mesh["ep"]
    train(net, adam(net), _mine(), STEPS)
    check_equal(whole_state(net), wanted)
    for wrong in ({"group": dist.group.WORLD, "mesh": mesh}, {"mesh": mesh, "communicator": 1}):
        with pytest.raises(InputError, match="one of mesh"):
            Net(**wrong)
    with pytest.raises(InputError, match="3 dimensions"):
        Net(mesh=init_device_mesh(CPU, (1, 1, dist.get_world_size()), mesh_dim_names=tuple("abc")))


TWO_RANKS: tuple[Callable[[], None], ...] = (
    fsdp_equals_one_process,
    fsdp_computes_in_bfloat16_with_float32_masters,
    fsdp_draws_what_was_made_on_the_meta_device,
    fully_shard_is_refused_where_it_would_mix_experts,
    parameters_sharded_in_another_way_are_refused,
    fully_shard_may_leave_experts_out,
    fsdp1_is_refused,
    ddp_is_refused_without_preparation,
    micro_batches_add_up,
    chunks_are_refused_over_fsdp,
    zero_redundancy_optimizer_is_refused,
    checkpointed_passes_have_the_same_gradients,
    checkpointed_fsdp_has_the_same_gradients,
    frozen_experts_cost_no_products,
    autocast_rounds_no_gradient,
    a_layer_takes_the_groups_of_a_mesh,
)


def _pairs() -> DeviceMesh:
    """Return the mesh of experts over two of four ranks, which are not neighbours."""
    return DeviceMesh(CPU, [[0, 2], [1, 3]], mesh_dim_names=("copies", "ep"))


def replicas_of_experts_stay_equal_under_ddp() -> None:
    wanted = trained_alone(STEPS).state_dict()
    for mesh in (_pairs(), init_device_mesh(CPU, (2, 2), mesh_dim_names=("copies", "ep"))):
        # Other seeds: replicas start from the first one's values, as all that the wrapper averages.
        net = Net(seed=11 if dist.get_rank() == 0 else 40 + dist.get_rank(), mesh=mesh)
        wrapped = DistributedDataParallel(moetune.prepare_ddp(net))
        train(wrapped, adam(net), _mine(), STEPS)
        check_equal(whole_state(net), wanted)


def replicas_are_averaged_behind_the_last_micro_batch() -> None:
    micro_batches_add_up(_pairs())


def replicas_of_experts_are_shards_under_fsdp() -> None:
    mesh = init_device_mesh(CPU, (2, 2), mesh_dim_names=("copies", "ep"))
    hybrid = init_device_mesh(CPU, (2, 2), mesh_dim_names=("replicate", "shard"))
    for num_experts, spread, dense in (
        (4, _pairs(), _world()),
        (4, mesh, hybrid),
        (2, _pairs(), _world()),  # an expert a rank: its replicas share its second dim
    ):
        wanted = trained_alone(STEPS, num_experts=num_experts).state_dict()
        net = sharded(Net(num_experts=num_experts, mesh=spread), dense)
        w1 = net.moe.experts.w1
        assert isinstance(w1, DTensor)
        assert w1.to_local().numel() * 4 == w1.numel()
        train(net, adam(net, fused=True), _mine(), STEPS)
        check_equal(whole_state(net), wanted)
        torch.manual_seed(7)
        net.moe.reset_parameters()
        torch.manual_seed(7)
        drawn = MoELayer(WIDTH, HIDDEN, num_experts, dtype=torch.float64, communicator=OneRank())
        check_equal(whole_state(net.moe), drawn.state_dict(), tolerance=0)


def a_group_of_one_rank_is_dense() -> None:
    """Ranks with all experts each: wrappers average them like everything else."""
    wanted = trained_alone(STEPS).state_dict()
    mine, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(dist.get_world_size())])
    net = Net(group=mine)
    train(DistributedDataParallel(moetune.prepare_ddp(net)), adam(net), _mine(), STEPS)
    check_equal(net.state_dict(), wanted)
    net = sharded(Net(group=mine), _world())
    train(net, adam(net), _mine(), STEPS)
    check_equal(whole_state(net), wanted)


def groups_outside_of_the_wrapper_are_refused() -> None:
    mesh = _pairs()
    halves, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    without_mesh = Net(group=mesh.get_group("ep"))
    with pytest.raises(InputError, match="replicas are on ranks"):
        moetune.prepare_ddp(Net(mesh=mesh), halves)
    for prepare in (moetune.prepare_ddp, partial(moetune.prepare_fsdp, mesh=_world())):
        with pytest.raises(InputError, match="replicas are on ranks") as caught:
            prepare(without_mesh)
        assert "init_device_mesh" in caught.value.hint
    with pytest.raises(InputError, match="no names"):
        Net(mesh=DeviceMesh(CPU, [[0, 2], [1, 3]]))


def experts_that_do_not_divide_over_replicas_are_refused() -> None:
    mesh = init_device_mesh(CPU, (2, 2), mesh_dim_names=("copies", "ep"))
    with pytest.raises(InputError, match=r"\(3, 7, 15\) .* evenly over 2"):
        moetune.prepare_fsdp(MoELayer(7, 15, 6, mesh=mesh), mesh)


def tensor_parallel_experts_are_shards_of_their_replicas() -> None:
    """Two groups of two ranks, each with tokens of its own."""
    mesh = init_device_mesh(CPU, (2, 2), mesh_dim_names=("dp", "tp"))
    wanted = alone()
    train(wanted, adam(wanted), [batch(0), batch(1)], STEPS)
    net = Net(layer=TensorExpertLayer, mesh=mesh)
    with pytest.raises(InputError, match="prepare_fsdp"):
        fully_shard(Net(layer=TensorExpertLayer, mesh=mesh["tp"]), mesh=mesh["dp"])
    sharded(net, mesh["dp"])
    train(net, adam(net), [batch(mesh.get_local_rank("dp"))], STEPS)
    check_equal(whole_state(net), wanted.state_dict())


FOUR_RANKS: tuple[Callable[[], None], ...] = (
    replicas_of_experts_stay_equal_under_ddp,
    replicas_are_averaged_behind_the_last_micro_batch,
    replicas_of_experts_are_shards_under_fsdp,
    a_group_of_one_rank_is_dense,
    groups_outside_of_the_wrapper_are_refused,
    experts_that_do_not_divide_over_replicas_are_refused,
    tensor_parallel_experts_are_shards_of_their_replicas,
)


def run_all(checks: Sequence[Callable[[], None]]) -> None:
    for check in checks:
        check()


@pytest.mark.parametrize(("num_ranks", "checks"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_wrappers_and_companions_on_real_ranks(
    num_ranks: int, checks: Sequence[Callable[[], None]]
) -> None:
    """One start of the ranks for all that they show."""
    assert run_ranks(run_all, num_ranks, checks) == [""] * num_ranks


def test_a_checkpointed_step_keeps_the_buffers_for_the_next() -> None:
    """A repeated pass ends by an exception of torch's, which is no failure."""
    layer, x = MoELayer(8, 16, 4, 2, pipeline=3), torch.randn(64, 8, requires_grad=True)
    kept = list[torch.Tensor | None]()
    for _ in range(3):
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        kept.append(layer._workspace._memory)
    assert kept[0] is not None
    assert all(memory is kept[0] for memory in kept)


@pytest.mark.parametrize("num_ranks", ["2", "64"])
def test_a_layer_that_would_run_alone_on_each_of_several_ranks_is_refused(
    num_ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", num_ranks)
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="init_process_group"):
        MoELayer(8, 16, 4)
    with pytest.raises(InputError, match="init_process_group"):
        moetune.shard(model, torch.optim.SGD(model.parameters()))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert MoELayer(8, 16, 4).communicator.num_ranks == 1


def test_a_layer_has_a_balance_loss_after_its_first_forward_pass() -> None:
    layer = MoELayer(8, 16, 4)
    assert not hasattr(layer, "aux_loss")
    layer(torch.randn(6, 8))
    assert layer.aux_loss.requires_grad
