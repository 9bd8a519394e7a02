"""Times of pipelines, against longest paths through the graph of all passes and sends."""

import itertools
import random
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest

from moetune.domain.pipeline import SCHEDULES, Schedule
from moetune.solve.model.passes import Passes
from moetune.solve.model.pipeline import StagePipeline, least_seconds, play
from tests.solve.model.test_schedule import torchs_orders

Node = tuple[object, ...]
STAGES: dict[Schedule, int] = {
    "1f1b": 1, "interleaved": 3, "zero_bubble": 2, "zero_bubble_v": 2, "dualpipe_v": 2,
}  # fmt: skip


def longest_path(pipeline: StagePipeline) -> float:
    """Return the time of all passes and sends, each after what it needs."""
    stages, send = pipeline.stages, pipeline.send_seconds
    last = len(stages) - 1
    v_shaped = pipeline.schedule in ("zero_bubble_v", "dualpipe_v")
    rank_of = [
        at if at < pipeline.pp or not v_shaped else 2 * pipeline.pp - 1 - at
        for at in range(last + 1)
    ]
    rank_of = [rank % pipeline.pp for rank in rank_of]
    lengths: dict[Node, float] = {}
    needs: dict[Node, list[Node]] = {}
    queue: dict[object, Node] = {}

    def add(node: Node, seconds: float, resource: object, *before: Node) -> None:
        lengths[node] = seconds
        needs[node] = [*before, *([queue[resource]] if resource in queue else [])]
        queue[resource] = node

    every = torchs_orders(pipeline.schedule, pipeline.pp, pipeline.vpp, pipeline.num_micro_batches)
    for rank, order in enumerate(every):
        for kind, stage, batch in order:
            passes = stages[stage]
            seconds = {
                "F": passes.forward, "I": passes.grad_input, "W": passes.grad_weight,
                "B": passes.grad_input + passes.grad_weight,
            }[kind]  # fmt: skip
            before: list[Node] = []
            if kind == "F" and stage:
                before = [("input", stage, batch)]
            if kind in "BI":
                before = [("gradient", stage, batch)] if stage < last else [("F", stage, batch)]
            add((kind, stage, batch), seconds, rank, *before)
            other = {"F": stage + 1, "W": -1}.get(kind, stage - 1)
            if 0 <= other <= last:
                away = rank_of[other] != rank
                link = (rank, rank_of[other]) if pipeline.hides_sends or not away else rank
                name = "input" if kind == "F" else "gradient"
                add((name, other, batch), send * away, link, (kind, stage, batch))
    ends: dict[Node, float] = {}
    for node in TopologicalSorter(needs).static_order():
        ends[node] = lengths[node] + max((ends[need] for need in needs[node]), default=0.0)
    return max(ends.values())


def random_pipelines(schedule: Schedule, seed: int) -> Iterator[StagePipeline]:
    rng = random.Random(seed)
    vpp = STAGES[schedule]
    for pp, rounds, hides in itertools.product((2, 3, 5), (2, 4), (True, False)):
        yield StagePipeline(
            schedule=schedule, pp=pp, num_micro_batches=rounds * pp, hides_sends=hides,
            send_seconds=rng.choice((0.0, 0.1, 1.5)),
            stages=tuple(
                Passes(
                    forward=rng.uniform(0.5, 1), grad_input=rng.uniform(0.5, 1),
                    grad_weight=rng.uniform(0, 1),
                )
                for _ in range(pp * vpp)
            ),
        )  # fmt: skip


def equal(schedule: Schedule, pp: int, num: int, *, vpp: int | None = None) -> StagePipeline:
    stages = pp * (vpp or STAGES[schedule])
    passes = Passes(forward=1.0, grad_input=1.0, grad_weight=1.0)
    return StagePipeline(
        schedule=schedule,
        pp=pp,
        stages=(passes,) * stages,
        num_micro_batches=num,
        send_seconds=0.0,
        hides_sends=True,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_passes_take_as_long_as_the_longest_path(schedule: Schedule) -> None:
    for pipeline in random_pipelines(schedule, seed=1):
        seconds = play(pipeline)
        assert seconds == pytest.approx(longest_path(pipeline), rel=1e-9)
        assert least_seconds(pipeline) <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_micro_batches_take_as_long_as_if_each_was_played(schedule: Schedule) -> None:
    pp, num = 3, 60
    assert play(equal(schedule, pp, num)) == pytest.approx(
        longest_path(equal(schedule, pp, num)), rel=1e-9
    )
    rng = random.Random(2)
    stages = tuple(
        Passes(
            forward=rng.uniform(0.8, 1), grad_input=rng.uniform(0.8, 1), grad_weight=rng.random()
        )
        for _ in range(pp * STAGES[schedule])
    )
    uneven = StagePipeline(
        schedule=schedule, pp=pp, stages=stages, num_micro_batches=num, send_seconds=0.1,
        hides_sends=True,
    )  # fmt: skip
    assert play(uneven) == pytest.approx(longest_path(uneven), rel=0.01)


@pytest.mark.parametrize(("pp", "vpp", "num"), [(1, 1, 3), (4, 1, 4), (4, 1, 64), (8, 4, 32)])
def test_equal_stages_of_1f1b_take_what_no_order_beats(pp: int, vpp: int, num: int) -> None:
    pipeline = equal("interleaved" if vpp > 1 else "1f1b", pp, num, vpp=vpp)
    assert play(pipeline) == pytest.approx(3 * vpp * num + 3 * (pp - 1))
    assert least_seconds(pipeline) == pytest.approx(play(pipeline))
