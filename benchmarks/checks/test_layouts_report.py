"""The figures of the layouts' report, from times whose answers are known."""

import pytest

from benchmarks.layouts.experiment import Case, CaseResult, Outcome
from benchmarks.layouts.report import ratios, regret, report
from moetune.domain.layer import ExpertParallel, LayerShape
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.plan import SAFE_DECISION

CASE = Case(
    transformer=Transformer(
        moe=LayerShape(d_model=8, d_hidden=16, num_experts=4), num_layers=2, num_heads=2,
        length=4, vocab_size=16,
    ),
    sequences_per_rank=2,
)  # fmt: skip


def outcome(
    kind: ExpertParallel, predicted: float, *seconds: float, dp: int = 1, ep: int = 1, tp: int = 1
) -> Outcome:
    return Outcome(
        layout=Layout(expert_parallel=kind, dp=dp, ep=ep, tp=tp, pp=4 // dp // tp),
        num_micro_batches=1, decision=SAFE_DECISION, predicted_seconds=predicted,
        parts={"experts": predicted}, seconds=seconds, imbalance=1.0,
    )  # fmt: skip


RESULT = CaseResult(
    case=CASE,
    rate_mbit=200.0,
    outcomes=(
        outcome("tensor", 1.0, 1.1, 9.0, 1.0, tp=2),
        outcome("all_to_all", 1.2, 1.0, 1.0, 1.0, dp=2),
        outcome("all_to_all", 3.0, 2.2, 2.2, 2.2, dp=4, ep=4),
    ),
)


def test_regret_is_of_medians_against_the_best_measured_layout() -> None:
    assert regret(RESULT) == pytest.approx(0.1)


def test_ratios_are_of_tensor_inside_nodes_against_exchanges_across_them() -> None:
    assert ratios(RESULT) == pytest.approx((3.0, 2.0))


def test_the_report_marks_what_was_missed() -> None:
    text = report([RESULT])
    assert "| tp 2 pp 2 | 10.0 % (missed) | 3.00 | 2.00 | +50 % (missed) |" in text
    assert "| dp 4 ep 4 | all_to_all | 1 | 1/1 | 3000 ms | 2200 ms | +36 % | 1.00 |" in text
