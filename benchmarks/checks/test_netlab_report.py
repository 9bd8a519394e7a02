"""The figures and verdicts of the netlab report, from times whose answers are known."""

from collections.abc import Mapping

import pytest

from benchmarks.netlab.experiment import CellResult
from benchmarks.netlab.report import Summary, cell_table, check_targets, degree_table
from moetune.app.plan import make_plan
from moetune.domain.cluster import Machine
from moetune.domain.plan import Plan
from moetune.domain.profile import CollectiveLine, GemmLine, Profile
from moetune.domain.question import Question

_GOOD = {
    "ours:1": 200.0, "ours:4": 100.0, "planned": 102.0, "bare": 190.0, "ffn": 192.0,
    "bare_collectives": 90.0, "bare_gemms": 100.0, "deepspeed": 240.0,
}  # fmt: skip


def test_figures_are_ratios_of_medians() -> None:
    row = Summary(cell=_cell(_GOOD, predicted={1: 0.190, 4: 0.108}))
    assert row.error(1) == pytest.approx(-0.05)
    assert row.error(4) == pytest.approx(0.08)
    assert row.best_degree == 4
    assert row.regret == pytest.approx(0.02)
    assert row.speed_up == pytest.approx(200 / 102)
    assert row.overhead == pytest.approx(10 / 190)
    assert row.overhead_over_ffn == pytest.approx(8 / 192)
    assert row.peer_ratio == pytest.approx(240 / 102)
    assert row.peer_share == pytest.approx(90 / 240)


def test_one_slow_round_does_not_move_a_figure() -> None:
    cell = _cell(_GOOD, predicted={1: 0.2, 4: 0.1})
    slow = {**cell.seconds, "ours:4": (0.1, 9.0, 0.1)}
    spoiled = CellResult(
        rate_mbit=200, tokens=64, imbalance=1, plan=cell.plan,
        predicted_seconds=cell.predicted_seconds, seconds=slow,
    )  # fmt: skip
    assert Summary(cell=spoiled).degree(4) == 0.1


def test_every_target_is_met_by_a_good_cell() -> None:
    targets = check_targets([Summary(cell=_cell(_GOOD, predicted={1: 0.194, 4: 0.103}))])
    assert len(targets) == 11
    assert [target.promise for target in targets if not target.is_met] == []


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        ({"planned": 106.0}, "within 3% of the best"),
        ({"ours:1": 170.0, "bare": 170.0, "ffn": 170.0}, "1.7 × as fast"),
        ({"planned": 205.0}, "nowhere slower than degree 1"),
        ({"deepspeed": 152.0}, "third or more"),
        ({"deepspeed": 101.0}, "nowhere faster"),
        ({"bare": 180.0}, "bare products"),
        ({"ffn": 185.0}, "torch's FFNs"),
    ],
)
def test_a_broken_promise_is_named(change: Mapping[str, float], promise: str) -> None:
    cell = _cell({**_GOOD, **change}, predicted={1: 0.2, 4: 0.1})
    missed = [target.promise for target in check_targets([Summary(cell=cell)]) if not target.is_met]
    assert any(promise in text for text in missed)


def test_the_median_error_counts_every_cell_and_degree() -> None:
    bad = Summary(cell=_cell(_GOOD, predicted={1: 0.25, 4: 0.15}))
    good = Summary(cell=_cell(_GOOD, predicted={1: 0.2, 4: 0.1}))
    assert not check_targets([bad])[0].is_met
    assert check_targets([good, good, bad])[0].is_met
    assert not check_targets([good, bad, bad])[0].is_met


def test_deepspeed_may_be_near_where_communication_is_little() -> None:
    times = {**_GOOD, "deepspeed": 110.0, "bare_collectives": 10.0}
    targets = check_targets([Summary(cell=_cell(times, predicted={1: 0.2, 4: 0.1}))])
    assert not any("third or more" in target.promise for target in targets)
    assert all(target.is_met for target in targets)


def test_loopback_is_met_only_by_degree_one() -> None:
    for degree, is_met in ((1, True), (2, False)):
        cell = _cell(_GOOD, predicted={1: 0.2, 4: 0.1}, rate_mbit=None, degree=degree)
        targets = [t for t in check_targets([Summary(cell=cell)]) if "loopback" in t.promise]
        assert [
            (target.is_met, cell.plan.decision.why in target.measured) for target in targets
        ] == [(is_met, True)]


def test_tables_have_a_row_per_cell_and_degree_also_without_deepspeed() -> None:
    times = {name: value for name, value in _GOOD.items() if name != "deepspeed"}
    cells = [
        Summary(cell=_cell(times, predicted={1: 0.2, 4: 0.1}, rate_mbit=rate))
        for rate in (200.0, None)
    ]
    for table, num_rows in ((cell_table(cells), 2), (degree_table(cells), 4)):
        lines = table.splitlines()
        assert len(lines) == 2 + num_rows
        assert len({line.count("|") for line in lines}) == 1
    assert "| 200 Mbit/s | 64 | 4 | 100.0 | 100.0 | +0.0% |" in degree_table(cells)
    assert not any("DeepSpeed" in target.promise for target in check_targets(cells))


def _cell(
    milliseconds: Mapping[str, float],
    *,
    predicted: Mapping[int, float],
    rate_mbit: float | None = 200.0,
    degree: int = 4,
) -> CellResult:
    plain = {"plain": milliseconds["ours:1"], "plain_collectives": milliseconds["bare_collectives"]}
    return CellResult(
        rate_mbit=rate_mbit,
        tokens=64,
        imbalance=1.0,
        plan=_plan(degree),
        predicted_seconds=predicted,
        seconds={name: (value / 1e3,) * 3 for name, value in (plain | dict(milliseconds)).items()},
    )


def _plan(degree: int) -> Plan:
    machine = Machine(
        kind="cpu", device="any", num_devices=2, devices_per_node=2, memory_bytes=2**33
    )
    profile = Profile(
        name="any",
        provenance="modelled",
        machine=machine,
        gemm=(GemmLine(dtype="float32", alpha_seconds=1e-5, beta_seconds_per_mac=1e-11),),
        collective=(
            CollectiveLine(
                op="all_to_all", group_size=2, alpha_seconds=1e-4, beta_seconds_per_byte=1e-8
            ),
        ),
    )
    request = Question(d_model=8, d_hidden=16, num_experts=4, tokens=64, forward_degree=degree)
    return make_plan(request, profile=profile)
