"""Time and live micro-batches of pipelines, against schedules that are played through."""

import itertools
from collections.abc import Iterator

import pytest

from moetune.solve.training.stages import live_micro_batches, pipeline_seconds


def one_rank(rank: int, pp: int, vpp: int, num: int) -> Iterator[tuple[bool, int, int]]:
    """Yield (is forward, stage of the rank, micro-batch) in Megatron-Core's order."""
    if vpp == 1:
        warm_up = min(num, pp - rank - 1)
        units = [(0, batch) for batch in range(num)]
    else:
        warm_up = min(num * vpp, 2 * (pp - rank - 1) + (vpp - 1) * pp)
        units = [
            (chunk, group * pp + at)
            for group in range(num // pp)
            for chunk in range(vpp)
            for at in range(pp)
        ]
    backward = [(vpp - 1 - chunk, batch) for chunk, batch in units]
    for unit in units[:warm_up]:
        yield True, *unit
    for at, unit in enumerate(backward):
        if warm_up + at < len(units):
            yield True, *units[warm_up + at]
        yield False, *unit


def played(pp: int, vpp: int, num: int, forward: float, backward: float) -> float:
    """Return the makespan of equal stages without sends."""
    orders = [list(one_rank(rank, pp, vpp, num)) for rank in range(pp)]
    ends: dict[tuple[bool, int, int], float] = {}
    at, clock = [0] * pp, [0.0] * pp
    while any(at[rank] < len(orders[rank]) for rank in range(pp)):
        moved = False
        for rank in range(pp):
            if at[rank] == len(orders[rank]):
                continue
            is_forward, chunk, batch = orders[rank][at[rank]]
            stage = chunk * pp + rank
            needs = []
            if is_forward and stage:
                needs = [(True, stage - 1, batch)]
            if not is_forward:
                needs = [(True, stage, batch)]
                if stage < pp * vpp - 1:
                    needs.append((False, stage + 1, batch))
            if any(need not in ends for need in needs):
                continue
            start = max([clock[rank], *(ends[need] for need in needs)])
            clock[rank] = start + (forward if is_forward else backward)
            ends[is_forward, stage, batch] = clock[rank]
            at[rank] += 1
            moved = True
        assert moved, "the schedule is stuck"
    return max(clock)


@pytest.mark.parametrize(
    ("pp", "vpp", "num"), [(1, 1, 3), (4, 1, 4), (4, 1, 16), (4, 2, 16), (8, 4, 32), (2, 3, 8)]
)
def test_equal_stages_take_as_long_as_the_schedule_played(pp: int, vpp: int, num: int) -> None:
    forward, backward = 1.0 / vpp, 2.0 / vpp
    found = pipeline_seconds([(3.0, pp)], vpp=vpp, num_micro_batches=num, send_seconds=0.0)
    assert found == pytest.approx(played(pp, vpp, num, forward, backward), rel=1e-9)


@pytest.mark.parametrize(("pp", "vpp"), list(itertools.product((2, 4, 8), (1, 2, 4))))
def test_live_micro_batches_are_those_of_the_schedule(pp: int, vpp: int) -> None:
    num = 4 * pp
    for rank in range(pp):
        live = most = 0
        for is_forward, _, _ in one_rank(rank, pp, vpp, num):
            live += 1 if is_forward else -1
            most = max(most, live)
        found = live_micro_batches(rank=rank, pp=pp, vpp=vpp, num_micro_batches=num)
        assert found == pytest.approx(most / vpp)
