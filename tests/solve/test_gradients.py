"""Pieces of dense gradients between exchanges, against every split of small cases."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.costs import CommSpeed, CompSpeed, Interference
from moetune.domain.errors import InputError
from moetune.domain.gradients import AT_START, GradientPiece, GradientSchedule
from moetune.solve.model.gradients import (
    BackwardPass,
    BackwardStage,
    DensePart,
    best_pieces,
    ready_bytes,
    simulate_pieces,
)

UNIT = 1000
BETA = 1e-3
"""Seconds of a byte: a unit takes one second."""


def stage(exchange: float, experts: float, degree: int, *dense: tuple[float, int]) -> BackwardStage:
    parts = tuple(DensePart(seconds=seconds, num_bytes=units * UNIT) for seconds, units in dense)
    chunks = (exchange,) * degree
    return BackwardStage(
        dispatch_seconds=chunks, compute_seconds=(experts,) * degree, combine_seconds=chunks,
        dense=parts,
    )  # fmt: skip


def backward_of(
    *stages: BackwardStage, alpha: float = 0.0, interference: Interference | None = None
) -> BackwardPass:
    return BackwardPass(
        stages=stages,
        reduce_seconds=lambda num_bytes: alpha + BETA * num_bytes,
        interference=interference or Interference(),
    )


def splits(backward: BackwardPass) -> list[tuple[int, ...]]:
    """Every way to send whole units in the slots, of those that are made by then."""
    found: list[tuple[int, ...]] = [()]
    for ready in ready_bytes(backward):
        found = [
            (*sizes, size) for sizes in found for size in range(0, ready - sum(sizes) + 1, UNIT)
        ]
    return found


def sizes_of(schedule: GradientSchedule, backward: BackwardPass) -> list[int]:
    """Bytes in each slot where a rank sends every piece at its point, once it is made."""
    slots: list[tuple[int, int | None]] = []
    phase = AT_START
    for one in backward.stages:
        if one.compute_seconds:
            phase += 1
            slots += [(phase, chunk) for chunk in (*range(len(one.compute_seconds)), None)]
        slots += [(phase, None)] * len(one.dense)
    sizes, at, sent = [0] * len(slots), 0, 0
    ready = ready_bytes(backward)
    for piece in schedule.pieces:
        while slots[at] != (piece.phase, piece.chunk) or ready[at] < piece.end_bytes:
            at += 1
        sizes[at] += piece.end_bytes - sent
        sent = piece.end_bytes
    return sizes


def test_one_chunk_sends_while_the_experts_compute_and_behind_its_combine() -> None:
    # Head 1 s, then twice: exchange 1, experts 2, exchange 1, dense 2 with 3 units each.
    layer = stage(1, 2, 1, (2, 3))
    plan = best_pieces(backward_of(stage(0, 0, 0, (1, 3)), layer, layer))
    ends = [(piece.phase, piece.chunk, piece.end_bytes) for piece in plan.schedule.pieces]
    # 2 units while the first experts compute, 1 behind them, and the same of the next 3.
    assert ends == [(0, 0, 2000), (0, None, 3000), (1, 0, 5000), (1, None, 6000)]
    assert plan.alone_seconds == pytest.approx(13)
    assert plan.at_end_seconds == pytest.approx(13 + 9)
    assert plan.seconds == pytest.approx(13 + 3)  # those of the last part have no computation left


def test_a_piece_is_cut_where_the_next_exchange_begins() -> None:
    plan = best_pieces(
        backward_of(stage(0, 0, 0, (1, 9)), stage(1, 0.5, 1, (0.25, 0)), stage(1, 1, 1, (4, 0)))
    )
    ends = [(piece.phase, piece.chunk, piece.end_bytes) for piece in plan.schedule.pieces]
    assert ends == [(0, 0, 500), (0, None, 750), (1, 0, 1750), (1, None, 9000)]
    assert plan.seconds == pytest.approx(plan.alone_seconds + 9 - 5.75)


def test_without_experts_gradients_go_as_they_are_made() -> None:
    plan = best_pieces(backward_of(stage(0, 0, 0, (1, 1), (2, 1), (2, 1))))
    assert [piece.end_bytes for piece in plan.schedule.pieces] == [1000, 2000]
    assert plan.seconds == pytest.approx(6)


def test_nothing_to_reduce_has_no_pieces() -> None:
    plan = best_pieces(backward_of(stage(1, 1, 2, (1, 0))))
    assert plan.schedule.pieces == ()
    assert plan.seconds == plan.at_end_seconds == plan.alone_seconds


def test_pieces_cannot_have_gradients_that_are_not_made() -> None:
    backward = backward_of(stage(1, 1, 1, (1, 2)))
    assert ready_bytes(backward) == (0, 0, 2000)
    assert simulate_pieces(backward, (0, 0, 1000)).makespan_seconds == pytest.approx(4 + 1 + 1)
    with pytest.raises(ValueError, match="1000 bytes are to be sent and 0 made"):
        simulate_pieces(backward, (1000, 0, 0))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (((0, None, 0),), "ends at byte 0"),
        (((0, None, 5), (1, None, 5)), "ends at byte 5, the one before at 5"),
        (((0, None, 5), (0, 3, 6)), "before its predecessor"),
    ],
)
def test_a_schedule_out_of_order_is_refused(
    pieces: tuple[tuple[int, int | None, int], ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        GradientSchedule(
            pieces=tuple(
                GradientPiece(phase=phase, chunk=chunk, end_bytes=end)
                for phase, chunk, end in pieces
            )
        )


SECONDS = st.integers(0, 4).map(float)
STAGES = st.builds(
    lambda exchange, experts, degree, seconds, units: stage(
        exchange, experts, degree, (seconds, units)
    ),
    SECONDS, SECONDS, st.integers(1, 2), SECONDS, st.integers(0, 2),
)  # fmt: skip
SLOWED = Interference(comp=CompSpeed(comm=0.8), comm=CommSpeed(comp=0.9))


@settings(deadline=None, max_examples=25)
@given(head=st.integers(0, 2), stages=st.lists(STAGES, min_size=1, max_size=2))
def test_no_split_into_units_ends_earlier(head: int, stages: list[BackwardStage]) -> None:
    backward = backward_of(stage(0, 0, 0, (1, head)), *stages)
    best = min(simulate_pieces(backward, sizes).makespan_seconds for sizes in splits(backward))
    assert best_pieces(backward).seconds <= best + 1e-6


@settings(deadline=None, max_examples=25)
@given(
    stages=st.lists(STAGES, min_size=1, max_size=2),
    alpha=st.floats(0, 0.5),
    slowed=st.booleans(),
)
def test_start_up_times_and_interference_cost_little(
    stages: list[BackwardStage], alpha: float, *, slowed: bool
) -> None:
    backward = backward_of(
        stage(0, 0, 0, (1, 2)), *stages, alpha=alpha, interference=SLOWED if slowed else None
    )
    plan = best_pieces(backward)
    best = min(simulate_pieces(backward, sizes).makespan_seconds for sizes in splits(backward))
    # A greedy choice pays at most a start-up time for each slot, and some of the slowing.
    assert plan.seconds <= best * (1.1 if slowed else 1) + alpha * len(ready_bytes(backward)) + 1e-6


@settings(deadline=None, max_examples=200)
@given(
    stages=st.lists(STAGES, min_size=1, max_size=5),
    alpha=st.floats(0, 2),
    slowed=st.booleans(),
)
def test_pieces_never_lose_against_all_gradients_at_the_end(
    stages: list[BackwardStage], alpha: float, *, slowed: bool
) -> None:
    backward = backward_of(*stages, alpha=alpha, interference=SLOWED if slowed else None)
    plan = best_pieces(backward)
    assert plan.alone_seconds - 1e-9 <= plan.seconds <= plan.at_end_seconds
    timeline = simulate_pieces(backward, sizes_of(plan.schedule, backward))
    assert timeline.makespan_seconds == pytest.approx(plan.seconds)
