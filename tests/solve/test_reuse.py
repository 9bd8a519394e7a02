"""The timeline of each strategy, against a simulation that shares no code with it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.constraints import Strategy
from moetune.domain.costs import CopyMode, Estimate, LinearCost
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed
from moetune.domain.layer import LayerShape, Phase, Workload
from moetune.fit.interference import speeds_of
from moetune.solve.layer.costs import LayerCosts, layer_costs
from moetune.solve.layer.operations import Price
from moetune.solve.layer.plan import paper_seconds
from moetune.solve.layer.reuse import ChunkPattern, ReusedChunk, reuse_tasks
from moetune.solve.layer.timeline import simulate
from moetune.solve.layer.times import phase_time
from tests.solve.costs_by_hand import LinearCosts
from tests.solve.reuse_by_hand import naive

LAYER = LayerShape(d_model=256, d_hidden=1024, num_experts=4)
COPY = LinearCost(alpha_seconds=1e-5, beta_seconds=1e-10)
DEAR_COPY = LinearCost(alpha_seconds=1e-5, beta_seconds=3e-9)
"""Ten times a byte on the link: the engine that copies is the busiest stream."""
REUSE: tuple[Strategy, ...] = ("S1", "S2", "S3", "S4")
PHASES: tuple[Phase, ...] = ("forward", "backward")
DISTURBED = Interference(
    comp=CompSpeed(comm=0.9, mem=0.95, all=0.85),
    comm=CommSpeed(comp=0.8, mem=0.7, all=0.6),
    mem=MemSpeed(comp=0.9, comm=0.75, all=0.65),
)

ODD = Interference(
    comp=CompSpeed(comm=0.2, mem=0.4, all=0.9),
    comm=CommSpeed(comp=0.3, mem=0.5, all=1.0),
    mem=MemSpeed(comp=0.6, comm=0.1, all=0.95),
)
"""More is done while all three run than while two do, as a noisy table may say."""


def price(seconds: float) -> Price:
    return Estimate(seconds=np.array(seconds), trust="measured")


def costs_of(
    mode: CopyMode | None = "pinned",
    *,
    interference: Interference | None = None,
    layer: LayerShape = LAYER,
    world_size: int = 4,
    copy: LinearCost = COPY,
) -> LayerCosts:
    costs = LinearCosts(copy_cost=copy, copy_mode=mode, interference=interference or Interference())
    workload = Workload(layer=layer, world_size=world_size, tokens_per_rank=4096)
    return layer_costs(workload=workload, costs=costs)


SECONDS = st.floats(1e-6, 1.0)


@given(
    phase=st.sampled_from(PHASES),
    degree=st.integers(1, 12),
    transfer=SECONDS,
    before=SECONDS,
    after=SECONDS,
    inputs=st.none() | SECONDS,
    middle=st.none() | SECONDS,
    again=st.booleans(),
)
def test_undisturbed_tasks_last_as_long_as_a_naive_machine(
    phase: Phase,
    degree: int,
    transfer: float,
    before: float,
    after: float,
    inputs: float | None,
    middle: float | None,
    again: bool,  # noqa: FBT001 - hypothesis gives it by name
) -> None:
    pattern = ChunkPattern(
        copies_input=inputs is not None,
        copies_middle=middle is not None,
        sends_again=again and phase == "backward",
        copies_overlap=True,
        sorts_rows=False,
    )
    chunk = ReusedChunk(
        pattern=pattern, transfer=price(transfer), before=price(before), after=price(after),
        copy_input=price(inputs or 0.0), copy_middle=price(middle or 0.0),
    )  # fmt: skip
    tasks = reuse_tasks(chunk=chunk, phase=phase, degree=degree)
    expected = naive(
        phase, degree, transfer=transfer, before=before, after=after, inputs=inputs,
        middle=middle, again=again,
    )  # fmt: skip
    makespan = simulate(tasks, speeds=speeds_of(Interference())).makespan_seconds
    assert makespan == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("strategy", REUSE)
@pytest.mark.parametrize("mode", ["pinned", "inline", "pageable"])
@pytest.mark.parametrize("copy", [COPY, DEAR_COPY])
@pytest.mark.parametrize("table", [DISTURBED, ODD, Interference()])
def test_no_strategy_beats_its_busiest_stream(
    strategy: Strategy, mode: CopyMode, copy: LinearCost, table: Interference
) -> None:
    costs = costs_of(mode, interference=table, copy=copy)
    for phase, degree, tokens in itertools.product(PHASES, (1, 2, 3, 8, 64), (64, 4096, 100_000)):
        time = phase_time(costs=costs, phase=phase, strategy=strategy, tokens=tokens, degree=degree)
        on_device = time.device_seconds + (mode != "pinned") * time.copy_seconds
        busiest = max(time.link_seconds, on_device, time.copy_seconds)
        assert time.seconds >= busiest * (1 - 1e-12)


def test_work_of_each_strategy_is_that_of_table_2() -> None:
    costs, rows = costs_of(), 4096.0
    t_a2a = costs.transfer(rows=rows, degree=1).seconds
    gemm = 5e-5 + 4e-14 * rows * 256 * 1024
    copies = {"S1": (1, 4), "S2": (0, 4), "S3": (1, 0), "S4": (0, 0)}
    for strategy, phase in itertools.product(REUSE, PHASES):
        time = phase_time(costs=costs, phase=phase, strategy=strategy, tokens=4096, degree=1)
        again = phase == "backward"
        transfers = 2 + (again and strategy in {"S2", "S4"})
        gemms = (4 if again else 2) + (again and strategy in {"S3", "S4"})
        assert time.link_seconds == pytest.approx(transfers * t_a2a)
        assert time.device_seconds == pytest.approx(gemms * gemm)
        parts = [count * rows * 256 * 4 for count in copies[strategy] if count]
        assert time.copy_seconds == pytest.approx(sum(1e-5 + 1e-10 * part for part in parts))


def test_the_papers_rule_is_equation_10_with_table_2() -> None:
    costs = costs_of(interference=DISTURBED)
    rows, h = 4096, 4
    gemm = 5e-5 + 4e-14 * rows * 256 * 1024
    a2a = 2e-4 + 3e-10 * rows * 256 * 4
    copied = {"S1": 1 + h, "S2": h, "S3": 1, "S4": 0}
    for strategy in REUSE:
        wanted = 0.0
        for backward in (False, True):
            q1 = (4 if backward else 2) + (backward and strategy in {"S3", "S4"})
            q2 = 2 + (backward and strategy in {"S2", "S4"})
            q3 = copied[strategy]
            sigma, mu, eta = (0.85, 0.6, 0.65) if q3 else (0.9, 0.8, 1.0)
            copy = (1e-5 + 1e-10 * q3 * rows * 256 * 4) if q3 else 0.0
            wanted += max(q1 * gemm / sigma, q2 * a2a / mu, copy / eta)
        assert paper_seconds(costs=costs, strategy=strategy, tokens=rows) == pytest.approx(wanted)


def test_swiglu_copies_and_recomputes_both_of_its_middles() -> None:
    swiglu = costs_of(layer=replace(LAYER, activation="swiglu"))
    s1 = phase_time(costs=swiglu, phase="forward", strategy="S1", tokens=4096, degree=1)
    assert s1.copy_seconds == pytest.approx(2e-5 + 1e-10 * 4096 * (256 + 2 * 1024) * 4)
    s4 = phase_time(costs=swiglu, phase="backward", strategy="S4", tokens=4096, degree=1)
    gemm = 5e-5 + 4e-14 * 4096 * 256 * 1024
    assert s4.device_seconds == pytest.approx((6 + 2) * gemm)
