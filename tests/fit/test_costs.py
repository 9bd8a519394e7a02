"""Predictions from measured and from published profiles."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.cluster import Machine
from moetune.domain.cost_keys import AttentionKey, CollectiveKey, CopyKey, GemmKey, RowsKey
from moetune.domain.costs import Costs, Estimate, seconds_if_known
from moetune.domain.errors import ProfileError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.profile import CollectiveLine, CopyLine, GemmLine, Profile
from moetune.domain.samples import (
    AttentionPoint,
    CollectiveOp,
    CollectivePoint,
    CopyPoint,
    Direction,
    GemmForm,
    GemmPoint,
    Sample,
)
from moetune.fit.costs import costs_of
from moetune.solve.layer.costs import layer_costs
from tests.fit.measured import fitted, line_of
from tests.report.lab import lab_profile

MACHINE = Machine(
    kind="cuda", device="Lab GPU", num_devices=16, devices_per_node=8, memory_bytes=2**34
)
SIZES = tuple(2**at for at in range(12, 24, 2))


def comm(
    size: int,
    seconds: float,
    *,
    ranks: int = 2,
    in_flight: int = 1,
    op: CollectiveOp = "all_to_all",
    nodes: int = 0,
) -> Sample:
    point = CollectivePoint(
        op=op, group_size=ranks, num_bytes=size, in_flight=in_flight, num_nodes=nodes
    )
    return Sample(point=point, seconds=(seconds,))


def gemm(
    rows: int,
    seconds: float,
    *,
    shape: tuple[int, int, int] = (1, 512, 2048),
    product: GemmForm = "forward",
    dtype: str = "float32",
) -> Sample:
    num_experts, d_in, d_out = shape
    point = GemmPoint(
        dtype=dtype, product=product, num_experts=num_experts, rows=rows, d_in=d_in, d_out=d_out
    )
    return Sample(point=point, seconds=(seconds,))


def measured(samples: Sequence[Sample], machine: Machine = MACHINE) -> Profile:
    return fitted(samples, machine)


PUBLISHED = Profile(
    name="paper",
    provenance="published",
    machine=MACHINE,
    gemm=(GemmLine(dtype="float32", alpha_seconds=6e-5, beta_seconds_per_mac=4e-14),),
    collective=(
        CollectiveLine(
            op="all_to_all", group_size=16, alpha_seconds=1e-4, beta_seconds_per_byte=3e-10
        ),
    ),
    copy=(CopyLine(direction="h2d", pinned=True, alpha_seconds=1e-5, beta_seconds_per_byte=8e-11),),
)


def test_published_profile_predicts_its_lines_and_calls_them_modelled() -> None:
    costs: Costs = costs_of(PUBLISHED)
    comm_line = line_of(costs, CollectiveKey("all_to_all", 16))
    estimate = costs.seconds(GemmKey("float32", "grad_weight", 2, 512, 2048), 100.5)
    assert not costs.is_measured("float32")
    assert (comm_line.alpha_seconds, comm_line.beta_seconds) == pytest.approx((1e-4, 3e-10))
    assert estimate.seconds == pytest.approx(6e-5 + 4e-14 * 2 * 100.5 * 512 * 2048)
    assert estimate.trust == "modelled"
    several = costs.seconds(CollectiveKey("all_to_all", 16, in_flight=4), 1e6)
    assert several.seconds == pytest.approx(4e-4)
    assert several.trust == "modelled"
    assert costs.seconds(CopyKey("h2d", pinned=True), 1e6).seconds == pytest.approx(9e-5)
    assert seconds_if_known(costs, RowsKey("gelu", "float32"), 10 * 10) is None


def test_collective_labels_say_measured_interpolated_and_extrapolated() -> None:
    costs = costs_of(measured([comm(size, 1e-4 + size * 1e-9) for size in SIZES]))

    def ask(num_bytes: float) -> tuple[float, str]:
        estimate = costs.seconds(CollectiveKey("all_to_all", 2), num_bytes)
        return estimate.seconds, estimate.trust

    assert ask(2**14) == (1e-4 + 2**14 * 1e-9, "measured")
    seconds, trust = ask(2**15)
    assert 1e-4 + 2**14 * 1e-9 < seconds < 1e-4 + 2**16 * 1e-9
    assert trust == "interpolated"
    assert ask(2**11)[1] == ask(2**25)[1] == "extrapolated"


def test_several_in_flight_take_their_curve_or_the_nearest() -> None:
    costs = costs_of(
        measured(
            [
                *(comm(size, 4e-9 * size) for size in SIZES),
                *(comm(size, 2e-9 * size, in_flight=4) for size in SIZES),
                *(comm(size, 1e-9 * size, in_flight=16) for size in SIZES),
            ]
        )
    )
    for in_flight, rate, trust in (
        (1, 4e-9, "measured"), (4, 2e-9, "measured"), (2, 2e-9, "interpolated"),
        (10, 1e-9, "interpolated"), (64, 1e-9, "interpolated"),
    ):  # fmt: skip
        estimate = costs.seconds(CollectiveKey("all_to_all", 2, in_flight=in_flight), 2**14)
        assert estimate.seconds == pytest.approx(rate * 2**14)
        assert estimate.trust == trust


def test_arrays_of_bytes_and_numbers_in_flight_are_those_of_each() -> None:
    layer = LayerShape(d_model=64, d_hidden=128, num_experts=8)
    workload = Workload(layer=layer, world_size=8, tokens_per_rank=64)
    costs = layer_costs(workload=workload, costs=costs_of(lab_profile()))
    sizes, numbers = [2.0**8, 3e5, 2.0**20, 2.0**20, 7e8, 1e5], [1, 4, 2, 9, 1, 64]
    times = costs.collectives("all_to_all", np.array(sizes), np.array(numbers, float)).seconds
    assert times.tolist() == pytest.approx([
        costs.collective("all_to_all", size, in_flight=number).seconds.item()
        for size, number in zip(sizes, numbers, strict=True)
    ])  # fmt: skip
    none = costs.collectives("all_to_all", np.array([]), np.array([]))
    assert none.seconds.tolist() == []


def test_a_group_of_a_single_rank_talks_to_nobody() -> None:
    estimate = costs_of(PUBLISHED).seconds(CollectiveKey("all_reduce", 1), 1e9)
    assert (estimate.seconds, estimate.trust) == (0.0, "measured")


def test_missing_group_size_names_what_is_there_and_how_to_measure_it() -> None:
    profile = measured([comm(size, size * 1e-9, ranks=ranks) for size in SIZES for ranks in (2, 4)])
    with pytest.raises(ProfileError) as seen:
        costs_of(profile).seconds(CollectiveKey("all_to_all", 16), 1e6)
    assert str(seen.value) == (
        'no all_to_all measured for 16 ranks (profile "lab" has 2, 4)\n'
        "  measure it on the cluster:  torchrun --nnodes 2 --nproc-per-node 8"
        " --rdzv-backend c10d --rdzv-endpoint NODE0:29500 -m moetune profile --name lab --resume\n"
        "  or accept an estimate with --allow-modelled"
    )
    assert seen.value.exit_code == 5


def test_a_groups_place_decides_its_times() -> None:
    costs = costs_of(
        measured(
            [
                *(comm(size, 1e-9 * size) for size in SIZES),
                *(comm(size, 1e-7 * size, nodes=2) for size in SIZES),
                *(comm(size, 2e-7 * size, ranks=16) for size in SIZES),
            ]
        )
    )

    def seconds(group_size: int, num_nodes: int) -> float:
        estimate = costs.seconds(CollectiveKey("all_to_all", group_size, num_nodes), 2**14)
        assert estimate.trust == "measured"
        return estimate.seconds

    assert seconds(2, 0) == seconds(2, 1) == 1e-9 * 2**14
    assert seconds(2, 2) == 1e-7 * 2**14
    assert seconds(16, 0) == seconds(16, 2) == 2e-7 * 2**14


WIRES: tuple[tuple[CollectiveOp, int, int, int, int, float], ...] = (
    # One rank's bytes inside a node: 2·(g-1)/g of a ring's all-reduce, (g-1)/g of the others.
    ("all_reduce", 8, 0, 4, 0, (14 / 8) / (6 / 4)),
    ("all_to_all", 3, 0, 4, 0, (2 / 3) / (3 / 4)),
    ("all_gather", 8, 0, 2, 0, 7 / 1),
    ("reduce_scatter", 2, 0, 8, 0, (1 / 2) / (7 / 8)),
    # One node's bytes between nodes of 8: a ring leaves it once a group, an all-to-all per rank.
    ("all_reduce", 4, 2, 2, 2, (4 * 6 / 4) / (8 * 2 / 2)),
    ("all_reduce", 4, 4, 2, 2, (8 * 6 / 4) / (8 * 2 / 2)),
    ("all_reduce", 32, 0, 16, 0, (62 / 32) / (30 / 16)),
    ("all_to_all", 4, 4, 2, 2, (8 * 3 / 4) / (8 * 1 / 2)),
    ("all_to_all", 32, 0, 16, 0, (8 * 24 / 32) / (8 * 8 / 16)),
    ("send", 4, 4, 2, 2, 1.0),
    # Nothing is known of that wire.
    ("all_reduce", 2, 2, 8, 0, 1.0),
    ("all_to_all", 64, 0, 8, 0, 1.0),
)


@pytest.mark.parametrize(("op", "ranks", "nodes", "known", "known_nodes", "factor"), WIRES)
def test_another_group_is_estimated_by_the_bytes_on_its_slowest_wire(
    op: CollectiveOp, ranks: int, nodes: int, known: int, known_nodes: int, factor: float
) -> None:
    profile = measured(
        [comm(size, 1e-9 * size, ranks=known, nodes=known_nodes, op=op) for size in SIZES]
    )
    costs = costs_of(profile, allow_modelled=True)
    estimate = costs.seconds(CollectiveKey(op, ranks, nodes), 2**16)
    assert estimate.seconds == pytest.approx(2**16 * 1e-9 * factor)
    assert estimate.trust == "modelled"


@pytest.mark.parametrize(
    ("wanted", "place"), [((3, 0), 1), ((5, 0), 1), ((6, 0), 2), ((64, 0), 3), ((2, 2), 4)]
)
def test_the_nearest_group_on_the_same_wire_stands_in(wanted: tuple[int, int], place: int) -> None:
    known = ((2, 0), (4, 0), (8, 0), (16, 0), (16, 4))
    profile = measured(
        [
            comm(size, 1e-9 * size * 100**at, ranks=ranks, nodes=nodes, op="send")
            for at, (ranks, nodes) in enumerate(known)
            for size in SIZES
        ]
    )
    estimate = costs_of(profile, allow_modelled=True).seconds(
        CollectiveKey("send", wanted[0], wanted[1]), 2**14
    )
    # Times are a hundredfold from one to the next, far more than the wires' shares differ.
    assert round(math.log(estimate.seconds / (1e-9 * 2**14), 100)) == place


def test_a_missing_narrow_format_names_a_profile_that_has_some() -> None:
    with pytest.raises(ProfileError, match="no GEMM measured in mxfp8") as seen:
        costs_of(measured([gemm(64, 1e-3)])).seconds(GemmKey("mxfp8", "forward", 1, 8, 8), 8)
    assert "narrow formats are not measured here" in seen.value.hint


def test_missing_copy_names_those_there() -> None:
    with pytest.raises(ProfileError) as seen:
        costs_of(PUBLISHED).seconds(CopyKey("d2h", pinned=False), 10)
    assert seen.value.what == 'no pageable d2h copy measured (profile "paper" has pinned h2d)'
    assert seen.value.hint == "measure it:  moetune profile --name NAME"


def gemm_seconds(rows: float, shape: tuple[int, int, int]) -> float:
    num_experts, d_in, d_out = shape
    return 1e-5 + num_experts * rows * d_in * d_out / (5e10 * rows / (rows + 30))


SHAPES = ((1, 512, 2048), (1, 2048, 512), (4, 512, 2048), (4, 2048, 512))


def expert_products() -> list[Sample]:
    return [
        gemm(rows, gemm_seconds(rows, shape), shape=shape)
        for shape in SHAPES
        for rows in (8, 32, 128, 512, 2048)
    ]


@pytest.mark.parametrize(("shape", "rows", "trust"), [
    ((4, 512, 2048), 128, "measured"), ((4, 512, 2048), 200.25, "interpolated"),
    ((4, 512, 2048), 4, "extrapolated"), ((2, 1024, 1024), 128, "interpolated"),
    ((2, 1024, 1024), 99.5, "interpolated"), ((2, 1024, 1024), 5000, "extrapolated"),
    ((16, 512, 2048), 128, "extrapolated"),
])  # fmt: skip
def test_product_labels_and_times(shape: tuple[int, int, int], rows: float, trust: str) -> None:
    num_experts, d_in, d_out = shape
    costs = costs_of(measured(expert_products()))
    estimate = costs.seconds(GemmKey("float32", "forward", num_experts, d_in, d_out), rows)
    assert estimate.trust == trust
    assert estimate.seconds == pytest.approx(gemm_seconds(rows, shape), rel=0.12)


def test_a_form_that_was_not_measured_takes_the_forward_time_as_modelled() -> None:
    costs = costs_of(measured(expert_products()))

    def ask(product: GemmForm, rows: float, d_in: int) -> tuple[float, str]:
        estimate = costs.seconds(GemmKey("float32", product, 1, d_in, 2048), rows)
        return estimate.seconds, estimate.trust

    for rows, d_in in ((128, 512), (77.7, 512), (128, 700)):
        assert ask("grad_weight", rows, d_in) == (ask("forward", rows, d_in)[0], "modelled")


def test_each_form_of_the_product_has_its_times() -> None:
    samples = expert_products() + [
        gemm(rows, 2 * gemm_seconds(rows, SHAPES[0]), product="grad_weight")
        for rows in (8, 32, 128, 512, 2048)
    ]
    costs = costs_of(measured(samples))
    estimate = costs.seconds(GemmKey("float32", "grad_weight", 1, 512, 2048), 128)
    assert estimate.seconds == 2 * gemm_seconds(128, SHAPES[0])
    assert estimate.trust == "measured"


def attend(
    sequences: int, seconds: float, *, length: int = 128, num_heads: int = 4, head_dim: int = 64
) -> Sample:
    point = AttentionPoint(dtype="float32", num_sequences=sequences, length=length,
                           num_heads=num_heads, head_dim=head_dim)  # fmt: skip
    return Sample(point=point, seconds=(seconds,))


def attention_of(
    costs: Costs,
    sequences: float,
    *,
    length: int = 128,
    num_heads: int = 4,
    head_dim: int = 64,
    backward: bool = False,
) -> Estimate[float] | None:
    return seconds_if_known(
        costs, AttentionKey("float32", length, num_heads, head_dim, backward=backward), sequences
    )


def test_attention_is_interpolated_over_sequences() -> None:
    costs = costs_of(measured([attend(count, 1e-4 * count) for count in (1, 4, 16)]))
    for sequences, trust in ((4, "measured"), (2.5, "interpolated"), (32, "extrapolated")):
        estimate = attention_of(costs, sequences)
        assert estimate is not None
        assert estimate.seconds == pytest.approx(1e-4 * sequences)
        assert estimate.trust == trust


@pytest.mark.parametrize(
    ("length", "num_heads", "head_dim", "work"),
    [(128, 2, 64, 1 / 2), (128, 8, 32, 1.0), (256, 4, 64, 4.0), (512, 1, 64, 4.0)],
)
def test_attention_of_another_shape_takes_as_long_as_as_much_work(
    length: int, num_heads: int, head_dim: int, work: float
) -> None:
    costs = costs_of(measured([attend(count, 1e-4 * count) for count in (1, 4, 16)]))
    estimate = attention_of(costs, 4, length=length, num_heads=num_heads, head_dim=head_dim)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(4e-4 * work)
    assert estimate.trust == "extrapolated"


def copied(direction: Direction, *, pinned: bool, seconds: float = 1e-3) -> Sample:
    point = CopyPoint(direction=direction, pinned=pinned, num_bytes=2**20)
    return Sample(point=point, seconds=(seconds,))


def test_activations_are_offloaded_by_an_engine_a_pageable_copy_or_in_place_on_a_cpu() -> None:
    ways: tuple[Direction, Direction] = ("h2d", "d2h")
    pinned = [copied(way, pinned=True) for way in ways]
    pageable = [copied(way, pinned=False) for way in ways]
    cpu = replace(MACHINE, kind="cpu")
    assert costs_of(measured([*pinned, *pageable])).copy_mode == "pinned"
    assert costs_of(measured([pinned[0], *pageable])).copy_mode == "pageable"
    assert costs_of(measured([pinned[0], pageable[1]])).copy_mode is None
    assert costs_of(measured(pageable, cpu)).copy_mode == "inline"
    assert costs_of(measured(pinned, cpu)).copy_mode == "inline"
    assert costs_of(measured(pageable[:1], cpu)).copy_mode is None


def test_pinned_and_pageable_memory_are_the_same_on_a_cpu_alone() -> None:
    samples = [copied("h2d", pinned=False, seconds=2e-3)]
    costs = costs_of(measured(samples, replace(MACHINE, kind="cpu")))
    assert costs.seconds(CopyKey("h2d", pinned=True), 2**20).seconds == pytest.approx(2e-3)
    with pytest.raises(ProfileError, match=r"no pinned h2d copy measured .*pageable h2d"):
        costs_of(measured(samples)).seconds(CopyKey("h2d", pinned=True), 2**20)


def test_a_missing_spread_names_where_as_many_ranks_were_measured() -> None:
    samples = [comm(size, 1e-3, ranks=4) for size in SIZES]
    samples += [comm(size, 1e-3, ranks=8, nodes=2) for size in SIZES]
    costs = costs_of(measured(samples))
    with pytest.raises(ProfileError, match=r"4 ranks on 2 nodes .*has 4\)"):
        costs.seconds(CollectiveKey("all_to_all", 4, 2), 1)
    with pytest.raises(ProfileError, match=r"for 8 ranks .*has 8 on 2 nodes\)"):
        costs.seconds(CollectiveKey("all_to_all", 8), 1)


def test_an_operation_that_was_not_measured_is_named() -> None:
    costs = costs_of(measured([attend(1, 1e-4)]))
    with pytest.raises(ProfileError, match=r"no .* measured"):
        costs.seconds(CopyKey("d2h", pinned=True), 1e6)


def test_an_operation_that_nothing_stands_in_for_is_named() -> None:
    costs = costs_of(load_profile_file(bundled_profiles()["rtx2080ti-x64"]), allow_modelled=False)
    with pytest.raises(ProfileError, match="no gelu in float16 measured"):
        costs.seconds(RowsKey("gelu", "float16"), 1024.0)
