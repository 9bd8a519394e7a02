"""Times of steps in chunks, by timelines that are worked out by hand."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.chunks import Use
from moetune.domain.cluster import Machine
from moetune.domain.layout import Layout
from moetune.domain.profile import CollectiveLine, CopyLine, GemmLine, Profile
from moetune.domain.samples import CollectiveOp, Direction
from moetune.fit.costs import costs_of
from moetune.solve.chunks.cache import fewest_places, replay
from moetune.solve.chunks.time import ChunkCost, ChunkDevice, ChunkPrices, ChunkTime, simulate
from moetune.solve.model.groups import groups_of

GPU = ChunkDevice(copies_inline=False, updates_on_host=True)
ON_DEVICE = ChunkDevice(copies_inline=False, updates_on_host=False)
CPU = ChunkDevice(copies_inline=True, updates_on_host=True)


def there_and_back(num_chunks: int, seconds: float = 1.0) -> list[Use]:
    forward = [Use(chunks=(one,), seconds=seconds) for one in range(num_chunks)]
    backward = [
        Use(chunks=(one,), leaves=(one,), seconds=2 * seconds)
        for one in reversed(range(num_chunks))
    ]
    return [*forward, *backward]


def time_of(
    order: list[Use], cost: ChunkCost, *, num_places: int, machine: ChunkDevice = GPU
) -> ChunkTime:
    chunks = {chunk for use in order for chunk in use.chunks}
    found = replay(order, num_places=num_places)
    return simulate(order, found, costs=dict.fromkeys(chunks, cost), machine=machine)


def test_chunks_that_cost_nothing_leave_the_computation() -> None:
    found = time_of(there_and_back(4), ChunkCost(), num_places=2)
    assert (found.seconds, found.exposed_seconds, found.optimizer_seconds) == (12.0, 0.0, 0.0)


def test_only_the_first_gather_and_the_last_reduction_show_where_there_is_room() -> None:
    cost = ChunkCost(fetch=0.5, store=0.25)
    found = time_of(there_and_back(4), cost, num_places=4)
    assert found.seconds == pytest.approx(12 + 0.5 + 0.25)
    assert found.transfer_seconds == pytest.approx(4 * 0.75)


def test_with_two_places_a_gather_waits_for_the_place_that_it_takes() -> None:
    # 0 and 1 at once; 2 takes the place of 0 behind its use; backward 1 and 0 come one by one.
    found = time_of(there_and_back(3), ChunkCost(fetch=1.5), num_places=2)
    gathers = [0, 1, 2]
    assert [one.chunk for one in replay(there_and_back(3), num_places=2).steps[0]][:3] == gathers
    ends = {0: 1.5, 1: 3.0, 2: 4.5}
    forward_end = max(max(ends[0] + 1, ends[1]) + 1, ends[2]) + 1
    # 1 stays; 0 is fetched into the place of 2 after its backward use, beside that of 1.
    assert found.seconds == pytest.approx(forward_end + 2 + 2 + 2)


def test_the_host_updates_what_has_left_while_the_device_goes_on() -> None:
    found = time_of(there_and_back(4), ChunkCost(update=1.5), num_places=4)
    assert found.optimizer_seconds == pytest.approx(1.5)
    # Behind several micro-batches all chunks are stepped one after the other.
    assert found.step_seconds(2) == pytest.approx(2 * found.seconds + 4 * 1.5)
    slow = time_of(there_and_back(4), ChunkCost(update=3.0), num_places=4)
    assert slow.optimizer_seconds == pytest.approx(4 * 3.0 - 3 * 2.0)
    behind = time_of(there_and_back(4), ChunkCost(update=1.5), num_places=4, machine=ON_DEVICE)
    assert behind.optimizer_seconds == pytest.approx(4 * 1.5)


def test_copies_of_a_cpu_take_its_own_time() -> None:
    cost = ChunkCost(fetch=0.5, store=0.25)
    found = time_of(there_and_back(4), cost, num_places=4, machine=CPU)
    assert found.exposed_seconds == pytest.approx(4 * 0.75)
    assert found.step_seconds(3) == pytest.approx(3 * 15.0)


seconds = st.floats(0, 3)


@given(
    num_chunks=st.integers(1, 6),
    num_places=st.integers(2, 6),
    cost=st.builds(
        ChunkCost, fetch=seconds, gather=seconds, reduce=seconds, store=seconds, update=seconds
    ),
)
def test_a_step_takes_at_least_its_busiest_engine_and_at_most_all_in_a_row(
    num_chunks: int, num_places: int, cost: ChunkCost
) -> None:
    order = there_and_back(num_chunks)
    places = max(num_places, fewest_places(order))
    gathers = replay(order, num_places=places).num_gathers
    found = time_of(order, cost, num_places=places)
    computed = sum(use.seconds for use in order)
    busiest = max(
        computed, gathers * cost.fetch, num_chunks * cost.store,
        gathers * cost.gather + num_chunks * cost.reduce,
    )  # fmt: skip
    work = {name: value * num_chunks for name, value in asdict(cost).items()}
    all_in_a_row = computed + gathers * (cost.fetch + cost.gather) + work["reduce"] + work["store"]
    assert busiest - 1e-9 <= found.seconds <= all_in_a_row + 1e-9
    assert found.seconds + found.optimizer_seconds >= work["update"] - 1e-9


def prices(*, offload: bool = False, **alphas: float) -> ChunkPrices:
    """Return prices of chunks in which all lines have 10 GB/s, and those start-up times."""
    beta = 1e-10
    ops: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter", "all_reduce")
    ways: tuple[Direction, ...] = ("h2d", "d2h")
    profile = Profile(
        name="chunks",
        provenance="modelled",
        citation="by hand",
        machine=Machine(
            kind="cuda", device="a GPU", num_devices=8, devices_per_node=8, memory_bytes=2**30
        ),
        gemm=(GemmLine(dtype="float16", alpha_seconds=0.0, beta_seconds_per_mac=1e-12),),
        collective=tuple(
            CollectiveLine(
                op=op, group_size=8, alpha_seconds=alphas.get(op, 0.0), beta_seconds_per_byte=beta
            )
            for op in ops
        ),
        copy=tuple(
            CopyLine(
                direction=way, pinned=True, alpha_seconds=alphas.get(way, 0.0),
                beta_seconds_per_byte=beta,
            )
            for way in ways
        ),
    )  # fmt: skip
    layout = Layout(expert_parallel="all_to_all", dp=8, ep=1, tp=1, pp=1)
    return ChunkPrices(
        costs=costs_of(profile), groups=groups_of(layout, per_node=8), dtype="float16",
        offload=offload,
    )  # fmt: skip


def at_90_percent(alpha_seconds: float, *, ranks: int = 1) -> float:
    """Return the chunk whose α–β line reaches 90 % of its rate; each rank sends 1 / `ranks`."""
    return 9 * alpha_seconds / 1e-10 * ranks


@pytest.mark.parametrize(
    ("made", "exact"),
    [
        (prices(reduce_scatter=1e-4), at_90_percent(1e-4)),
        (prices(all_gather=1e-4), at_90_percent(1e-4, ranks=8)),
        (prices(all_gather=1e-4, reduce_scatter=1e-3), at_90_percent(1e-3)),
        (prices(h2d=1e-4, offload=True), at_90_percent(1e-4, ranks=8)),
        (prices(d2h=1e-4, offload=True), at_90_percent(1e-4, ranks=8)),
        (replace(prices(all_reduce=1e-4), scatter=False), at_90_percent(1e-4)),
    ],
)
def test_chunks_are_worthwhile_where_each_transfer_has_90_percent_of_its_rate(
    made: ChunkPrices, exact: float
) -> None:
    # Sizes are powers of two, and the best rate is that of 1 GiB instead of an endless chunk.
    assert 0.9 * exact <= made.worthwhile_bytes(8) <= 2 * exact


def test_chunks_without_start_up_time_are_worthwhile_at_the_smallest_size() -> None:
    smallest = prices().worthwhile_bytes(8)
    assert smallest < at_90_percent(1e-4)
    others = [
        prices(h2d=1e-3, d2h=1e-3),  # nothing is offloaded
        prices(all_reduce=1e-3),  # nothing is whole
        replace(prices(all_gather=1e-3, reduce_scatter=1e-3), scatter=False),
    ]
    assert [one.worthwhile_bytes(8) for one in others] == [smallest] * 3
