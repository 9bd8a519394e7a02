"""Values that the store's tests keep: a machine, its samples, profiles, plans, observed runs."""

from dataclasses import replace
from typing import Any

from sqlalchemy import text

from moetune.domain.cluster import Cluster, Fingerprint, Machine
from moetune.domain.plan import Plan
from moetune.domain.profile import CollectiveLine, FitError, GemmLine, Profile
from moetune.domain.records import ObservedRun
from moetune.domain.samples import (
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    InterferencePoint,
    RowsPoint,
    Sample,
)
from moetune.store.address import parse_address
from moetune.store.database import Database
from tests.report.lab import lab_plan

CLUSTER = Cluster(
    machine=Machine(kind="cuda", device="NVIDIA H200", num_devices=8, devices_per_node=8,
                    memory_bytes=150_754_820_096),
    fingerprint=Fingerprint(
        hardware={"gpu": "NVIDIA H200", "cpu": "Größe"}, software={"torch": "2.13.0"}
    ),
)  # fmt: skip

MEASURED = (
    Sample(
        point=GemmPoint(dtype="float32", rows=128, d_in=512, d_out=2048),
        seconds=(0.1 + 0.2, 1 / 3, 1.0000000000000002e-12, 9999999.999999998),
        num_iterations=7,
        marks=("unstable", "drift"),
    ),
    Sample(point=RowsPoint(op="gelu", dtype="bfloat16", rows=4, width=8), seconds=(1e-6,)),
    Sample(
        point=CollectivePoint(op="all_to_all", group_size=2, num_bytes=2**40, in_flight=4),
        seconds=(2e-3, 1e-3),
    ),
    Sample(
        point=CopyPoint(direction="h2d", pinned=True, num_bytes=1 << 20, both_ways=True),
        seconds=(),
        error="out of memory",
    ),
    Sample(point=InterferencePoint(victim="comp", others=("comm", "mem")), seconds=(1.0,)),
)
"""One sample of every kind, with times that need all the digits of a float."""


def make_profile(
    name: str = "h200-x8", *, beta: float = 1e-12, samples: tuple[Sample, ...] = ()
) -> Profile:
    error = FitError(num_points=9, median=0.01, p95=0.03, low=1.0, high=1e12, quality="good",
                     alpha_seconds=(1e-5, 2e-5), beta_seconds=(1e-12, 2e-12))  # fmt: skip
    product = GemmLine(dtype="float32", alpha_seconds=1e-5, beta_seconds_per_mac=beta, error=error)
    exchange = CollectiveLine(
        op="all_to_all", group_size=8, alpha_seconds=0.1, beta_seconds_per_byte=1 / 3
    )
    return Profile(
        name=name, provenance="measured", machine=CLUSTER.machine, gemm=(product,),
        collective=(exchange,), fingerprint=CLUSTER.fingerprint, samples=samples,
    )  # fmt: skip


def make_plan(tokens: int = 4096, *, step_seconds: float = 0.3) -> Plan:
    plan = lab_plan()
    inputs = replace(plan.inputs, tokens_per_rank=tokens)
    predicted = replace(plan.predicted, step_seconds=step_seconds)
    return replace(plan, id=inputs.plan_id, inputs=inputs, predicted=predicted)


def observed_run(model: str = "olmoe", ratio: float = 1.25, **values: Any) -> ObservedRun:
    """Return a run whose step took so many times its prediction."""
    run = ObservedRun(
        plan_id="", model=model, profile="h200-x8", profile_fingerprint="f" * 64, device="H200",
        target="megatron", target_version="0.19.0", world_size=64, global_batch=2**33, seq=4096,
        dtype="bfloat16", layout="dp 64", seconds=ratio / 3, low_seconds=ratio / 4,
        high_seconds=ratio / 2, num_steps=50, predicted_seconds=1 / 3, source="train.log",
        memory_bytes=2**40 + 1, predicted_bytes=2**40, parts={"optimizer": 0.1 + 0.2},
    )  # fmt: skip
    return replace(run, **values)


def execute(url: str, statement: str) -> None:
    """Change the database as another program would."""
    with Database(parse_address(url)) as database:
        database.write(lambda connection: connection.execute(text(statement)))
