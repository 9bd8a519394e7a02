"""A short budget on a GPU: every kind of operation is measured before any is refined."""

from collections import Counter
from collections.abc import Iterable

import pytest

from benchmarks.gpu.scale import gpu_scale
from benchmarks.gpu.wired import wired
from moetune.domain.cluster import Cluster, Fingerprint, Machine
from moetune.domain.layer import LayerShape
from moetune.domain.profile import Profile
from moetune.domain.samples import (
    CollectivePoint,
    CopyPoint,
    InterferencePoint,
    Point,
    RowsPoint,
    Sample,
)
from moetune.fit.profile import fit_profile
from moetune.measure.estimate import Rates, Wire, operation_seconds, visit_seconds
from moetune.measure.grid import SUSTAINED, SUSTAINED_SECONDS
from moetune.measure.points import PointChoice, choose_points, default_group_sizes
from moetune.measure.schedule import round_of, tiers
from moetune.measure.session import _EFFORTS, Assignment, _affordable, _estimates
from moetune.solve.layer.times import step_time

EFFORT = _EFFORTS["full", "cuda"]


def _machine(num_ranks: int) -> Machine:
    return Machine(
        kind="cuda", device="a GPU of 139 GiB", num_devices=num_ranks, devices_per_node=num_ranks,
        memory_bytes=139 * 2**30,
    )  # fmt: skip


def _choice(num_ranks: int, layers: tuple[LayerShape, ...]) -> PointChoice:
    return choose_points(
        cluster=Cluster(machine=_machine(num_ranks), fingerprint=Fingerprint()),
        dtypes=("float32", "bfloat16"), group_sizes=default_group_sizes(num_ranks),
        layers=layers, preset="full", max_tokens=16384,
    )  # fmt: skip


def _rates(points: Iterable[Point]) -> Rates:
    """Return speeds of the order of a large GPU's."""
    groups = {one.group for one in points if hasattr(one, "group")}
    return Rates(
        macs_per_second={"float32": 2.5e13, "bfloat16": 3.5e14}, copy_bytes_per_second=5e10,
        wires={group: Wire(seconds=2e-5, bytes_per_second=2.5e10) for group in groups},
        kind="cuda",
    )  # fmt: skip


def _chosen(choice: PointChoice, budget_seconds: float) -> tuple[Point, ...]:
    assignment = Assignment(
        needed=choice.needed, others=choice.others, preset="full", budget_seconds=budget_seconds
    )
    rates = _rates(choice.all)
    seconds = {point: visit_seconds(point, rates, EFFORT) for point in choice.all}
    return tuple(_estimates(assignment, _affordable(assignment, seconds), seconds).seconds)


def _profile(points: Iterable[Point]) -> Profile:
    rates = _rates(points)
    return fit_profile(
        name="one", machine=_machine(1), fingerprint=Fingerprint(),
        samples=[
            Sample(point=point, seconds=(max(operation_seconds(point, rates), 1e-5),) * 5)
            for point in points
        ],
    )  # fmt: skip


@pytest.mark.parametrize("budget_seconds", [60, 150])
def test_a_profile_of_one_gpu_predicts_steps_that_offload(budget_seconds: float) -> None:
    scale = gpu_scale()
    layers = tuple(scale.workload(model, 1).layer for model in scale.models)
    profile = _profile(_chosen(_choice(1, layers), budget_seconds))
    for model in scale.models:
        workload = scale.workload(model, scale.tokens[-1])
        step = step_time(
            costs=wired(profile, workload), tokens=workload.tokens_per_rank, forward_degree=4,
            backward_degree=4, strategy="S1",
        )  # fmt: skip
        assert step.seconds > 0


def test_eight_gpus_measure_every_kind_within_five_minutes() -> None:
    layer = LayerShape(d_model=2048, d_hidden=8192, num_experts=64, top_k=2)
    choice = _choice(8, (layer,))
    chosen = _chosen(choice, 300)
    kinds = Counter(one.kind for one in chosen)
    assert set(kinds) == {one.kind for one in choice.all}
    exchanges = {
        one.group for one in chosen if isinstance(one, CollectivePoint) and one.op == "all_to_all"
    }
    assert exchanges == {(size, 0) for size in (2, 4, 8)}
    copies = {(one.direction, one.pinned) for one in chosen if isinstance(one, CopyPoint)}
    assert {("h2d", True), ("d2h", True)} <= copies
    assert any(isinstance(one, InterferencePoint) and "mem" in one.others for one in chosen)


def test_each_kind_comes_before_the_second_dozen_of_any() -> None:
    choice = _choice(1, (LayerShape(d_model=1024, d_hidden=4096, num_experts=1, top_k=1),))
    first, _ = round_of(tiers(choice.needed, choice.others), 0, seed=0)
    kinds = {one.kind for one in first}
    assert {"gemm", "rows", "copy", "collective", "interference"} <= kinds
    order = [one.kind for one in first]
    known = max(order.index(kind) for kind in kinds)
    assert max(Counter(order[: known + 1]).values()) <= 24


def test_a_warm_up_is_charged_as_a_few_blocks_and_seconds_where_they_are_spent() -> None:
    choice = _choice(1, (LayerShape(d_model=1024, d_hidden=4096, num_experts=1, top_k=1),))
    rates = _rates(choice.all)
    (sustained,) = (
        one for one in choice.needed if isinstance(one, RowsPoint) and one.op == SUSTAINED
    )
    assert visit_seconds(sustained, rates, EFFORT) > SUSTAINED_SECONDS
    brief = [one for one in choice.needed if one.kind == "gemm"]
    assert max(visit_seconds(one, rates, EFFORT) for one in brief) < 0.3
    total = sum(visit_seconds(one, rates, EFFORT) for one in choice.all)
    assert total < 240
