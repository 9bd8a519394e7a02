"""What a store accepts: each kind of value, at and beyond its bounds."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.cluster import Machine
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Decision
from moetune.domain.profile import CollectiveLine, CopyLine, GemmLine, Profile, RowsLine
from moetune.domain.records import LONGEST_SECONDS, SHORTEST_SECONDS, Settled
from moetune.domain.reference import CollectiveTable, GemmTable, Network
from moetune.domain.samples import GemmPoint, Sample, StepRecord
from moetune.store import storable
from tests.runtime.plans import small_plan
from tests.store.values import observed_run

MACHINE = Machine(kind="cuda", device="GPU", num_devices=2, devices_per_node=2, memory_bytes=2**30)
PLAIN = Profile(name="one", provenance="published", machine=MACHINE)
LAYER = LayerShape(d_model=8, d_hidden=8, num_experts=2, top_k=1)
WORKLOAD = Workload(layer=LAYER, tokens_per_rank=8, world_size=2, dtype="float32")


def test_runs_have_times_of_steps() -> None:
    for seconds in (SHORTEST_SECONDS, LONGEST_SECONDS):
        assert observed_run(seconds=seconds).seconds == seconds
        with pytest.raises(InputError, match="which no step takes"):
            observed_run(seconds=seconds * (0.9 if seconds < 1 else 1.1))


def test_settled_sizes_plans_and_samples_have_bounds() -> None:
    settled = Settled(plan_id="a" * 64, hardware_id="b", memory_reuse=None, tokens_per_rank=8,
                      decision=Decision(forward_degree=1, backward_degree=1), seconds=(1.0,),
                      planned_seconds=1.0, num_steps=1)  # fmt: skip
    storable.check(settled)
    with pytest.raises(InputError, match="planned_seconds"):
        storable.check(replace(settled, planned_seconds=1e-300))
    plan = small_plan(layer=LAYER, world_size=2)
    storable.check(plan)
    with pytest.raises(InputError, match=r"predicted\.step_seconds"):
        storable.check(replace(plan, predicted=replace(plan.predicted, step_seconds=1e-320)))
    point = GemmPoint(dtype="float32", rows=1, d_in=1, d_out=1)
    storable.check(Sample(point=point, seconds=(1e-9, 1.0)))
    with pytest.raises(InputError, match="gemm sample"):
        storable.check(Sample(point=point, seconds=(1.0, 1e300)))


def rates(beta: float) -> Iterator[Profile]:
    """Yield profiles with a line, or a network, of that rate."""
    line: dict[str, Any] = {"alpha_seconds": 0.0, "beta_seconds_per_byte": beta}
    gemm = GemmLine(dtype="float32", alpha_seconds=0.0, beta_seconds_per_mac=beta)
    rows = RowsLine(op="gelu", dtype="float32", alpha_seconds=0, beta_seconds_per_element=beta)
    yield replace(PLAIN, gemm=(gemm,))
    yield replace(PLAIN, collective=(CollectiveLine(op="all_to_all", group_size=2, **line),))
    yield replace(PLAIN, copy=(CopyLine(direction="h2d", pinned=True, **line),))
    yield replace(PLAIN, rows=(rows,))
    yield replace(PLAIN, network=Network(source="s", nic_bytes_per_second=1 / beta))


def times(seconds: float, size: float = 8.0) -> Iterator[Profile]:
    """Yield profiles with a step, or a table's row, of that time."""
    step = StepRecord(workload=WORKLOAD, degree=1, chunks_seconds=seconds, overhead_seconds=0.0,
                      measured_seconds=seconds)  # fmt: skip
    source: dict[str, Any] = {"label": "published", "source": "s"}
    gemm = GemmTable(**source, dtype="float32", points=((1, 1, size, seconds),))
    exchange = CollectiveTable(**source, op="all_to_all", group_size=2, points=((size, seconds),))
    yield replace(PLAIN, steps=(step,))
    yield replace(PLAIN, tables=(gemm,))
    yield replace(PLAIN, tables=(exchange,))


@pytest.mark.parametrize(("profile", "words"), [
    *(
        (profile, "which no operation does")
        for beta in (1e-300, 1e200)
        for profile in rates(beta)
    ),
    *((profile, "which no") for seconds in (1e-320, 1e100) for profile in times(seconds)),
    *((profile, "size 1e") for profile in [*times(1e-3, size=1e30)][2:]),
])  # fmt: skip
def test_what_no_machine_has_is_refused(profile: Profile, words: str) -> None:
    with pytest.raises(InputError, match=words):
        storable.check(profile)


def test_times_of_a_machine_are_accepted() -> None:
    for profile in times(1e-3):
        storable.check(profile)


@pytest.mark.parametrize("name", bundled_profiles())
def test_every_reference_machine_is_accepted(name: str) -> None:
    storable.check(load_profile_file(bundled_profiles()[name]))
