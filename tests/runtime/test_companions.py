"""The layer under torch's wrappers, its compiler, and other companions of training."""

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import moetune
from moetune.domain.errors import InputError
from moetune.runtime.moe.layer import MoELayer
from tests.ranks import run_ranks
from tests.runtime import companion_workers
from tests.runtime.companion_nets import Net, batch, loss_of


def test_wrappers_and_recomputation_on_two_ranks() -> None:
    assert run_ranks(companion_workers.two_ranks, 2) == [""] * 2


def test_replicas_of_experts_on_four_ranks() -> None:
    assert run_ranks(companion_workers.four_ranks, 4) == [""] * 4


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler reads it
def test_a_compiled_model_breaks_once_at_the_layer_whatever_the_routing() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    net = Net(pipeline=3)
    compiled: nn.Module = torch.compile(net, backend=counter)  # type: ignore[assignment]
    for index in range(10):
        x = batch(index) * (index + 1)
        found = loss_of(compiled, x)
        assert torch.equal(found, loss_of(net, x))
        found.backward()
    assert counter.frame_count == 2  # before the layer and behind it


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
