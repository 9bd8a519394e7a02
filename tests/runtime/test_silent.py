"""What must not go wrong in layers without a word, on real ranks."""

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import moetune
from moetune.comm.gloo import shared_communicator
from moetune.domain.constraints import Strategy
from moetune.domain.errors import InputError
from moetune.domain.plan import Decision
from moetune.runtime.moe.planned_layer import PlannedLayer
from tests.adapters.tiny_models import tiny
from tests.adapters.tiny_models import tokens_of as text_of
from tests.adapters.workers import raised, rank_of, same_on_all
from tests.ranks import run_ranks

TOLERANCE = 1e-10


def layer_of(*, top_k: int = 2) -> moetune.MoELayer:
    """Return a layer with equal parameters on every rank."""
    torch.manual_seed(0)
    return moetune.MoELayer(6, 5, 8, top_k, activation="swiglu", dtype=torch.float64)


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def tokens_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(12 + rank, 6, generator=generator, dtype=torch.float64)


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def parametrized_experts() -> None:
    layer = layer_of()
    register_parametrization(layer.experts, "w1", Twice())
    text = same_on_all(raised(lambda: layer(tokens_of(rank_of()[0]))))
    assert "w1 is computed from other parameters, as by LoRA" in text


class Blocks(nn.Module):
    """Two blocks with a layer each, under checkpoints or not."""

    def __init__(self, *, reentrant: bool | None, weight: float = 0.0) -> None:
        super().__init__()
        self.layers = [layer_of(), layer_of()]
        self.blocks = nn.ModuleList(self.layers)
        self.reentrant, self.weight = reentrant, weight

    def _block(self, layer: moetune.MoELayer, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + layer(x)
        return y + self.weight * layer.aux_loss if self.weight else y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = self._block(layer, x)
            else:
                x = checkpoint(self._block, layer, x, use_reentrant=self.reentrant)
        return x


def counts_each_step_once() -> None:
    """The record of the routing is the same with and without checkpoints."""
    rank, records = rank_of()[0], []
    for reentrant in (None, False, True):
        model = Blocks(reentrant=reentrant)
        for step in range(10):
            x = tokens_of(100 * step + rank)[:12].requires_grad_()
            model(x).sum().backward()
            with torch.no_grad():  # a pass that trains nothing
                model(x)
        records.append(moetune.routing_record(model).layers)
    assert records[0] == records[1] == records[2]
    for layer in records[0]:
        assert layer.num_steps == 10
        assert sum(layer.loads) == 10 * rank_of()[1] * 12 * 2


def balances_under_checkpoints() -> None:
    """The balance loss has its gradient, or is refused where it would have none."""
    rank, runs = rank_of()[0], list[list[torch.Tensor]]()
    for reentrant in (None, False, True):
        model = Blocks(reentrant=reentrant, weight=0.1)
        model(tokens_of(rank).requires_grad_()).sum().backward()
        runs.append([grad_of(layer.gate.weight) for layer in model.layers])
    for grads in runs[1:]:
        for grad, wanted in zip(grads, runs[0], strict=True):
            assert (grad - wanted).abs().max() <= TOLERANCE
    model = Blocks(reentrant=True)
    y = model(tokens_of(rank).requires_grad_())
    text = same_on_all(raised(lambda: model.layers[0].aux_loss))
    assert "checkpoint with use_reentrant=False" in text
    with torch.no_grad():
        assert model.layers[0].aux_loss > 0
    y.sum().backward()
    model.eval()
    with torch.no_grad():
        model(tokens_of(rank))
    assert model.layers[0].aux_loss > 0


class Chunked(nn.Module):
    """A layer between two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))
        self.layer = layer_of()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.layer(self.first(x)))
        return y


def clips_a_model_in_chunks() -> None:
    """The norm is that of the same model under DistributedDataParallel."""
    plain = Chunked()
    wrapped = DistributedDataParallel(moetune.prepare_ddp(plain))
    model = Chunked()
    moetune.shard(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = tokens_of(rank_of()[0])
    for each in (wrapped, model):
        (100 * each(x).square().sum()).backward()
    norms = [moetune.clip_grad_norm_(each, 1.0) for each in (model, plain)]
    assert norms[0] > 100
    assert (norms[0] - norms[1]).abs() <= TOLERANCE * norms[1]
    assert (moetune.clip_grad_norm_(model, 1.0) - 1).abs() <= 1e-6


def _give(parameter: nn.Parameter, square: float) -> None:
    """Give a parameter a gradient of a squared norm on this rank."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    grad = torch.full_like(local, (square / max(1, local.numel())) ** 0.5)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        grad = DTensor.from_local(grad, mesh, placements, run_check=False)
    parameter.grad = grad


def _expert_model(kind: str) -> tuple[nn.Module, list[nn.Parameter]]:
    """Return a model and the experts' parameters; w3 is frozen in one kind."""
    model: nn.Module = Chunked()
    if kind == "adapt":
        model = moetune.adapt(tiny("Qwen3Moe", num_hidden_layers=1))
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (rank_of()[1],))
        fully_shard(moetune.prepare_fsdp(model, mesh), mesh=mesh)
    elif kind == "ddp":
        DistributedDataParallel(moetune.prepare_ddp(model))
    elif kind == "experts":
        model = layer_of().experts
    elif kind == "frozen":
        layer_of_model(model).experts.get_parameter("w3").requires_grad_(requires_grad=False)
    experts = model if kind == "experts" else layer_of_model(model).experts
    return model, [each for each in experts.parameters() if each.requires_grad][:2]


def layer_of_model(model: nn.Module) -> Any:
    return next(each for each in model.modules() if isinstance(each, PlannedLayer))


def has_one_norm_on_all_ranks() -> None:
    """The norm of moetune's function, and that of torch's, which scripts and libraries call."""
    kinds = ("plain", "ddp", "fsdp", "adapt", "frozen", "experts")
    for kind, is_torchs, has_none in itertools.product(kinds, (False, True), (False, True)):
        _clip_together(kind, is_torchs=is_torchs, has_none=has_none)
    assert moetune.clip_grad_norm_(layer_of().experts, 1.0) == 0
    rank, num_ranks = rank_of()
    for has_dense in (True, False):  # the first rank has no gradient of its experts, or none
        model, pair = _expert_model("plain")
        for each in _dense(model) if has_dense else ():
            each.grad = torch.zeros_like(each)
        for each in pair if rank else ():
            _give(each, 30.0)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        assert abs(float(norm) - (60.0 * (num_ranks - 1)) ** 0.5) <= TOLERANCE, norm
    model, pair = _expert_model("plain")
    for each in pair:
        _give(each, 50.0 if rank % 2 else 10.0)
    largest = max(float(grad_of(each).abs().max()) for each in pair)
    values = shared_communicator().all_gather_object(largest, "the largest values")
    norm = clip_grad_norm_(model.parameters(), 1.0, float("inf"))
    assert abs(float(norm) - max(values)) <= TOLERANCE


def _dense(model: nn.Module) -> list[nn.Parameter]:
    return [each for name, each in model.named_parameters() if "experts." not in name]


def _clip_together(kind: str, *, is_torchs: bool, has_none: bool) -> None:
    """Two matrices of squared norm 10 on even ranks and 50 on odd ones, or none on the first."""
    rank, num_ranks = rank_of()
    model, (first, second) = _expert_model(kind)
    for each in () if kind == "experts" else _dense(model):
        each.grad = torch.zeros_like(each)
    mine = 50.0 if rank % 2 else 10.0
    for each in (first, second):
        _give(each, mine)
    if has_none and rank == 0:
        first.grad = None
    if is_torchs and kind == "fsdp":
        text = same_on_all(raised(lambda: clip_grad_norm_(model.parameters(), 1.0)))
        assert "use moetune.clip_grad_norm_(model, max_norm)" in text
        return
    if is_torchs:
        norm = clip_grad_norm_(model.parameters(), 1.0)
    else:
        norm = moetune.clip_grad_norm_(model, 1.0)
    wanted = 60.0 * num_ranks - 10 * has_none
    assert abs(float(norm) - wanted**0.5) <= TOLERANCE, (kind, is_torchs, has_none, norm)
    if first.grad is not None:
        grad = first.grad.to_local() if isinstance(first.grad, DTensor) else first.grad
        square = float(grad.square().sum())
        assert abs(square - mine / wanted) <= 1e-6, (kind, is_torchs, has_none)


def steps_or_skips_together() -> None:
    """An overflow in the last rank's experts alone: no rank steps, and all lower the scale."""
    rank, num_ranks = rank_of()
    for kind, fused in (("ddp", False), ("ddp", True), ("fsdp", False), ("adapt", False)):
        model, (first, _) = _expert_model(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        for overflows, scale in ((True, 4.0), (False, 4.0)):
            before = [each.detach().clone() for each in model.parameters()]
            for each in model.parameters():
                each.grad = torch.ones_like(each)
            if overflows and rank == num_ranks - 1:
                _give(first, float("inf"))
            scaler.scale(torch.zeros(()))
            if not fused:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale, (kind, fused, overflows)
            for value, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(value, old) == overflows, (kind, fused, overflows)


def _trained(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Train a model for two steps, and return its state and the optimizer's."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        output = model(x)
        getattr(output, "logits", output).sum().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def _equal(actual: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return list(actual) == list(wanted) and all(
            _equal(actual[key], wanted[key]) for key in wanted
        )
    if isinstance(wanted, DTensor):
        return torch.equal(actual.full_tensor(), wanted.full_tensor())
    return torch.equal(actual, wanted) if isinstance(wanted, torch.Tensor) else actual == wanted


def copies_share_the_ranks() -> None:
    """Copies of a trained layer, of an adapted model, and their averages train as they do."""
    rank, _ = rank_of()
    makes: tuple[Callable[[], nn.Module], ...] = (
        Chunked,
        lambda: moetune.TensorExpertLayer(6, 4, 8, 2, dtype=torch.float64),
        lambda: moetune.adapt(tiny("Qwen3Moe", num_hidden_layers=1)),
        lambda: moetune.adapt(tiny("Qwen2Moe", num_hidden_layers=2)),
    )
    for make in makes:
        model = make()
        is_language = hasattr(model, "config")
        x = text_of(rank) if is_language else tokens_of(0)
        moetune.prepare_ddp(model)
        DistributedDataParallel(model)
        _trained(model, x)
        model.zero_grad()
        if rank_of()[1] > 1:
            with pytest.raises(InputError, match="cannot be pickled"):
                pickle.dumps(model)
        copies = [copy.deepcopy(model), AveragedModel(model).module]
        tags = [getattr(each, "allreduce", None) for each in model.parameters()]
        for each in copies:
            assert tags == [getattr(weight, "allreduce", None) for weight in each.parameters()]
            assert type(each) is type(model)
        wanted = _trained(model, x)
        for each in copies:
            assert _equal(_trained(each, x), wanted), type(model)
        if is_language:
            text = same_on_all(raised(lambda: fully_shard(copies[0])))  # noqa: B023 - called at once
            assert "call moetune.prepare_fsdp(model, mesh) first" in text


def fsdp_sees_no_view() -> None:
    """torch warns of modules whose results are views, which a layer's are not."""
    mesh = init_device_mesh("cpu", (rank_of()[1],))
    strategies: tuple[Strategy, ...] = ("none", "S1", "S4")
    for top_k, strategy in itertools.product((1, 2), strategies):
        layer = layer_of(top_k=top_k)
        fully_shard(moetune.prepare_fsdp(layer, mesh), mesh=mesh)
        layer.pin(Decision(forward_degree=2, backward_degree=2, strategy=strategy))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(tokens_of(rank_of()[0])).sum().backward()


def any_ranks() -> None:
    """What is shown on any number of ranks, which are started once."""
    fsdp_sees_no_view()
    parametrized_experts()
    copies_share_the_ranks()
    clips_a_model_in_chunks()
    steps_or_skips_together()
    has_one_norm_on_all_ranks()
    counts_each_step_once()
    balances_under_checkpoints()


# One start of the ranks for all that they show.
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_nothing_goes_wrong_without_a_word(num_ranks: int) -> None:
    assert run_ranks(any_ranks, num_ranks) == [""] * num_ranks
