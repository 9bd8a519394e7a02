"""A short budget on a GPU: every kind of operation is measured before any is refined."""

from collections import Counter
from collections.abc import Iterable

from moetune.domain.cluster import Machine
from moetune.domain.costs import LinearCost
from moetune.domain.layer import LayerShape
from moetune.domain.samples import CollectivePoint, CopyPoint, InterferencePoint, Point
from moetune.measure.estimate import Rates, visit_seconds
from moetune.measure.points import PointChoice, PointScope, default_group_sizes
from moetune.measure.session import _EFFORTS, Assignment, _affordable, _estimates

EFFORT = _EFFORTS["full", "cuda"]


def _choice(num_ranks: int, layers: tuple[LayerShape, ...]) -> PointChoice:
    machine = Machine(kind="cuda", device="a GPU of 139 GiB", num_devices=num_ranks,
                      devices_per_node=num_ranks, memory_bytes=139 * 2**30)  # fmt: skip
    return PointScope(machine=machine, dtypes=("float32", "bfloat16"),
                      group_sizes=default_group_sizes(num_ranks), layers=layers, preset="full",
                      max_tokens=16384).points()  # fmt: skip


def _rates(points: Iterable[Point]) -> Rates:
    """Return speeds of the order of a large GPU's."""
    groups = {point.group for point in points if hasattr(point, "group")}
    return Rates(
        macs_per_second={"float32": 2.5e13, "bfloat16": 3.5e14}, copy_bytes_per_second=5e10,
        wires={group: LinearCost(alpha_seconds=2e-5, beta_seconds=4e-11) for group in groups},
        kind="cuda",
    )  # fmt: skip


def _chosen(choice: PointChoice, budget_seconds: float) -> tuple[Point, ...]:
    assignment = Assignment(
        needed=choice.needed, optional=choice.optional, preset="full", budget_seconds=budget_seconds
    )
    rates = _rates(choice.all)
    seconds = {point: visit_seconds(point, rates, EFFORT) for point in choice.all}
    return tuple(_estimates(assignment, _affordable(assignment, seconds), seconds).seconds)


def test_eight_gpus_measure_every_kind_within_five_minutes() -> None:
    layer = LayerShape(d_model=2048, d_hidden=8192, num_experts=64, top_k=2)
    choice = _choice(8, (layer,))
    chosen = _chosen(choice, 300)
    kinds = Counter(point.kind for point in chosen)
    assert set(kinds) == {point.kind for point in choice.all}
    exchanges = {
        row.group for row in chosen if isinstance(row, CollectivePoint) and row.op == "all_to_all"
    }
    assert exchanges == {(size, 0) for size in (2, 4, 8)}
    copies = {(point.direction, point.pinned) for point in chosen if isinstance(point, CopyPoint)}
    assert {("h2d", True), ("d2h", True)} <= copies
    assert any(isinstance(point, InterferencePoint) and "mem" in point.others for point in chosen)
