"""Sentences on operations that a profile lacks."""

from moetune.domain.costs import Doubt
from moetune.report.model_warnings import stand_in_words


def test_each_stand_in_is_named_with_the_operations_that_it_stands_in_for() -> None:
    def lacking(operation: str, stand_in: str) -> Doubt:
        return Doubt(
            operation=operation, size=1.0, low=None, high=None, unit="B", stand_in=stand_in
        )

    gemm = "forward GEMM of 1 × 8 × 8 in bfloat16"
    doubts = [lacking("all_gather of 8 ranks", "a rule"), lacking(gemm, "another shape")]
    [collectives, gemms] = stand_in_words(doubts)
    assert collectives == "not in the profile: all_gather of 8 ranks; a rule stands in"
    assert gemms.startswith(f"not in the profile: 1 shape of GEMMs of this layout, such as {gemm}")
    assert [*stand_in_words(doubts[1:])] == [gemms]
