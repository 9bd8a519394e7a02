"""The order in which a rank issues transfers and computations, under every memory policy."""

import contextlib

import pytest
import torch

from moetune.comm.group import OneRank, Transfer
from moetune.domain.constraints import Order, Strategy
from moetune.domain.layer import Phase
from moetune.domain.plan import Decision
from moetune.runtime.moe.layer import ExpertLayer, MoELayer, TensorExpertLayer
from moetune.runtime.trace import SpanRecorder

LETTERS = {"dispatch": "D", "combine": "C", "sum": "S", "experts": "E", "weights": "W"}


class Wire(OneRank):
    """One rank that exchanges rows with itself: of a plain one nothing is issued."""


class Issued(SpanRecorder):
    """Notes what is issued: D1 is the first chunk's dispatch, E1 its experts, C1 its combine."""

    def __init__(self) -> None:
        self.steps: dict[str, list[str]] = {"forward": [], "backward": []}

    def compute(
        self, phase: Phase, name: str, chunk: int
    ) -> contextlib.AbstractContextManager[None]:
        self.steps[phase].append(f"{LETTERS[name]}{chunk + 1}")
        return contextlib.nullcontext()

    def exchange(
        self, phase: Phase, name: str, chunk: int, num_bytes: int  # noqa: ARG002 - the protocol's
    ) -> contextlib.AbstractContextManager[None]:  # fmt: skip
        return self.compute(phase, name, chunk)

    def transfer(
        self, phase: Phase, name: str, chunk: int, transfer: Transfer, num_bytes: int  # noqa: ARG002 - the protocol's
    ) -> Transfer:  # fmt: skip
        self.steps[phase].append(f"{LETTERS[name]}{chunk + 1}")
        return transfer


def issued(layer: ExpertLayer, decision: Decision) -> tuple[str, str]:
    """Return what one step issues forward and backward."""
    layer.recorder = recorder = Issued()
    layer.pin(decision)
    x = torch.randn(24, 8, requires_grad=True)
    layer(x).sum().backward()
    forward, backward = (" ".join(steps) for steps in recorder.steps.values())
    return forward, backward


def decision_of(degree: int, **options: object) -> Decision:
    return Decision(forward_degree=degree, backward_degree=degree, **options)  # type: ignore[arg-type]  # of any field


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        (
            "dispatch_first",
            ("W1 D1 D2 D3 D4 E1 C1 E2 C2 E3 C3 E4 C4", "D1 D2 D3 D4 E1 C1 E2 C2 E3 C3 E4 C4 W1"),
        ),
        (
            "interleaved",
            ("W1 D1 D2 E1 C1 D3 E2 C2 D4 E3 C3 E4 C4", "D1 D2 E1 C1 D3 E2 C2 D4 E3 C3 E4 C4 W1"),
        ),
    ],
)
def test_kept_chunks_are_issued_in_the_plans_order(order: Order, wanted: tuple[str, str]) -> None:
    layer = MoELayer(8, 16, 4, memory_reuse=False, communicator=Wire())
    assert issued(layer, decision_of(4, order=order)) == wanted


@pytest.mark.parametrize(
    ("strategy", "backward"),
    [
        ("S1", "D1 D2 E1 C1 D3 E2 C2 D4 E3 C3 E4 C4"),
        ("S3", "D1 D2 E1 C1 D3 E2 C2 D4 E3 C3 E4 C4"),
        # What the experts received is sent again, before the gradients.
        ("S2", "D1 D1 D2 D2 E1 C1 D3 D3 E2 C2 D4 D4 E3 C3 E4 C4"),
        ("S4", "D1 D1 D2 D2 E1 C1 D3 D3 E2 C2 D4 D4 E3 C3 E4 C4"),
    ],
)
def test_reused_buffers_are_refilled_as_soon_as_the_experts_have_left_them(
    strategy: Strategy, backward: str
) -> None:
    forward = "D1 D2 E1 D3 C1 E2 D4 C2 E3 C3 E4 C4"
    layer = MoELayer(8, 16, 4)
    assert issued(layer, decision_of(4, strategy=strategy)) == (forward, backward)


def test_tensor_parallel_sums_follow_their_chunk() -> None:
    layer = TensorExpertLayer(8, 16, 4)
    assert issued(layer, decision_of(3)) == ("E1 S1 E2 S2 E3 S3",) * 2


def test_one_chunk_reuses_nothing_whatever_the_strategy() -> None:
    layer = MoELayer(8, 16, 4, communicator=Wire())
    assert issued(layer, decision_of(1, strategy="S4")) == ("W1 D1 E1 C1", "D1 E1 C1 W1")


def test_one_rank_exchanges_nothing() -> None:
    layer = MoELayer(8, 16, 4, memory_reuse=False)
    assert issued(layer, decision_of(2)) == ("E1 E2",) * 2
