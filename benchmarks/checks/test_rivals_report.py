"""The figures and verdicts of the rivals' report, from times whose answers are known."""

from dataclasses import replace

import pytest

from benchmarks.rivals.case import case_of
from benchmarks.rivals.experiment import Alone, Cell, Result
from benchmarks.rivals.predicted import Planned
from benchmarks.rivals.report import best_rival, largest_difference, report, sent_share

_LOSSES = (6.0, 5.5)


def test_the_best_rival_and_its_share_are_of_medians() -> None:
    result = _result({"deepspeed": 2.0, "ddp": 3.0}, alone=1.2)
    cell = result.cells[0]
    assert best_rival(cell) == "deepspeed"
    assert sent_share(result, cell, "deepspeed") == pytest.approx(0.4)


def test_one_slow_round_does_not_move_a_figure() -> None:
    result = _result({"deepspeed": 2.0}, alone=1.2)
    cell = result.cells[0]
    slow = replace(cell, seconds={**cell.seconds, "1/1": (1.0, 9.0, 1.0)})
    assert "2.00 times" in report(replace(result, cells=(slow,)), machine="machine")


def test_the_target_depends_on_the_share_of_the_link() -> None:
    mostly_sent = report(_result({"deepspeed": 1.2}, alone=0.6), machine="machine")
    mostly_computed = report(_result({"deepspeed": 1.2}, alone=1.1), machine="machine")
    assert "1.20 times" in mostly_sent
    assert "**missed**" in mostly_sent
    assert "Target (no slower): met" in mostly_computed
    assert "**missed**" in report(_result({"deepspeed": 0.9}, alone=0.9), machine="machine")


def test_a_row_has_prediction_measurement_and_error() -> None:
    text = report(_result({"deepspeed": 2.0}, alone=1.2), machine="machine")
    assert (
        "| moetune, one chunk: **the plan** | 900 ms | 1000 ms | "
        "1000 to 1000 | -10.0 % | 0 % | 1.00 | 512 MiB | 5.50000 |"
    ) in text
    assert "| DeepSpeed's engine and MoE layer |  | 2000 ms |" in text


def test_a_rival_that_cannot_train_has_its_error_in_the_row() -> None:
    result = _result({"deepspeed": 2.0}, alone=1.2)
    failed = Alone(variant="tutel", error="RuntimeError: no such kernel")
    text = report(replace(result, alone=(failed, *result.alone)), machine="machine")
    assert "could not train: RuntimeError: no such kernel" in text


def test_losses_that_differ_are_told() -> None:
    result = _result({"deepspeed": 2.0}, alone=1.2)
    assert largest_difference(result) == 0
    assert "compute the same" in report(result, machine="machine")
    other = replace(result.alone[0], losses=(6.0, 5.6))
    result = replace(result, alone=(other, *result.alone[1:]))
    assert largest_difference(result) == pytest.approx(0.1 / 5.5)
    assert "**do not compute the same**" in report(result, machine="machine")


def _result(rivals: dict[str, float], *, alone: float) -> Result:
    """Return a result in which ours takes a second, and rivals `alone` on loopback."""
    ways = (
        Planned(variant="1/1", predicted_seconds=0.9, is_plan=True),
        Planned(variant="4/2", predicted_seconds=1.2, is_plan=False),
    )
    seconds = {"1/1": 1.0, "4/2": 1.3, **rivals}
    return Result(
        case=case_of(num_layers=2, d_hidden=128, length=64, sequences=4),
        imbalance=1.1,
        alone=tuple(
            Alone(variant=name, seconds=(alone if name in rivals else 1.0,), losses=_LOSSES,
                  peak_bytes=2**29)
            for name in seconds
        ),
        cells=(
            Cell(
                rate_mbit=500, ways=ways,
                seconds={name: (each,) * 3 for name, each in seconds.items()},
            ),
        ),
    )  # fmt: skip
