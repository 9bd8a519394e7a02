"""The part on two batches in turns: their gradients against one process', and their time.

Over the loopback, and where there are several devices over their link.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

import moetune
from benchmarks.gpu.layers import link
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.scale import Scale
from moetune import config
from moetune.comm.agree import largest
from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator, OneRank
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Decision
from moetune.runtime.moe.layer import MoELayer
from moetune.workflows.launch import rank_device, run_on_ranks

_BLOCKS, _LENGTH, _HEAD, _WARM_UP = 2, 1024, 64, 2
_DEGREES = 2
"""Of the scale's, the smallest."""
_EXACT = LayerShape(d_model=64, d_hidden=128, num_experts=1)
_EXACT_TOKENS = 96

Run = Callable[[], Sequence[torch.Tensor]]


class Model(nn.Module):
    """Blocks of attention, a dense layer and experts.

    Args:
        shape: of a layer of experts, on all ranks.
        communicator: of the experts; None for all ranks'.
    """

    def __init__(
        self, shape: LayerShape, dtype: torch.dtype, communicator: Communicator | None
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(_BLOCKS):
            dense = nn.TransformerEncoderLayer(
                shape.d_model, max(1, shape.d_model // _HEAD), shape.d_hidden, dropout=0.0,
                batch_first=True, dtype=dtype,
            )  # fmt: skip
            experts = MoELayer(
                shape.d_model, shape.d_hidden, shape.num_experts, shape.top_k,
                activation=shape.activation, dtype=dtype, communicator=communicator,
            )  # fmt: skip
            self.blocks += [dense, experts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a batch's loss."""
        for block in self.blocks:
            x = block(x) if isinstance(block, nn.TransformerEncoderLayer) else x + block(x)
        return x.float().square().mean() if x.dtype == torch.bfloat16 else x.square().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Two batches a rank, of one model.

    Args:
        tokens: of a batch.
    """

    shape: LayerShape
    tokens: int
    dtype: torch.dtype
    device: torch.device
    num_ranks: int

    def model(self, communicator: Communicator | None) -> Model:
        """Return the model, the same whatever the communicator."""
        torch.manual_seed(7)
        with self.device:
            return Model(self.shape, self.dtype, communicator)

    def parallel_model(self) -> Model:
        """Return the model over the loopback, or replicated over the ranks."""
        if self.num_ranks == 1:
            return self.model(link(self.device))
        return moetune.replicate(self.model(None))

    def batch(self, number: int) -> torch.Tensor:
        """Return one batch of all ranks'."""
        generator = torch.Generator().manual_seed(number)
        length = min(_LENGTH, self.tokens)
        size = self.tokens // length, length, self.shape.d_model
        return torch.randn(size, generator=generator).to(self.device, self.dtype)


def run_turns(scale: Scale, folder: Path) -> None:
    """Compare and time two batches in turns at two degrees, and write a row each."""
    rows = Rows(folder, "turns")
    for num_ranks in dict.fromkeys((1, scale.num_ranks)):
        for row in _measured(scale, num_ranks):
            rows.add(ranks=num_ranks, tokens=scale.tokens[0], **row)


def deviation(device: torch.device, *, degree: int, num_ranks: int = 1) -> float:
    """Return how far losses and gradients in turns are from one process' (2-norm), in float64.

    With several ranks all of them call this.
    """
    case = _Case(
        shape=_spread(_EXACT, 4 * num_ranks), tokens=_EXACT_TOKENS, dtype=torch.float64,
        device=device, num_ranks=num_ranks,
    )  # fmt: skip
    rank = _communicator(num_ranks).rank
    model, alone = case.parallel_model(), case.model(OneRank())
    _pin(model, degree)
    mine = [rank, num_ranks + rank]
    overlap = moetune.BatchOverlap[torch.Tensor](model, model)
    overlap([case.batch(number) for number in mine])
    model.zero_grad()  # the second step's gradients are sent in the order of the first one's
    losses = overlap([case.batch(number) for number in mine])
    wanted = []
    for number in range(2 * num_ranks):
        wanted.append(alone(case.batch(number)))
        (wanted[-1] / num_ranks).backward()
    differences = [
        _difference(one, wanted[number].detach()) for one, number in zip(losses, mine, strict=True)
    ]
    grads = _grads(alone)
    for name, grad in _grads(model).items():
        parts = grads[name].chunk(num_ranks) if ".experts." in name else [grads[name]] * num_ranks
        differences.append(_difference(grad, parts[rank]))
    return max(differences)


def _measured(scale: Scale, num_ranks: int) -> list[dict[str, float]]:
    if num_ranks == 1:
        return _rows(scale, num_ranks, scale.torch_device)
    found: list[dict[str, float]] = run_on_ranks(
        _on_rank, (scale, num_ranks), num_ranks=num_ranks, launch=None,
        environ=config.environment(),
    )  # fmt: skip
    return found


def _on_rank(given: tuple[Scale, int], _: object) -> list[dict[str, float]]:
    return _rows(*given, rank_device())


def _rows(scale: Scale, num_ranks: int, device: torch.device) -> list[dict[str, float]]:
    case = _Case(
        shape=_spread(list(scale.models.values())[-1], num_ranks), tokens=scale.tokens[0],
        dtype=getattr(torch, scale.dtype), device=device, num_ranks=num_ranks,
    )  # fmt: skip
    model, rank = case.parallel_model(), _communicator(num_ranks).rank
    batches = [case.batch(rank), case.batch(num_ranks + rank)]
    overlap = moetune.BatchOverlap[torch.Tensor](model, model)
    ways: dict[str, Run] = {
        "turns_seconds": partial(overlap, batches),
        "alone_seconds": partial(_one_after_the_other, model, batches, num_ranks),
    }
    rows: list[dict[str, float]] = []
    for degree in scale.degrees[:_DEGREES]:
        _pin(model, degree)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(_WARM_UP + scale.num_rounds):
            for way, run in ways.items():
                model.zero_grad()
                times[way].append(_seconds(run, device, num_ranks))
        found = {way: statistics.median(each[_WARM_UP:]) for way, each in times.items()}
        exact = deviation(device, degree=degree, num_ranks=num_ranks)
        rows.append({"degree": degree, "deviation": exact, **found})
    return rows


def _pin(model: Model, degree: int) -> None:
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.pin(Decision(forward_degree=degree, backward_degree=degree))


def _communicator(num_ranks: int) -> Communicator:
    return OneRank() if num_ranks == 1 else communicator_of(None)


def _one_after_the_other(
    model: Model, batches: Sequence[torch.Tensor], num_ranks: int
) -> list[torch.Tensor]:
    losses = [model(batches[0])]
    with contextlib.nullcontext() if num_ranks == 1 else moetune.no_sync(model):
        losses[0].backward()
    losses.append(model(batches[1]))
    losses[1].backward()
    return losses


def _seconds(run: Run, device: torch.device, num_ranks: int) -> float:
    """Return the time of one run, of the slowest rank."""
    _synchronize(device)
    communicator = _communicator(num_ranks)
    communicator.barrier("the start of a step")
    start = time.perf_counter()
    run()
    _synchronize(device)
    return largest(communicator, (time.perf_counter() - start,), "the time of a step")[0]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _spread(shape: LayerShape, num_experts: int) -> LayerShape:
    return LayerShape(
        d_model=shape.d_model, d_hidden=shape.d_hidden, num_experts=num_experts, top_k=1,
        activation=shape.activation,
    )  # fmt: skip


def _grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in model.named_parameters()
    }


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    norm = float(wanted.norm())
    return float((found - wanted).norm()) / norm if norm else float(found.norm())
