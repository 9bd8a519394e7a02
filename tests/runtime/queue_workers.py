"""What ranks do in the test of a step's queue: record what they issue, against the timeline."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moetune
from examples.language_model import LanguageModel, next_token_loss
from moetune.domain.constraints import LayoutPins
from moetune.domain.gradients import GradientPiece, GradientSchedule, default_schedule
from moetune.domain.layer import LayerShape
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.plan import Decision
from moetune.runtime.moe.executor import Executor
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.parallel.senders import ThreadSender
from moetune.solve.layer.all_to_all import AllToAllCosts
from moetune.solve.layer.timeline import LINK
from moetune.solve.layout.choose import search_layouts
from moetune.solve.model.program import GRADIENTS, Reduction, made_gradients, step_tasks
from moetune.solve.model.replicas import ReplicaStep
from tests.solve.test_layout_plan import question

SHAPE = Transformer(
    moe=LayerShape(d_model=32, d_hidden=48, num_experts=4, top_k=2), num_layers=4, num_heads=4,
    length=32, vocab_size=40_000, moe_every=2,
)  # fmt: skip
"""Its embedding is more than is held back behind the last phase."""
SEQUENCES = 4
PLANNED = GradientSchedule(
    pieces=(
        GradientPiece(phase=-1, chunk=None, end_bytes=5000),
        GradientPiece(phase=0, chunk=0, end_bytes=6000),
        GradientPiece(phase=0, chunk=2, end_bytes=5_000_000),
        GradientPiece(phase=0, chunk=None, end_bytes=5_120_256),
        GradientPiece(phase=1, chunk=0, end_bytes=5_125_000),
        GradientPiece(phase=1, chunk=1, end_bytes=5_150_000),
    )
)
"""Pieces at every kind of point, two of which wait for their gradients."""


Half = tuple[torch.Tensor, torch.Tensor, int]


def planned_step() -> ReplicaStep:
    """The model's step as the planner has it, with the bytes of float32."""
    layout = Layout(expert_parallel="all_to_all", dp=2, ep=2, tp=1, pp=1)
    pins = LayoutPins(dp=2, ep=2, tp=1, pp=1)
    tokens = SEQUENCES * SHAPE.length
    problem = question(world_size=2, model=SHAPE, pins=pins, tokens=tokens)
    search, _ = search_layouts(replace(problem, runs_ahead=False))
    groups = search.prices.groups(layout)
    return ReplicaStep(
        model=SHAPE, dtype="float32", costs=problem.costs, groups=groups, tokens=tokens,
        priced=search.prices.priced(
            layout=layout, groups=groups, sequences=SEQUENCES, one_chunk=False
        ),
        layer=AllToAllCosts(layer=SHAPE.moe, world_size=2, dtype="float16", costs=problem.costs),
    )  # fmt: skip


def in_halves(step: ReplicaStep) -> ReplicaStep:
    """The step with first and last positions in turns; only the order of what it has counts."""
    return replace(step, last=step.priced)


def predicted(
    step: ReplicaStep, degrees: tuple[int, int], in_flight: int, schedule: GradientSchedule | None
) -> list[str]:
    """What the timeline of the step has on the link, in the order of issue."""
    program = step.program(degrees)
    reduction = Reduction(
        schedule=schedule or default_schedule(made_gradients(program)), seconds=float
    )
    tasks = step_tasks(step.programs(degrees, in_flight=in_flight), reduction=reduction)
    found = []
    for task in tasks:
        kind, chunk, _, phase, *_ = (*task.name.split(), "", "", "", "")
        if task.stream == GRADIENTS:
            found.append(f"gradients {task.seconds:.0f}")
        elif task.stream == LINK and kind in {"dispatch", "combine"}:
            found.append(f"{phase} {kind} {chunk}")
    return found


@contextmanager
def issued() -> Iterator[list[str]]:
    """What this rank issues to the link, in order."""
    found, exchange, piece = list[str](), Executor.start, ThreadSender.start

    def start(self: Executor, step: str, chunk: int, *rest: Any, **named: Any) -> Any:
        found.append(f"{self._phase} {step} {chunk}")
        return exchange(self, step, chunk, *rest, **named)

    def send(self: ThreadSender, parts: list[torch.Tensor], behind: Any) -> None:
        found.append(f"gradients {sum(part.nbytes for part in parts)}")
        piece(self, parts, behind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "start", start)
        patch.setattr(ThreadSender, "start", send)
        yield found


def model(degrees: tuple[int, int], schedule: GradientSchedule | None) -> LanguageModel:
    moe = SHAPE.moe
    found = LanguageModel(
        SHAPE,
        lambda: MoELayer(moe.d_model, moe.d_hidden, moe.num_experts, moe.top_k, memory_reuse=False),
    )
    found.reset_parameters(1)
    for layer in found.modules():
        if isinstance(layer, MoELayer):
            layer.pin(Decision(forward_degree=degrees[0], backward_degree=degrees[1]))
    for name, each in found.named_parameters():
        if name.endswith(".bias") and "norm" not in name:
            each.requires_grad = False  # the planner leaves them out
    return moetune.replicate(found, schedule)


def loss_of(net: LanguageModel, text_BS: torch.Tensor) -> torch.Tensor:
    return next_token_loss(net(text_BS[:, :-1]), text_BS[:, 1:])


def halves_of(text_BS: torch.Tensor) -> list[Half]:
    """First and last positions: tokens, the next ones, and the place of the first."""
    x_BS, next_BS = text_BS[:, :-1], text_BS[:, 1:]
    starts = (0, x_BS.shape[1] // 2)
    return list(zip(x_BS.chunk(2, dim=1), next_BS.chunk(2, dim=1), starts, strict=True))


def loss_of_half(net: LanguageModel, half: Half) -> torch.Tensor:
    tokens_BS, next_BS, start = half
    return next_token_loss(net(tokens_BS, start), next_BS) / 2


def what_is_issued_is_what_is_predicted() -> None:
    step = planned_step()
    text_BS = torch.randint(
        SHAPE.vocab_size, (2 * SEQUENCES, SHAPE.length + 1),
        generator=torch.Generator().manual_seed(dist.get_rank()),
    )  # fmt: skip

    for schedule in (None, PLANNED, GradientSchedule()):
        for degrees in ((1, 1), (2, 3)):
            net = model(degrees, schedule)
            loss_of(net, text_BS[:SEQUENCES]).backward()  # records the order of the gradients
            with issued() as found:
                loss_of(net, text_BS[:SEQUENCES]).backward()
            assert found == predicted(step, degrees, 1, schedule)
            overlap = moetune.BatchOverlap[torch.Tensor](net, partial(loss_of, net))
            with issued() as found:
                overlap(text_BS.chunk(2))
            assert found == predicted(step, degrees, 2, schedule)
            split = moetune.BatchOverlap[Half](net, partial(loss_of_half, net), split="positions")
            with issued() as found:
                split(halves_of(text_BS))
            assert found == predicted(in_halves(step), degrees, 2, schedule)
