"""Pieces of dense gradients on a GPU: on a stream of their own, and awaited by the optimizer."""

import pytest
import torch
from torch import nn

import moetune
from moetune.domain.gradients import GradientPiece, GradientSchedule
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.parallel.senders import StreamSender
from tests.cuda_kit import FakeCuda
from tests.runtime.gpu_runs import GPU, NCCL, on_every_rank

WIDTH = 8
PIECES = tuple(
    GradientPiece(phase=phase, chunk=chunk, end_bytes=end)
    for phase, chunk, end in ((-1, None, 100), (0, 1, 288), (0, None, 400), (1, 0, 500))
)


def _train(_: FakeCuda, schedule: GradientSchedule | None) -> None:
    torch.cuda.set_device(GPU)
    model = nn.Sequential(
        *(
            module
            for _ in range(2)
            for module in (nn.Linear(WIDTH, WIDTH), MoELayer(WIDTH, WIDTH, 4, pipeline=3))
        ),
        nn.Linear(WIDTH, WIDTH),
    ).to(GPU)
    moetune.replicate(model, schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _number in range(3):
        model(torch.randn(12, WIDTH, device=GPU)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("schedule", [None, GradientSchedule(pieces=PIECES)])
def test_pieces_wait_for_gradients_and_the_optimizer_for_pieces(
    schedule: GradientSchedule | None,
) -> None:
    on_every_rank(lambda cuda: _train(cuda, schedule), backends=NCCL)


@pytest.mark.parametrize("left_out", ["wait_stream", "finish"])
def test_a_wait_that_is_left_out_is_found(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(cuda: FakeCuda) -> None:
        if left_out == "finish":
            monkeypatch.setattr(StreamSender, "finish", lambda _: None)
        else:
            monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
        _train(cuda, None)

    with pytest.raises(AssertionError):
        on_every_rank(program, backends=NCCL)
