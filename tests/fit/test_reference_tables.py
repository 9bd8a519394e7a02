"""Reference profiles are made of csv files by stated rules, with few points and small errors."""

import csv
from pathlib import Path

import pytest

from benchmarks.reference_profiles.__main__ import profile_of
from benchmarks.reference_profiles.facts import BETWEEN_NODES, MACHINES
from benchmarks.reference_profiles.network import fitted, network_of
from benchmarks.reference_profiles.thinning import thinned
from moetune.domain.profile import profile_from_document
from moetune.domain.reference import CollectiveTable, DispatcherTable, GemmTable
from moetune.fit.costs import costs_of
from moetune.workflows.files import profile_to_toml
from moetune.workflows.profile_toml import parse_toml
from tests import prices

FACTS = {fact.name: fact for fact in MACHINES}


def test_points_that_a_curve_predicts_are_left_out() -> None:
    straight = {float(2**at): 1e-6 * 2**at for at in range(12)}
    assert list(thinned(straight)) == [1.0, 2048.0]
    bent = {size: 1e-4 + seconds for size, seconds in straight.items()}
    assert list(thinned(bent)) == [1.0, 2048.0]
    with_a_burst = {size: max(3e-5, seconds) for size, seconds in straight.items()}
    assert 2 < len(thinned(with_a_burst)) < 12
    steps = {float(2**at): 1e-6 * 4 ** (at // 2) for at in range(12)}
    assert len(thinned(steps)) == 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shapes of GEMM, four collectives of two and four ranks, and DeepEP, on an H100."""
    rows: dict[str, list[dict[str, object]]] = {
        "gemm_bf16.csv": [
            {"device": "H100-80GB-HBM3", "m": m, "n": n, "k": 512, "us": 10 + m * n / 1e4}
            for n in (512, 1024) for m in (16, 256, 4096)
        ],
        "collectives.csv": [
            {"system": "h100_sxm", "nccl_or_stack": "2.29.2", "op": op, "gpus": gpus,
             "bytes": size, "median_us": 10 + size / 1e5}
            for op in ("alltoall", "all_reduce", "all_gather", "reduce_scatter")
            for gpus in (2, 4) for size in (4096, 2**20, 2**26)
        ],
        "deepep_h100_ep8.csv": [
            {"hidden_size": 7168, "num_topk": 8, "num_experts": 256, "num_token": tokens,
             "dispatch_sms": 20, "dispatch_transmit_us": 20 + tokens / 10, "combine_sms": 20,
             "combine_transmit_us": 30 + tokens / 5}
            for tokens in (16, 1024, 8192)
        ],
    }  # fmt: skip
    for name, table in rows.items():
        with (tmp_path / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(table[0]))
            writer.writeheader()
            writer.writerows(table)
    return tmp_path


def test_a_profile_is_made_of_the_files_and_read_again(folder: Path) -> None:
    profile, report = profile_of(folder, FACTS["h100-x8"], (0.9, 0.01, 1e-4, 0.0))
    text = profile_to_toml(profile)
    assert profile_from_document(parse_toml(text, "h100")) == profile
    assert max(one.worst for one in report if "left out" not in one.operation) <= 0.03
    tables = profile.tables
    assert {one.label for one in tables if isinstance(one, DispatcherTable)} == {"published"}
    gathers = [one for one in tables if isinstance(one, CollectiveTable) and one.op == "all_gather"]
    # Of 4 KiB that arrive, each of four ranks has given 1 KiB.
    assert [one.points[0] for one in gathers] == [(2048, 1.004e-05), (1024, 1.004e-05)]
    sends = next(one for one in tables if isinstance(one, CollectiveTable) and one.op == "send")
    assert sends.label == "modelled"
    assert sends.points[-1] == pytest.approx((2**25, 681.1e-6))
    costs = costs_of(profile)
    found = prices.collective(costs, op="all_to_all", group_size=16, num_bytes=2**30)
    assert found.seconds == pytest.approx(4.5e-5 + 2**29 / (50e9 * 0.9 / 1.02))
    assert profile.machine.memory_bytes == int(80 * 2**30 * 79.11 / 80) - 2 * 2**30


def test_an_h800_is_made_of_the_same_rows_by_its_rules(folder: Path) -> None:
    profile, _ = profile_of(folder, FACTS["h800-x8"], (0.9, 0.01, 1e-4, 0.0))
    exchanges = next(one for one in profile.tables if isinstance(one, CollectiveTable))
    # 10.04 µs are the smallest, and stay; the rest takes 900/400 as long.
    expected = 10.04e-6 + (10 + 2**26 / 1e5 - 10.04) * 1e-6 * 2.25
    assert exchanges.points[-1] == pytest.approx((2**26, expected), rel=1e-3)
    products = [one for one in profile.tables if isinstance(one, GemmTable)]
    assert [(one.dtype, one.label) for one in products] == [
        ("bfloat16", "modelled"),
        ("fp8_rowwise", "modelled"),
    ]


def test_the_rule_between_nodes_is_fitted_to_its_rows() -> None:
    one_row = BETWEEN_NODES[:1]
    efficiency, loss, startup, per_node = fitted(one_row)
    network = network_of(one_row[0].nic * 1e9, (efficiency, loss, startup, per_node))
    # By hand: half of 64 MiB behind the start-up, 15/16 of it counted.
    seconds = startup + 2 * per_node + 2**25 / (100e9 * efficiency / (1 + 2 * loss))
    assert 2**26 * 15 / 16 / seconds / 1e9 == pytest.approx(104.9, rel=0.03)
    assert network.most_nodes == 32
