"""Which points are chosen, and how long they are estimated to take."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from moetune.domain.cluster import DeviceKind, Machine
from moetune.domain.costs import LinearCost
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.samples import (
    CollectiveOp,
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    InterferencePoint,
    Point,
    RowsPoint,
)
from moetune.measure.estimate import Rates, operation_seconds
from moetune.measure.grid import Preset
from moetune.measure.kernels import other_kernels
from moetune.measure.points import PointScope, default_group_sizes
from moetune.measure.sizes import memory_bytes

GIB = 2**30


def machine_of(
    num_ranks: int, kind: DeviceKind = "cpu", memory: int = 64 * GIB, per_node: int | None = None
) -> Machine:
    return Machine(kind=kind, device="test", num_devices=num_ranks,
                   devices_per_node=per_node or num_ranks, memory_bytes=memory)  # fmt: skip


def choose(num_ranks: int = 2, preset: Preset = "quick", **more: object) -> tuple[Point, ...]:
    arguments: dict[str, object] = {
        "machine": machine_of(num_ranks), "dtypes": ("float32",),
        "group_sizes": default_group_sizes(num_ranks), "preset": preset, **more,
    }  # fmt: skip
    return PointScope(**arguments).points().all  # type: ignore[arg-type] # the keywords are the test's own


def test_other_kernels_of_a_cpu_are_measured_where_they_can_run() -> None:
    layer = LayerShape(d_model=64, d_hidden=96, num_experts=4)
    kernels_of = partial(other_kernels, device=torch.device("cpu"))
    load = Workload(layer=layer, world_size=1, tokens_per_rank=64)
    assert "grouped_mm" in kernels_of(load)
    odd = replace(layer, d_hidden=97)  # whose rows are no multiples of 16 bytes
    for other in (replace(load, dtype="float64"), replace(load, layer=odd)):
        assert "grouped_mm" not in kernels_of(other)
    points = choose(1, layers=(layer,), max_tokens=64, kernels_of=lambda _: ("grouped_mm",))
    named = [point for point in points if isinstance(point, GemmPoint) and point.kernel]
    assert {(point.product, point.d_in) for point in named} == {
        (product, width)
        for product in ("forward", "grad_input", "grad_weight")
        for width in (64, 96)
    }


@pytest.mark.parametrize("preset", ["quick", "full"])
def test_a_layers_products_and_payloads_are_covered(preset: Preset) -> None:
    layer = LayerShape(d_model=96, d_hidden=384, num_experts=8, top_k=2, activation="swiglu")
    points = set(choose(4, preset, layers=(layer,), max_tokens=1024, group_sizes=(2, 4)))
    for group_size in (2, 4):
        experts = 8 // group_size
        for degree in (1, 4, 16, 64):
            rows = 1024 * 2 // degree
            for d_in, d_out in ((96, 384), (384, 96)):
                for product in ("forward", "grad_input", "grad_weight"):
                    assert (
                        GemmPoint(dtype="float32", product=product, num_experts=experts,
                                  rows=max(rows // experts, 1), d_in=d_in, d_out=d_out)
                        in points
                    )  # fmt: skip
        whole = 1024 * 2 * 96 * 4
        for degree, in_flight in ((1, 1), (2, 1), (3, 4), (8, 4), (24, 4), (64, 4)):
            payload = CollectivePoint(
                op="all_to_all", group_size=group_size, in_flight=in_flight,
                num_bytes=-(-(whole // degree) // (4 * group_size)) * 4 * group_size,
            )  # fmt: skip
            assert payload in points
    ops = {point.op for point in points if isinstance(point, RowsPoint)}
    assert ops == {
        "swiglu", "swiglu_backward", "gather", "scatter_add", "gate", "gate_backward", "adam",
    }  # fmt: skip


def test_every_rank_can_take_part_in_the_exchanges_that_overlap_computation() -> None:
    layer = LayerShape(d_model=12, d_hidden=20, num_experts=6)
    points = choose(6, layers=(layer,), max_tokens=50)
    sizes = {point.comm_bytes for point in points if isinstance(point, InterferencePoint)}
    assert len(sizes) > 2
    assert all(size % (4 * 6) == 0 for size in sizes)
    overlapped = [point for point in points if isinstance(point, InterferencePoint)]
    alone = {point.comm_bytes for point in overlapped if point.is_alone}
    assert alone == {max(sizes)}  # the chunks that are alone are the largest


@pytest.mark.parametrize("preset", ["quick", "full"])
def test_every_collective_is_measured_for_every_group_from_small_to_large(preset: Preset) -> None:
    points = choose(4, preset)
    for op in ("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send"):
        for group_size in (2, 4):
            sizes = [
                point.num_bytes
                for point in points
                if isinstance(point, CollectivePoint)
                and (point.op, point.group_size, point.in_flight) == (op, group_size, 1)
            ]
            assert min(sizes) == 2**10
            assert max(sizes) >= 2**22
            assert len(sizes) >= 4
            assert all(size % (4 * group_size) == 0 for size in sizes)


@pytest.mark.parametrize("preset", ["quick", "full"])
def test_under_several_nodes_ranks_of_different_nodes_are_measured_too(preset: Preset) -> None:
    points = choose(8, preset, machine=machine_of(8, per_node=2))
    by_op: dict[CollectiveOp, set[tuple[int, int]]] = {}
    for point in points:
        if isinstance(point, CollectivePoint):
            by_op.setdefault(point.op, set()).add(point.group)
    everywhere = {(2, 0), (4, 0), (8, 0), (2, 2), (4, 4)}
    assert by_op.pop("send") == everywhere - {(4, 4)}
    assert set(by_op) == {"all_to_all", "all_reduce", "all_gather", "reduce_scatter"}
    assert all(groups == everywhere for groups in by_op.values())


def test_all_reduces_of_a_layers_tokens_are_measured_in_chunks() -> None:
    layer = LayerShape(d_model=64, d_hidden=128, num_experts=4)
    points = choose(4, layers=(layer,), max_tokens=512)
    for group_size in (2, 4):
        sizes = {
            point.num_bytes
            for point in points
            if isinstance(point, CollectivePoint)
            and (point.op, point.group_size) == ("all_reduce", group_size)
            and point.in_flight > 1
        }
        assert sizes == {512 * 64 * 4 // degree for degree in (1, 4, 16, 64)}


def test_sums_of_a_tensor_parallel_layers_chunks_are_measured() -> None:
    layer = LayerShape(d_model=64, d_hidden=128, num_experts=4)
    points = set(choose(8, layers=(layer,), max_tokens=512, machine=machine_of(8, per_node=4)))
    for group_size, degree in itertools.product((2, 4), (1, 4, 16, 64)):
        num_bytes = 512 * 64 * 4 // degree
        point = CollectivePoint(
            op="all_reduce", group_size=group_size, num_bytes=num_bytes, in_flight=4
        )
        assert point in points


def test_one_gpu_talks_through_host_memory() -> None:
    points = choose(1, machine=machine_of(1, "cuda"))
    ops = {point.op for point in points if isinstance(point, CollectivePoint)}
    assert ops == {"all_to_all"}
    assert InterferencePoint(victim="comm", others=("comp", "mem")) in points
    assert {point.pinned for point in points if isinstance(point, CopyPoint)} == {True, False}


def test_a_gpus_layers_have_uneven_loads_gates_and_launches() -> None:
    layer = LayerShape(d_model=64, d_hidden=128, num_experts=4)

    def added(kind: DeviceKind, dtype: str) -> tuple[set[str], set[int], set[str]]:
        points = choose(2, machine=machine_of(2, kind), layers=[layer], dtypes=[dtype])
        gemms = [point for point in points if isinstance(point, GemmPoint)]
        ops = {point.op for point in points if isinstance(point, RowsPoint)}
        return (
            {point.product for point in gemms if point.product.startswith("uneven_")},
            {point.d_out for point in gemms if (point.num_experts, point.d_in) == (1, 64)} & {4},
            ops & {"chunked_layer", "chunked_layer_step"},
        )

    forms = {"uneven_forward", "uneven_grad_input", "uneven_grad_weight"}
    launches = {"chunked_layer", "chunked_layer_step"}
    assert added("cuda", "bfloat16") == (forms, {4}, launches)
    assert added("cuda", "float32") == (set(), {4}, launches)  # one GEMM for each expert
    assert added("cpu", "bfloat16") == (set(), set(), set())


def test_no_point_takes_the_memory_away() -> None:
    points = choose(machine=machine_of(2, memory=2**24))
    assert points
    assert max(map(memory_bytes, points)) <= 2**21


def test_impossible_groups_and_layers_are_refused() -> None:
    with pytest.raises(InputError, match=r"4 .*2 ranks"):
        choose(2, group_sizes=(4,))
    with pytest.raises(InputError, match=r"3 experts .*2"):
        choose(2, layers=(LayerShape(d_model=8, d_hidden=8, num_experts=3),))


@pytest.mark.parametrize(
    ("op", "sent"),
    [("all_to_all", 1), ("reduce_scatter", 1), ("send", 1), ("all_reduce", 2), ("all_gather", 4)],
)
def test_a_collective_takes_as_many_all_to_alls_as_it_sends(op: CollectiveOp, sent: int) -> None:
    size = 2 if op == "send" else 4
    rates = Rates(macs_per_second={}, copy_bytes_per_second=1.0,
                  wires={(size, 0): LinearCost(alpha_seconds=0.5, beta_seconds=1e-3)})  # fmt: skip
    for in_flight in (1, 3):
        point = CollectivePoint(op=op, group_size=size, num_bytes=3000, in_flight=in_flight)
        assert operation_seconds(point, rates) == in_flight * (0.5 + 3.0 * sent)


@pytest.mark.parametrize(("num_experts", "rows"), [(1, 7), (2, 8), (3, 2), (4, 16), (9, 5), (8, 1)])
def test_experts_of_a_measured_product_share_all_its_rows(num_experts: int, rows: int) -> None:
    point = GemmPoint(dtype="float32", num_experts=num_experts, rows=rows, d_in=8, d_out=8)
    counts = point.expert_rows
    assert sum(counts) == num_experts * rows
    assert all(abs(count - rows) <= 1 and count > 0 for count in counts)
