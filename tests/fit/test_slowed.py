"""One part of a machine slower, held against costs that were written with the slower number."""

from dataclasses import replace
from pathlib import Path

import pytest

from moetune.app.files import load_profile_file
from moetune.domain.constraints import Strategy
from moetune.domain.cost_keys import AttentionKey, CollectiveKey, GemmKey
from moetune.domain.costs import Costs, LinearCost, seconds_if_known
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Decision
from moetune.domain.samples import CollectiveOp
from moetune.fit.costs import costs_of
from moetune.fit.speeds import PARTS, Slowdown, Speeds, scale_profile, slowed
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.times import step_time
from tests.solve.costs_by_hand import ALL_TO_ALL, GEMM, LinearCosts

LAB = Path(__file__).parents[1] / "golden" / "lab.toml"
DISTURBED = Interference(
    comp=CompSpeed(comm=0.8, mem=0.9, all=0.5),
    comm=CommSpeed(comp=0.5, mem=0.6, all=0.4),
    mem=MemSpeed(comp=0.7, comm=0.6, all=0.25),
)
COPY = LinearCost(alpha_seconds=1e-5, beta_seconds=1e-10)
BASE = LinearCosts(
    interference=DISTURBED, copy_cost=COPY, copy_mode="pinned",
    rows_seconds={"gate": 1e-11, "gate_backward": 2e-11, "gelu": 1e-12, "attention": 1e-13},
)  # fmt: skip


def seconds(costs: Costs, decision: Decision, *, ranks: int = 8) -> float:
    load = Workload(layer=LayerShape(d_model=1024, d_hidden=4096, num_experts=16, top_k=2),
                    world_size=ranks, tokens_per_rank=4096, dtype="bfloat16")  # fmt: skip
    return step_time(costs=layer_costs(workload=load, costs=costs), tokens=4096,
                     degree=decision.degree, order=decision.order,
                     strategy=decision.strategy).seconds  # fmt: skip


def times(line: LinearCost, *, alpha: float = 1.0, beta: float = 1.0) -> LinearCost:
    return LinearCost(
        alpha_seconds=alpha * line.alpha_seconds, beta_seconds=beta * line.beta_seconds
    )


@pytest.mark.parametrize("strategy", ["none", "S1", "S4"])
@pytest.mark.parametrize(("part", "written"), [
    ("gemm rate", replace(BASE, gemm_cost=times(GEMM, beta=1.5))),
    ("gemm start-up", replace(BASE, gemm_cost=times(GEMM, alpha=1.5))),
    ("all_to_all bandwidth", replace(BASE, transfer_cost=times(ALL_TO_ALL, beta=1.5))),
    ("all_to_all start-up", replace(BASE, transfer_cost=times(ALL_TO_ALL, alpha=1.5))),
    ("copies", replace(BASE, copy_cost=times(COPY, alpha=1.5, beta=1.5))),
    ("memory-bound operations",
     replace(BASE, rows_seconds={name: 1.5 * time for name, time in BASE.rows_seconds.items()})),
])  # fmt: skip
def test_a_slower_part_is_the_machine_with_the_slower_number(
    part: str, written: LinearCosts, strategy: Strategy
) -> None:
    decision = Decision(forward_degree=4, backward_degree=4, strategy=strategy)
    taken = seconds(slowed(BASE, Slowdown(part=part, factor=1.5)), decision)
    assert taken == pytest.approx(seconds(written, decision), rel=1e-12)


def test_stronger_interference_lengthens_what_others_lengthen() -> None:
    made = slowed(BASE, Slowdown(part="interference", factor=2.0))
    # 1 / (1 + 2·(1/s − 1)): a speed of 0.8 takes 1.25 times as long, and then 1.5 times.
    assert made.speeds["comp", "comm"] == pytest.approx(1 / 1.5)
    assert made.speeds["comm", "comp"] == pytest.approx(1 / 3)
    assert made.speeds["mem", "all"] == pytest.approx(1 / 7)
    speeds = made.overlap_speeds(exchange_bytes=1.0, exchange_seconds=1.0)
    assert [speed.item() for speed in speeds] == pytest.approx([1 / 1.5, 1 / 3])
    assert slowed(BASE, None) is BASE


def test_parts_leave_each_other_alone() -> None:
    for part in PARTS:
        costs = slowed(BASE, Slowdown(part=part, factor=3.0))
        gemm = costs.seconds(GemmKey("bfloat16", "forward", 2, 16, 32), 8)
        wanted = {
            "gemm rate": GEMM.alpha_seconds + 3 * GEMM.beta_seconds * 8192,
            "gemm start-up": 3 * GEMM.alpha_seconds + GEMM.beta_seconds * 8192,
        }.get(part, GEMM.seconds(8192))
        assert gemm.seconds == pytest.approx(wanted, rel=1e-12)
        attention = seconds_if_known(costs, AttentionKey("bfloat16", 10, 1, 10), 1)
        assert attention is not None
        assert attention.seconds == pytest.approx(3e-10 if part == "attention" else 1e-10)


def test_measured_parts_together_are_a_machine_of_another_speed() -> None:
    profile = load_profile_file(LAB)
    costs = costs_of(profile)
    op: CollectiveOp = "all_to_all"
    for num_bytes in (2e3, 1e5, 3e6):
        whole = costs_of(scale_profile(profile, Speeds(communication=0.5)))
        wanted = whole.seconds(CollectiveKey(op, 2), num_bytes).seconds
        both = slowed(
            slowed(costs, Slowdown(part=f"{op} bandwidth", factor=2.0)),
            Slowdown(part=f"{op} start-up", factor=2.0),
        )
        time = both.seconds(CollectiveKey(op, 2), num_bytes).seconds
        assert time == pytest.approx(wanted, rel=1e-6)
        start = slowed(costs, Slowdown(part=f"{op} start-up", factor=2.0))
        least = costs.seconds(CollectiveKey(op, 2), 0.0).seconds
        more = start.seconds(CollectiveKey(op, 2), num_bytes).seconds
        plain = costs.seconds(CollectiveKey(op, 2), num_bytes).seconds
        assert more - plain == pytest.approx(least, rel=1e-9)
    assert slowed(costs, Slowdown(part="gemm rate", factor=2.0)).is_measured("float32")
