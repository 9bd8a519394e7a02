"""Pieces of dense gradients between exchanges, against every split of small cases."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moetune.domain.errors import InputError
from moetune.domain.gradients import (
    GradientPiece,
    GradientSchedule,
    default_schedule,
)
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.solve.layer.timeline import Timeline
from moetune.solve.model.gradients import BackwardPass, best_pieces, schedule_of
from moetune.solve.model.program import (
    GRADIENTS,
    Compute,
    Event,
    Reduction,
    made_gradients,
    phase_program,
    step_tasks,
)

UNIT = 1000
BETA = 1e-3
"""Seconds of a byte: a unit takes one second."""


Stage = tuple[float, float, int, tuple[tuple[float, int], ...]]
"""Seconds of an exchange and of a chunk's experts, the chunks, and dense parts with their units."""


def stage(exchange: float, experts: float, degree: int, *dense: tuple[float, int]) -> Stage:
    return exchange, experts, degree, dense


def backward_of(
    *stages: Stage, alpha: float = 0.0, interference: Interference | None = None
) -> BackwardPass:
    program: list[Event] = []
    for number, (exchange, experts, degree, dense) in enumerate(stages):
        sent = (exchange,) * degree
        if degree:
            program += phase_program(
                f"phase {number}", dispatch_seconds=sent, compute_seconds=(experts,) * degree,
                combine_seconds=sent, is_backward=True,
            )  # fmt: skip
        program += [Compute(seconds, units * UNIT) for seconds, units in dense]
    return BackwardPass(
        program=program,
        reduce_seconds=lambda num_bytes: alpha + BETA * num_bytes,
        interference=interference or Interference(),
    )


def ready_bytes(backward: BackwardPass) -> tuple[int, ...]:
    return tuple(slot.ready_bytes for slot in backward.slots)


def played(backward: BackwardPass, sizes: tuple[int, ...]) -> Timeline:
    """The timeline with a piece of so many bytes in each slot, and the rest at the end."""
    return backward.timeline(schedule_of(dict(zip(backward.slots, sizes, strict=True))))


def splits(backward: BackwardPass) -> list[tuple[int, ...]]:
    """Every way to send whole units in the slots, of those that are made by then."""
    found: list[tuple[int, ...]] = [()]
    for ready in ready_bytes(backward):
        found = [
            (*sizes, size) for sizes in found for size in range(0, ready - sum(sizes) + 1, UNIT)
        ]
    return found


def at_once(backward: BackwardPass) -> float:
    """Seconds of the backward pass with all gradients sent as they are made."""
    sizes, sent = [], 0
    for ready in ready_bytes(backward):
        sizes.append(ready - sent)
        sent = ready
    return played(backward, tuple(sizes)).makespan_seconds


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
def test_no_split_into_units_ends_earlier(head: int, stages: list[Stage]) -> None:
    backward = backward_of(stage(0, 0, 0, (1, head)), *stages)
    best = min(played(backward, sizes).makespan_seconds for sizes in splits(backward))
    assert best_pieces(backward).seconds <= best + 1e-6


@settings(deadline=None, max_examples=25)
@given(
    stages=st.lists(STAGES, min_size=1, max_size=2),
    alpha=st.floats(0, 0.5),
    slowed=st.booleans(),
)
@example(stages=[stage(1, 1, 1, (1, 0))], alpha=5.1e-11, slowed=False)
def test_start_up_times_and_interference_cost_little(
    stages: list[Stage], alpha: float, *, slowed: bool
) -> None:
    backward = backward_of(
        stage(0, 0, 0, (1, 2)), *stages, alpha=alpha, interference=SLOWED if slowed else None
    )
    plan = best_pieces(backward)
    best = min(played(backward, sizes).makespan_seconds for sizes in splits(backward))
    # A greedy choice pays at most a start-up time for each slot, and some of the slowing. A piece
    # has whole bytes: one that just misses the end of its slot is a byte shorter.
    greedy = (alpha + BETA) * len(ready_bytes(backward))
    assert plan.seconds <= best * (1.1 if slowed else 1) + greedy + 1e-6


@settings(deadline=None, max_examples=200)
@given(
    stages=st.lists(STAGES, min_size=1, max_size=5),
    alpha=st.floats(0, 2),
    slowed=st.booleans(),
)
def test_pieces_never_lose_against_all_gradients_at_the_end_or_at_once(
    stages: list[Stage], alpha: float, *, slowed: bool
) -> None:
    backward = backward_of(*stages, alpha=alpha, interference=SLOWED if slowed else None)
    plan = best_pieces(backward)
    assert plan.alone_seconds - 1e-9 <= plan.seconds <= plan.at_end_seconds
    assert plan.seconds <= at_once(backward)
    without_a_plan = backward.timeline(default_schedule(made_gradients(backward.program)))
    assert plan.seconds <= without_a_plan.makespan_seconds


@st.composite
def schedules(draw: st.DrawFn) -> GradientSchedule:
    """Any schedule, with pieces beyond all gradients and at points that no pass comes to."""
    chunks = st.none() | st.integers(0, 3)
    points = draw(st.lists(st.tuples(st.integers(0, 4), chunks), max_size=6))
    points.sort(key=lambda point: (point[0], float("inf") if point[1] is None else point[1]))
    sizes = draw(st.lists(st.integers(1, 5000), min_size=len(points), max_size=len(points)))
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return GradientSchedule(
        pieces=tuple(
            GradientPiece(phase=phase, chunk=chunk, end_bytes=end)
            for (phase, chunk), end in zip(points, ends, strict=True)
        )
    )


@settings(deadline=None)
@given(schedule=schedules(), stages=st.lists(STAGES, min_size=1, max_size=4))
def test_every_byte_is_reduced_once_whatever_the_schedule(
    schedule: GradientSchedule, stages: list[Stage]
) -> None:
    backward = backward_of(stage(0, 0, 0, (1, 1)), *stages)
    reduction = Reduction(schedule=schedule, seconds=float)
    tasks = step_tasks([backward.program], reduction=reduction)
    made = dict[str, int]()
    for number, event in enumerate(backward.program):
        made[f"{number} of 0"] = event.made_bytes if isinstance(event, Compute) else 0
    num_made = num_sent = 0
    for task in tasks:
        num_made += made.get(task.name, 0)
        num_sent += int(task.seconds) if task.stream == GRADIENTS else 0
        assert num_sent <= num_made
    assert num_sent == num_made == ready_bytes(backward)[-1]
