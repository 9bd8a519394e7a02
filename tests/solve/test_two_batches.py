"""Steps of replicas: their queue against threads that take turns, and their candidates."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.constraints import (
    MAX_DEGREE,
    Bounds,
    Constraints,
    LayoutPins,
    TransformerSizes,
)
from moetune.domain.errors import InputError
from moetune.domain.gradients import default_schedule
from moetune.domain.interference import Interference
from moetune.domain.layer import LayerShape
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.request import PlanRequest
from moetune.domain.training import Overlap
from moetune.runtime.moe.turns import BatchTurn, Turns, in_turn
from moetune.solve.layer.timeline import LINK, Task, simulate
from moetune.solve.layout.candidates import Candidate
from moetune.solve.layout.choose import LayoutProblem, search_layouts
from moetune.solve.layout.plan import solve_layout
from moetune.solve.layout.words import parts_of
from moetune.solve.model.program import (
    GRADIENTS,
    Compute,
    Event,
    Point,
    Reduction,
    Send,
    Wait,
    made_gradients,
    phase_program,
    step_tasks,
)
from tests.solve.test_layout_plan import GIB, question

MODEL = Transformer(
    moe=LayerShape(d_model=256, d_hidden=512, num_experts=16, top_k=2), num_layers=3, num_heads=4,
    length=128, vocab_size=500, moe_every=1,
)  # fmt: skip
EXCHANGING = LayoutPins(dp=16, ep=16, tp=1, pp=1)


@st.composite
def programs(draw: st.DrawFn) -> list[Event]:
    """Phases of one to three chunks, with computation before them."""
    seconds = st.floats(0.1, 3)
    events: list[Event] = []
    for phase in range(draw(st.integers(1, 4))):
        events.append(Compute(draw(seconds)))
        if draw(st.booleans()):
            events += [Send(f"counts {phase}", 0.1), Wait(f"counts {phase}", gives_turn=False)]
        chunks = range(draw(st.integers(1, 3)))
        events += [Send(f"dispatch {phase} {chunk}", draw(seconds)) for chunk in chunks]
        for chunk in chunks:
            events.append(Wait(f"dispatch {phase} {chunk}"))
            events.append(Compute(draw(seconds)))
            events.append(Send(f"combine {phase} {chunk}", draw(seconds)))
        events += [Wait(f"combine {phase} {chunk}") for chunk in chunks]
    return [*events, Compute(draw(seconds))]


def played(batches: Sequence[Sequence[Event]]) -> tuple[float, list[str]]:
    """Return when two batches end that take turns, and the exchanges in their order.

    Each batch runs in a thread, and `Turns` is the runtime's. A clock for the device and one for
    the link stand for time: whoever has the turn moves them.
    """
    device, link, issued = [0.0], [0.0], list[str]()
    ends: defaultdict[int, dict[str, float]] = defaultdict(dict)
    turns, failed = Turns(), list[BaseException]()

    def run(batch: int) -> None:
        try:
            turn = BatchTurn(turns, batch)
            with in_turn(turn):
                for event in batches[batch]:
                    if isinstance(event, Compute):
                        device[0] += event.seconds
                    elif isinstance(event, Send):
                        link[0] = max(link[0], device[0]) + event.seconds
                        ends[batch][event.name] = link[0]
                        issued.append(f"{event.name} of {batch}")
                    elif isinstance(event, Wait):
                        if event.gives_turn:
                            with turn.given():
                                pass
                        device[0] = max(device[0], ends[batch][event.name])
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(batch,)) for batch in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not failed
    return device[0], issued


@settings(max_examples=60, deadline=None)
@given(st.lists(programs(), min_size=2, max_size=2))
def test_two_batches_are_queued_and_end_as_threads_that_take_turns(
    batches: list[list[Event]],
) -> None:
    tasks = step_tasks(batches, reduction=None)
    seconds, issued = played(batches)
    assert [task.name for task in tasks if task.stream == LINK] == issued
    found = simulate(tasks, interference=Interference())
    device = [span.end_seconds for span in found.spans if span.stream != LINK]
    assert max(device) == pytest.approx(seconds)


@given(programs())
def test_a_batch_alone_goes_on_where_its_exchange_has_ended(batch: list[Event]) -> None:
    device = link = 0.0
    ends = {}
    for event in batch:
        if isinstance(event, Compute):
            device += event.seconds
        elif isinstance(event, Send):
            ends[event.name] = link = max(link, device) + event.seconds
        elif isinstance(event, Wait):
            device = max(device, ends[event.name])
    found = simulate(step_tasks([batch], reduction=None), interference=Interference())
    assert found.makespan_seconds == pytest.approx(max(device, link))


@given(
    sizes=st.lists(st.lists(st.integers(1, 6 * 2**20), min_size=1, max_size=3), min_size=2),
    num_batches=st.integers(1, 2),
)
def test_pieces_are_those_that_the_runtime_sends_without_a_plan(
    sizes: list[list[int]], num_batches: int
) -> None:
    program, made = list[Event](), list[tuple[int, int]]()
    for phase, group in enumerate(sizes):
        if phase:
            program.append(Send(f"exchange {phase}", 1.0))
            program.append(Wait(f"exchange {phase}"))
            program.append(Point(None))
        program += [Compute(1.0, size) for size in group]
        made += [(size, phase - 1) for size in group]
    assert made_gradients(program) == made
    schedule = default_schedule(made)
    tasks = step_tasks(
        [program] * num_batches, reduction=Reduction(schedule=schedule, seconds=float)
    )
    sent = [task.seconds for task in tasks if task.stream == GRADIENTS]
    ends = [piece.end_bytes for piece in schedule.pieces]
    assert [sum(sent[: index + 1]) for index in range(len(sent))] == ends


def test_streams_that_share_the_link_get_equal_parts_of_it() -> None:
    tasks = [
        Task("exchange", "comm", LINK, 1.0),
        Task("piece", "comm", GRADIENTS, 3.0),
        Task("experts", "comp", "compute", 2.0, ("exchange",)),
    ]
    found = simulate(tasks, interference=Interference(), shares_link=True)
    ends = {span.name: span.end_seconds for span in found.spans}
    assert ends == pytest.approx({"exchange": 2.0, "piece": 4.0, "experts": 4.0})


def on_cpus(
    *,
    tokens: int = 1024,
    pins: LayoutPins = EXCHANGING,
    between: float = 12.5e9,
    seconds_per_mac: float = 2e-14,
    memory_bytes: int = 32 * GIB,
) -> LayoutProblem:
    problem = question(
        world_size=16, tokens=tokens, model=MODEL, pins=pins, between=between,
        seconds_per_mac=seconds_per_mac, memory_bytes=memory_bytes,
    )  # fmt: skip
    return replace(problem, runs_ahead=False)


def candidates(problem: LayoutProblem) -> Iterator[Candidate]:
    search, found = search_layouts(problem)
    for best in found.best:
        yield from search.trial(best.layout).candidates()


@pytest.mark.unmeasured
def test_without_gradients_a_batch_takes_what_its_phases_take() -> None:
    """The closed forms of the layer's solver, phase by phase, are an oracle of the queue."""
    every = [one for one in candidates(on_cpus()) if one.setting.in_flight == 1]
    alone = {one.setting.sequences: one for one in every if not (one.setting.between or one.chunks)}
    checked = 0
    for one in every:
        other = alone[one.setting.sequences]
        if one.setting.between and one.priced.moe.step.degrees == other.priced.moe.step.degrees:
            assert one.pipeline.seconds == pytest.approx(other.pipeline.seconds)
            checked += 1
    assert checked


@pytest.mark.unmeasured
def test_on_a_slow_link_two_batches_take_turns_and_the_parts_are_the_step() -> None:
    problem = on_cpus(between=3e9, seconds_per_mac=1e-12)
    search, found = search_layouts(problem)
    best = found.best[0]
    assert best.setting.in_flight == 2
    parts = parts_of(best, search.prices.stages(1))
    assert sum(part.seconds for part in parts) == pytest.approx(best.seconds)
    plan = solve_layout(problem).plan
    assert plan.transformer is not None
    assert plan.transformer.batches_in_flight == 2
    assert plan.transformer.gradients == "between_exchanges"
    assert plan.chunks is None
    again = search.trial(best.layout).timed_again(best)
    assert again.seconds == pytest.approx(best.seconds)


def test_two_batches_take_the_activations_of_both() -> None:
    one, two = (
        next(each for each in candidates(on_cpus(pins=pins)) if each.setting.between)
        for pins in (
            replace(EXCHANGING, overlap="chunks", micro_batch=2),
            replace(EXCHANGING, overlap="batch", micro_batch=2),
        )
    )
    assert two.memory.activation_bytes == 2 * one.memory.activation_bytes
    assert two.memory.parameter_bytes == one.memory.parameter_bytes
    between = (one.memory.total_bytes + two.memory.total_bytes) // 2
    tight = on_cpus(
        pins=replace(EXCHANGING, micro_batch=2),
        between=3e9,
        seconds_per_mac=1e-12,
        memory_bytes=between,
    )
    assert all(each.setting.in_flight == 1 for each in candidates(tight))


@pytest.mark.parametrize(
    ("overlap", "in_flight", "degrees"),
    [("batch", {2}, None), ("chunks", {1}, None), ("none", {1}, (1, 1))],
)
def test_a_pin_decides_how_exchanges_are_hidden(
    overlap: Overlap, in_flight: set[int], degrees: tuple[int, int] | None
) -> None:
    pins = replace(EXCHANGING, overlap=overlap)
    problem = on_cpus(pins=pins, between=3e9, seconds_per_mac=1e-12)
    assert {one.setting.in_flight for one in candidates(problem)} == in_flight
    plan = solve_layout(problem).plan
    if degrees is not None:
        assert (plan.pipeline.forward_degree, plan.pipeline.backward_degree) == degrees


@pytest.mark.parametrize(
    "pins",
    [
        LayoutPins(dp=8, ep=8, tp=1, pp=2),
        replace(EXCHANGING, ep=1),
        replace(EXCHANGING, micro_batch=8),
        replace(EXCHANGING, zero=True),
        replace(EXCHANGING, offload=True),
    ],
)
def test_batches_take_turns_only_where_whole_replicas_exchange(pins: LayoutPins) -> None:
    with pytest.raises(InputError, match="overlap batch"):
        search_layouts(on_cpus(pins=replace(pins, overlap="batch")))


def test_where_buffers_of_several_chunks_do_not_fit_a_batch_runs_in_one() -> None:
    pins = replace(EXCHANGING, overlap="chunks", micro_batch=8, zero=False)

    def found(memory_bytes: int = 32 * GIB, *, max_degree: int = MAX_DEGREE) -> Candidate:
        problem = on_cpus(pins=pins, between=3e9, seconds_per_mac=1e-12, memory_bytes=memory_bytes)
        every = candidates(replace(problem, bounds=Bounds(max_degree=max_degree)))
        return next(one for one in every if one.setting.between)

    roomy, whole = found(), found(max_degree=1)
    assert max(roomy.priced.moe.step.degrees) > 1
    assert whole.memory.total_bytes < roomy.memory.total_bytes
    assert found(roomy.memory.total_bytes - 1).memory == whole.memory


def test_on_gpus_batches_do_not_take_turns() -> None:
    problem = on_cpus(between=3e9, seconds_per_mac=1e-12)
    with pytest.raises(InputError, match="CPUs"):
        search_layouts(replace(problem, runs_ahead=True, pins=replace(EXCHANGING, overlap="batch")))
    ahead = replace(problem, runs_ahead=True)
    assert all(one.setting.in_flight == 1 for one in candidates(ahead))


def test_a_layout_of_uneven_batches_keeps_one_in_flight() -> None:
    problem = on_cpus(tokens=3 * 128, between=3e9, seconds_per_mac=1e-12)
    found = list(candidates(problem))
    assert found
    assert all(one.setting.in_flight == 1 for one in found)


def test_layouts_with_stages_reduce_at_the_end() -> None:
    problem = on_cpus(pins=LayoutPins(pp=2))
    assert not any(one.setting.between for one in candidates(problem))
    assert Layout(expert_parallel="all_to_all", dp=8, ep=8, tp=1, pp=2) in {
        one.layout for one in candidates(problem)
    }


@pytest.mark.parametrize(
    ("bounds", "degrees"),
    [(Bounds(forward_degree=3), (3, 3)), (Bounds(forward_degree=2, backward_degree=4), (2, 4))],
)
def test_pinned_degrees_hold_whatever_is_in_flight(
    bounds: Bounds, degrees: tuple[int, int]
) -> None:
    every = [one for one in candidates(replace(on_cpus(), bounds=bounds)) if one.setting.between]
    assert {one.setting.in_flight for one in every} == {1, 2}
    assert {one.priced.moe.step.degrees for one in every} == {degrees}


def test_exchanges_that_are_not_hidden_are_not_cut() -> None:
    with pytest.raises(InputError, match=r"degree 2 excludes .*overlap none"):
        PlanRequest(
            layer=MODEL.moe, world_size=16, tokens_per_rank=1024,
            constraints=Constraints(
                bounds=Bounds(backward_degree=2), pins=LayoutPins(overlap="none"),
                sizes=TransformerSizes.of(MODEL),
            ),
        )  # fmt: skip


def test_interleaved_chunks_are_dispatched_ahead_of_the_one_that_computes() -> None:
    times = [1.0, 1.0, 1.0, 1.0]
    found = phase_program(
        "layer", dispatch_seconds=times, compute_seconds=times, combine_seconds=times,
        order="interleaved", is_backward=False,
    )  # fmt: skip
    sent = [one.name for one in found if isinstance(one, Send)]
    first = [name for name in sent if name.startswith("dispatch")]
    assert first == [f"dispatch {chunk} of layer" for chunk in range(4)]
    assert sent.index("combine 0 of layer") < sent.index("dispatch 3 of layer")
