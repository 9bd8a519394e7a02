"""What ranks do in the tests of layers whose ranks share their experts' widths."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from moetune.comm.group import OneRank
from moetune.domain.errors import InputError
from moetune.domain.layer import Activation, LayerShape
from moetune.domain.model import Transformer
from moetune.domain.paper_decoder import paper_decoder
from moetune.domain.plan import Decision
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.parallel.groups import join
from moetune.solve.training.activations import block_modules
from tests.runtime.reference import Weights, dense_moe
from tests.runtime.test_recompute import Allocations
from tests.runtime.workers import AUX_SCALE, RELATIVE, TOKENS, relative_error

D_MODEL, D_HIDDEN, NUM_EXPERTS = 8, 12, 4


def made(etp: int, activation: Activation, **options: Any) -> MoELayer:
    """Return a layer of which so many consecutive ranks share each expert's width."""
    torch.manual_seed(5)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // etp, etp), mesh_dim_names=("experts", "width"))
    return MoELayer(
        D_MODEL, D_HIDDEN, NUM_EXPERTS, activation=activation, dtype=torch.float64, width=mesh,
        **options,
    )  # fmt: skip


def alone(activation: Activation, top_k: int = 1) -> MoELayer:
    """Return the same layer of one process."""
    torch.manual_seed(5)
    return MoELayer(
        D_MODEL, D_HIDDEN, NUM_EXPERTS, top_k, activation=activation, dtype=torch.float64,
        communicator=OneRank(),
    )  # fmt: skip


def whole(value: object) -> torch.Tensor:
    """Return all ranks' values of an entry of a state dict."""
    assert isinstance(value, DTensor)
    return value.full_tensor()


def layers_equal_dense(etp: int, activations: Sequence[Activation], degrees: Sequence[int]) -> None:
    """Hold outputs, and gradients of everything, against experts that are whole."""
    options = itertools.product(activations, (1, 2), (None, 0.7), degrees, ("none", "S1", "padded"))
    for activation, top_k, capacity, degree, how in options:
        pads = how == "padded"
        if pads and capacity is None:
            continue
        tokens = (7,) * len(TOKENS) if pads else TOKENS
        layer = made(
            etp, activation, top_k=top_k, capacity_factor=capacity,
            memory_reuse="none" if pads else how, pad_to_capacity=pads,
        )  # fmt: skip
        layer.pin(Decision(forward_degree=degree, backward_degree=4 - degree))
        reference = alone(activation, top_k)
        for name, value in layer.experts.state_dict().items():
            assert torch.equal(whole(value), reference.experts.state_dict()[name]), name
        for _ in range(2):  # counts of the second step travel with the opening
            layer.zero_grad()
            _check(layer, reference, tokens, capacity)


def _check(
    layer: MoELayer, reference: MoELayer, tokens: Sequence[int], capacity: float | None
) -> None:
    weights = _weights(reference)
    total: torch.Tensor | float = 0.0
    mine = None
    for rank in range(dist.get_world_size()):
        x, dy = _tokens(rank, tokens)
        y, aux, dropped = dense_moe(
            x, weights, top_k=layer.shape.top_k, activation=layer.shape.activation,
            normalize=layer.gate.normalize_topk, capacity_factor=capacity,
        )  # fmt: skip
        loss = (y * dy).sum() + AUX_SCALE * aux
        if rank == dist.get_rank():
            gate_grad = torch.autograd.grad(loss, weights.gate, retain_graph=True)[0]
            mine = x, y, aux, dropped, gate_grad
        total = total + loss
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert mine is not None
    wanted_x, wanted_y, aux, dropped, gate_grad = mine
    x, dy = _tokens(dist.get_rank(), tokens)
    y = layer(x)
    ((y * dy).sum() + AUX_SCALE * layer.aux_loss).backward()
    _same(y, wanted_y)
    _same(x.grad, wanted_x.grad)
    _same(layer.aux_loss, aux)
    assert layer.num_dropped == dropped
    _same(layer.gate.weight.grad, gate_grad)
    placement = layer.experts.placement
    for name, parameter in layer.experts.named_parameters():
        grad = getattr(weights, name).grad
        _same(parameter.grad, placement.own(name, grad))


def _weights(layer: MoELayer) -> Weights:
    found: dict[str, Any] = {"b1": None, "b2": None, "w3": None}
    for name, value in (*layer.experts.named_parameters(), ("gate", layer.gate.weight)):
        found[name] = value.detach().clone().requires_grad_()
    return Weights(**found)


def _tokens(rank: int, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    size = tokens[rank], D_MODEL
    x = torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(size, generator=generator, dtype=torch.float64)


def _same(found: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    assert found is not None
    assert wanted is not None
    assert relative_error(found, wanted) <= RELATIVE


def a_layer_keeps_what_the_plan_says() -> None:
    """Two ranks share widths; both have equal tokens, all of which go to both."""
    tokens, width, hidden, experts, top_k = 64, 256, 384, 4, 2
    layer = MoELayer(
        width, hidden, experts, top_k, activation="swiglu", pipeline=False, width=_pair(),
        dtype=torch.bfloat16,
    )  # fmt: skip
    x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    with Allocations() as made:
        y = layer(x)
    block = torch.nn.ModuleDict({"ffn": layer})
    kept = made.kept_bytes(block) - y.nbytes - x.nbytes
    shape = Transformer(
        moe=layer.shape, num_layers=1, num_heads=8, length=tokens, vocab_size=32, moe_every=1
    )
    decoder = paper_decoder("block", shape)
    job = TrainingJob(decoder=decoder, world_size=2, global_batch=2, length=tokens)
    modules = block_modules(
        decoder.blocks[0], job, FoldedLayout(dp=2, etp=2), find_target("moetune")
    )
    wanted = modules["experts"] + modules["router"]
    assert abs(kept - wanted) <= 0.04 * wanted + 4096, (kept, wanted)


def records_count_whole_experts() -> None:
    """Two pairs of ranks share widths."""
    layer, reference = made(2, "gelu", top_k=2), alone("gelu", 2)
    counts = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    for rank in range(4):
        x = _tokens(rank, TOKENS)[0]
        chosen = torch.softmax(x @ reference.gate.weight.T, -1).topk(2).indices
        counts += torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS)
        if rank == dist.get_rank():
            layer(x)
    record = layer.routing_record()
    assert list(record.loads) == counts.tolist()


def load_train_and_save(etp: int, folder: str) -> None:
    """Continue what another number of ranks has saved, and hold it against one process."""
    layer = made(etp, "gelu", top_k=2) if etp > 1 else _uncut()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    reference = alone("gelu", 2)
    wanted = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    number = Path(folder) / "number"
    done = int(number.read_text()) if number.exists() else 0
    if done:
        state = _state(layer, optimizer)
        dcp_load(state, checkpoint_id=f"{folder}/{done}")
        set_state_dict(
            layer, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    for step in range(done + 1):
        _step(reference, wanted, step, range(4))
    each = 4 // dist.get_world_size()
    first = dist.get_rank() * each
    _step(layer, optimizer, done, range(first, first + each))
    for name, value in layer.experts.named_parameters():
        whole_one = reference.experts.get_parameter(name).detach()
        _same(value.detach(), layer.experts.placement.own(name, whole_one))
    dcp_save(_state(layer, optimizer), checkpoint_id=f"{folder}/{done + 1}")
    dist.barrier()
    if dist.get_rank() == 0:
        number.write_text(str(done + 1))


def _state(layer: MoELayer, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, states = get_state_dict(layer, optimizer)
    return {"model": model, "optimizer": states}


def _step(
    layer: MoELayer, optimizer: torch.optim.Optimizer, step: int, parts: Sequence[int]
) -> None:
    """Take a step of a global batch of four parts; the gate's gradients are summed over ranks."""
    optimizer.zero_grad()
    for part in parts:
        x, dy = _tokens(10 * step + part, [5] * 100)
        (layer(x) * dy).sum().backward()
    if layer.communicator.num_ranks > 1:
        dist.all_reduce(layer.gate.weight.grad)
    optimizer.step()


def _uncut() -> MoELayer:
    torch.manual_seed(5)
    return MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, dtype=torch.float64)


def refuse_by_name() -> None:
    """Two ranks share widths, or would."""
    both = _pair()
    for words, options in (
        (r"d_hidden \(9\) does not divide by the 2 ranks", {"d_hidden": 9}),
        ("b2 of width 7 does not divide by the 2 ranks", {"d_model": 7}),
        ("stay in their own order", {"placement": [1, 0, 2, 3]}),
        ("one of mesh and width", {"mesh": both}),
        ("cut over ranks", {"communicator": OneRank()}),
        ("must be a DeviceMesh .* got int", {"width": 2}),
        ("has dimensions", {"width": init_device_mesh("cpu", (2,), mesh_dim_names=("all",))}),
    ):
        given: dict[str, Any] = {
            "d_model": 8, "d_hidden": 12, "num_experts": 4, "width": both, **options,
        }  # fmt: skip
        with pytest.raises(InputError, match=words):
            MoELayer(**given)
    with pytest.raises(InputError, match=r"call moetune\.prepare_fsdp"):
        fully_shard(made(2, "gelu"), mesh=init_device_mesh("cpu", (2,)))
    local = made(2, "gelu").experts
    with pytest.raises(InputError, match="load it with torch"):
        local.load_state_dict(_uncut().experts.state_dict())


def groups_are_those_of(layout: FoldedLayout) -> None:
    """Ranks of one width are consecutive, and replicas have the same shards."""
    ranks, mine = join(layout), dist.get_rank()
    assert ranks.width is not None
    both = layout.ep * layout.etp
    first = mine // both * both
    assert ranks.width.mesh.flatten().tolist() == [*range(first, first + both)]
    assert ranks.expert_communicator.members == tuple(range(first, first + both))
    start = mine // layout.etp * layout.etp
    widths = dist.get_process_group_ranks(ranks.width.get_group("width"))
    assert widths == [*range(start, start + layout.etp)]
    stage = mine // layout.stage_ranks * layout.stage_ranks
    same = range(stage + mine % both, stage + layout.stage_ranks, both)
    assert dist.get_process_group_ranks(ranks.replicas) == [*same]
    layer = ranks.expert_layer(
        LayerShape(d_model=D_MODEL, d_hidden=D_HIDDEN, num_experts=NUM_EXPERTS, top_k=2)
    )
    own = NUM_EXPERTS // layout.ep, D_MODEL, D_HIDDEN // layout.etp
    assert layer.experts.w1.shape == own


def _pair() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("experts", "width"))
