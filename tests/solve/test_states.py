"""Bytes of one parameter's states: what the runtime keeps, in one definition for all plans."""

import pytest
import torch

import moetune
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.optimizers import layer_optimizer, optimizer_of
from moetune.solve.layer.memory import layer_memory
from moetune.solve.layer.peak import peak_bytes
from tests.ranks import single_rank_group


def test_a_layers_gradients_have_the_dtype_of_its_parameters() -> None:
    layer = moetune.MoELayer(16, 32, 2, pipeline=2, dtype=torch.bfloat16)
    layer(torch.randn(8, 16, dtype=torch.bfloat16)).sum().backward()
    gradient_bytes = sum(w.grad.nbytes for w in layer.parameters() if w.grad is not None)
    num_parameters = sum(w.numel() for w in layer.parameters())
    assert gradient_bytes == num_parameters * layer_optimizer("bfloat16").gradient_bytes


def test_chunks_keep_gradients_masters_and_moments_in_full_precision() -> None:
    linear = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    adam = torch.optim.Adam(linear.parameters())
    with single_rank_group():
        model, optimizer = moetune.shard(torch.nn.Sequential(linear), adam, chunk_bytes=2**13)
        model(torch.randn(2, 64, dtype=torch.bfloat16)).sum().backward()
        (master,) = model.parameters()
        assert master.grad is not None
        each, gradient_bytes = optimizer_of("adam"), master.grad.nbytes
        optimizer.step()
    kept = [m for state in optimizer.state.values() for m in state.values() if m.numel() > 1]
    assert gradient_bytes == 64 * 64 * each.gradient_bytes
    assert master.nbytes + sum(moment.nbytes for moment in kept) == 64 * 64 * each.state_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_formulas_and_peak_count_the_same_states(dtype: str) -> None:
    layer = LayerShape(d_model=256, d_hidden=512, num_experts=8)
    workload = Workload(layer=layer, world_size=4, tokens_per_rank=64, dtype=dtype)
    parameters = 8 * 256 + 2 * 2 * 256 * 512
    states = parameters * layer_optimizer(dtype).total_bytes
    peak = peak_bytes(workload=workload, degree=1, bias=False, is_grouped=False)
    memory = layer_memory(workload=workload, degree=1)
    assert (peak.state_bytes, memory.state_bytes) == (states, states)
