"""The machines people train on say what was published, and scale by their stated rules."""

from dataclasses import replace

import pytest

from moetune.domain.cost_keys import CollectiveKey, GemmKey
from moetune.domain.reference import CollectiveTable, GemmTable
from moetune.domain.samples import CollectiveOp
from moetune.fit.costs import costs_of
from moetune.fit.speeds import Speeds, scale_profile
from tests.fit.measured import read

MIB = 2**20
KEPT = 0.031
"""Points that are left out lie within 3 % of the curve; and figures are rounded."""


def seconds(name: str, op: CollectiveOp, ranks: int, num_bytes: float, *, nodes: int = 0) -> float:
    costs = costs_of(read(name))
    return costs.seconds(CollectiveKey(op, ranks, nodes), num_bytes).seconds


def gemm(name: str, rows: int, d_out: int, d_in: int, dtype: str = "bfloat16") -> float:
    return costs_of(read(name)).seconds(GemmKey(dtype, "forward", 1, d_in, d_out), rows).seconds


@pytest.mark.parametrize(("shape", "teraflops"), [
    # m, n, k and TFLOP/s of A100, H100, H200, B200, GB200, as others have published them.
    ((1024, 4096, 4096), (168, 758, 751, 1390, 1512)),
    ((4096, 4096, 4096), (267, 789, 783, 1224, 1505)),
    ((8192, 4096, 1536), (248, 752, 744, 1559, 1719)),
    ((8192, 2048, 7168), (274, 807, 813, 1253, 1339)),
])  # fmt: skip
def test_gemms_as_published(shape: tuple[int, int, int], teraflops: tuple[float, ...]) -> None:
    assert rates(shape) == pytest.approx(teraflops, rel=KEPT + 0.005)


@pytest.mark.parametrize(("shape", "teraflops"), [
    # Of this one fewer rows are known, up to 1,024: the others' rates continue it.
    ((8192, 7168, 2048), (265, 770, 716, 1560, 1760)),
    # Published are 11.4 µs for 16 rows and 9.6 µs for 128 (B200): times here never fall.
    ((128, 4096, 4096), (115, 267, 293, 447, 489)),
])  # fmt: skip
def test_a_gemm_that_is_not_in_the_tables_is_within_a_ninth_of_what_was_published(
    shape: tuple[int, int, int], teraflops: tuple[float, ...]
) -> None:
    assert rates(shape) == pytest.approx(teraflops, rel=0.11)


def rates(shape: tuple[int, int, int]) -> list[float]:
    """TFLOP/s of A100, H100, H200, B200 and GB200."""
    m, n, k = shape
    names = ("a100-x8", "h100-x8", "h200-x8", "b200-x8", "gb200-nvl72")
    return [2 * m * n * k / gemm(name, m, n, k) / 1e12 for name in names]


@pytest.mark.parametrize(("name", "ranks", "exchange", "reduction"), [
    # µs at 1 MiB, bus bandwidth in GB/s at 64 and at 512 MiB.
    ("a100-x8", 8, (25.8, 169, 203), (38.9, 197, 222)),
    ("h100-x8", 8, (15.6, 265, 315), (25.4, 362, 445)),
    ("h200-x8", 8, (16.2, 268, 311), (26.1, 367, 461)),
    ("b200-x8", 8, (18.8, 423, 563), (30.1, 422, 704)),
    ("b300-x8", 8, (19.0, 449, 580), (28.5, 431, 704)),
    ("gb200-nvl72", 4, (17.9, 403, 488), (19.7, 552, 628)),
    ("gb300-nvl72", 4, (17.1, 418, 512), (19.1, 561, 635)),
])  # fmt: skip
def test_collectives_in_a_node_take_what_was_published(
    name: str, ranks: int, exchange: tuple[float, ...], reduction: tuple[float, ...]
) -> None:
    ops: tuple[CollectiveOp, CollectiveOp] = ("all_to_all", "all_reduce")
    for op, published, passes in zip(ops, (exchange, reduction), (1, 2), strict=True):
        share = passes * (ranks - 1) / ranks
        figures = [
            seconds(name, op, ranks, MIB) * 1e6,
            *(
                size * share / seconds(name, op, ranks, size) / 1e9
                for size in (64 * MIB, 512 * MIB)
            ),
        ]
        assert figures == pytest.approx(published, rel=KEPT)


def test_an_all_gather_is_sized_by_one_ranks_input() -> None:
    # nccl-tests: 512 MiB arrive on each of 8 ranks in 1401.5 µs; reduce_scatter 1399.36 µs.
    assert seconds("h100-x8", "all_gather", 8, 64 * MIB) == pytest.approx(1401.5e-6, rel=KEPT)
    assert seconds("h100-x8", "reduce_scatter", 8, 512 * MIB) == pytest.approx(1399.4e-6, rel=KEPT)


@pytest.mark.parametrize(("name", "nodes", "at_64_mib", "peak"), [
    ("b300-x8-efa", 2, 104.9, 179.6), ("b300-x8-efa", 4, 94.0, 116.9),
    ("b300-x8-efa", 8, 74.0, 103.2), ("b300-x8-efa", 16, 73.8, 84.0),
    ("b300-x8-efa", 32, 54.7, 74.4), ("h100-x8-efa", 4, 45.1, 53.9),
    ("h100-x8-efa", 8, 40.4, 51.1),
])  # fmt: skip
def test_between_nodes_an_all_to_all_is_within_a_tenth_of_what_was_published(
    name: str, nodes: int, at_64_mib: float, peak: float
) -> None:
    ranks = 8 * nodes
    bandwidths = [
        size * (ranks - 1) / ranks / seconds(name, "all_to_all", ranks, size) / 1e9
        for size in (64 * MIB, 64 * 2**30)
    ]
    assert bandwidths == pytest.approx([at_64_mib, peak], rel=0.1)


def test_a_ring_between_nodes_has_the_cards_of_the_whole_node() -> None:
    # Published: 382 GB/s of bus bandwidth on four nodes of eight B200, 16 GiB.
    size = 16 * 2**30
    bandwidth = size * 2 * 31 / 32 / seconds("b200-x8", "all_reduce", 32, size) / 1e9
    assert bandwidth == pytest.approx(382, rel=0.05)
    # One rank of each of four nodes has an eighth of that, and so takes eight times as long but
    # for its share of the bytes.
    alone = seconds("b200-x8", "all_reduce", 4, size, nodes=4)
    assert alone == pytest.approx(
        8 * (3 / 4) / (31 / 32) * seconds("b200-x8", "all_reduce", 32, size), rel=0.01
    )


@pytest.mark.parametrize(("ranks", "gigabytes", "published"), [
    (16, 8, 343.2), (32, 8, 333.2), (64, 8, 324.9), (128, 8, 312.2), (256, 8, 315.8),
    (512, 8, 286.3), (16, 2, 338.8), (64, 2, 319.7), (128, 2, 285.8), (512, 2, 225.3),
])  # fmt: skip
def test_gathers_over_nodes_are_as_published(ranks: int, gigabytes: int, published: float) -> None:
    # NCCL 2.29.7 on B200, eight 400 Gbit/s cards a node: GB/s of bus bandwidth.
    size = gigabytes * 1e9
    rate = size * (ranks - 1) / ranks / seconds("b200-x8", "all_gather", ranks, size / ranks) / 1e9
    assert rate == pytest.approx(published, rel=0.055)


def test_a_send_crosses_on_the_card_of_its_rank() -> None:
    # By hand: 1 GB over 50 GB/s · 0.92.
    assert seconds("h100-x8", "send", 16, 1e9) == pytest.approx(1e9 / 46e9, rel=0.001)
    inside = seconds("h100-x8", "send", 2, 256 * MIB)
    assert seconds("h100-x8", "send", 4, 256 * MIB) == inside
    assert inside == pytest.approx(seconds("h100-x8", "all_to_all", 2, 512 * MIB), rel=0.001)


def test_a_domain_of_72_is_one_node() -> None:
    size, name = 512 * MIB, "gb200-nvl72"
    of_4, of_72 = (seconds(name, "all_to_all", ranks, size) for ranks in (4, 72))
    # As many bytes leave a rank at the same rate; the start-up grows with every peer.
    assert of_72 == pytest.approx(of_4 * (71 / 72) / (3 / 4), rel=0.05)
    assert of_72 > of_4 * (71 / 72) / (3 / 4)
    assert seconds(name, "all_to_all", 144, size) > 3 * of_72
    # The rates of a ring hold too, and more doublings start later.
    sizes = [seconds(name, "all_reduce", ranks, 4096) for ranks in (4, 8, 16, 72)]
    assert sizes == sorted(sizes)
    assert sizes[-1] < 2.5 * sizes[0]


@pytest.mark.parametrize("op", ["all_to_all", "all_reduce", "reduce_scatter"])
def test_the_rule_inside_a_node_predicts_eight_ranks_from_four(op: CollectiveOp) -> None:
    profile = read("h100-x8")
    fewer = tuple(
        table
        for table in profile.tables
        if not (isinstance(table, CollectiveTable) and table.group_size == 8)
    )
    ruled = costs_of(replace(profile, tables=fewer))
    for num_bytes in (64 * 1024, 8 * MIB, 64 * MIB, 512 * MIB):
        estimate = ruled.seconds(CollectiveKey(op, 8), num_bytes)
        assert estimate.trust == "modelled"
        assert estimate.seconds == pytest.approx(seconds("h100-x8", op, 8, num_bytes), rel=0.3)


def test_an_h800_is_an_h100_with_less_nvlink() -> None:
    exchanges = [seconds(name, "all_to_all", 8, 512 * MIB) for name in ("h800-x8", "h100-x8")]
    assert exchanges[0] / exchanges[1] == pytest.approx(900 / 400, rel=0.01)
    assert gemm("h800-x8", 4096, 4096, 4096) == gemm("h100-x8", 4096, 4096, 4096)
    tables = {table.label for table in read("h800-x8").tables}
    assert tables == {"modelled"}


def test_predictions_from_tables_are_modelled_and_rules_are_named() -> None:
    costs = costs_of(read("h100-x8"))
    published = costs.seconds(CollectiveKey("all_to_all", 8), 64 * MIB)
    assert (published.trust, published.doubts) == ("modelled", ())
    ruled = costs.seconds(CollectiveKey("all_to_all", 64), 64 * MIB)
    assert ruled.trust == "modelled"
    assert [(doubt.operation, doubt.stand_in) for doubt in ruled.doubts] == [
        ("all_to_all of 64 ranks", "the modelled rule for more ranks")
    ]
    copied = costs_of(read("h800-x8")).seconds(CollectiveKey("all_to_all", 8), MIB)
    assert "× 900/400" in copied.doubts[0].stand_in


def test_whatif_speeds_scale_tables_and_the_rule() -> None:
    profile = read("h100-x8")
    fast = costs_of(scale_profile(profile, Speeds(communication=2.0, computation=4.0)))
    for ranks in (8, 64):
        time = fast.seconds(CollectiveKey("all_to_all", ranks), 64 * MIB)
        assert time.seconds == pytest.approx(seconds("h100-x8", "all_to_all", ranks, 64 * MIB) / 2)
    time = fast.seconds(GemmKey("bfloat16", "forward", 1, 4096, 4096), 4096)
    assert time.seconds == pytest.approx(gemm("h100-x8", 4096, 4096, 4096) / 4)
    assert profile.network is not None
    plain = scale_profile(replace(profile, network=None), Speeds(computation=2.0))
    assert plain.network is None


def test_a_table_of_one_shape_holds_its_rate_beyond_its_rows() -> None:
    points = tuple((rows, 512.0, 512.0, rows * 1e-8) for rows in (256.0, 1024.0, 4096.0))
    table = GemmTable(label="published", source="x", dtype="bfloat16", points=points)
    costs = costs_of(replace(read("h100-x8"), tables=(table,)))
    estimate = costs.seconds(GemmKey("bfloat16", "forward", 1, 512, 512), 8192)
    assert estimate.seconds == pytest.approx(8192e-8)
