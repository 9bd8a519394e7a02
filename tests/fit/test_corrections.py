"""Corrections of costs: what calls support one, where it holds, and what refuses it."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.corrections import LARGEST_FACTOR, Correction
from moetune.domain.costs import Costs
from moetune.domain.errors import InputError
from moetune.fit.corrected import FULL_OCTAVES, NO_OCTAVES, corrected, factor_at
from moetune.fit.corrections import (
    MIN_BATCHES,
    MIN_CALLS,
    WINDOW_CALLS,
    Evidence,
    Judged,
    judge,
)
from moetune.fit.costs import costs_of
from tests.fit.measured import measured_profile
from tests.solve.costs_by_hand import LinearCosts

SIZE = 2**21


def evidence(*batches: Sequence[float], size: int = SIZE) -> list[Evidence]:
    return [
        Evidence(op="all_to_all", group_size=4, size=size, batch=number, ratios=tuple(ratios))
        for number, ratios in enumerate(batches)
        if ratios
    ]


def noisy(factor: float, num: int, seed: int = 0) -> list[float]:
    """Return ratios with 5 % jitter, of which one in ten is a straggler."""
    rng = np.random.default_rng(seed)
    ratios = factor * np.exp(rng.normal(0, 0.05, num))
    return list(np.where(rng.random(num) < 0.1, ratios * rng.uniform(2, 5, num), ratios))


def refusal(judged: Judged) -> str:
    assert judged.corrections == ()
    (reason,) = judged.refused
    return reason


@pytest.mark.parametrize("factor", [0.3, 0.6, 1.5, 3.8])
def test_the_factor_is_the_median_whatever_stragglers_there_are(factor: float) -> None:
    for seed in range(30):
        judged = judge(evidence(noisy(factor, 15, seed), noisy(factor, 15, seed + 100)))
        (found,) = judged.corrections
        assert math.isclose(found.factor, factor, rel_tol=0.06)
        assert (found.num_calls, found.num_batches) == (30, 2)
        assert judged.refused == ()


@pytest.mark.parametrize(
    "batches",
    [[[2.0] * (MIN_CALLS - 1)], [[2.0] * 40], [[2.0, 2.0], [2.0, 2.0]]],
    ids=["too few", "one batch", "too few in two"],
)
def test_too_few_calls_or_batches_correct_nothing(batches: list[list[float]]) -> None:
    judged = judge(evidence(*batches))
    assert (judged.corrections, judged.refused) == ((), ())
    (reason,) = judged.waiting
    assert f"{MIN_CALLS} in {MIN_BATCHES}" in reason


def test_as_few_as_allowed_are_enough() -> None:
    batches = [[2.0] * (MIN_CALLS - MIN_BATCHES + 1)] + [[2.0]] * (MIN_BATCHES - 1)
    (found,) = judge(evidence(*batches)).corrections
    assert math.isclose(found.factor, 2.0)


@pytest.mark.parametrize("factor", [LARGEST_FACTOR * 1.1, 1 / LARGEST_FACTOR / 1.1, 1e6])
def test_what_is_too_far_from_the_profile_is_not_corrected(factor: float) -> None:
    assert "measure again" in refusal(judge(evidence([factor] * 5, [factor] * 5)))


def test_what_is_as_predicted_is_left_alone() -> None:
    assert judge(evidence([1.01] * 5, [0.99] * 5)) == Judged()


def test_calls_that_contradict_each_other_are_refused() -> None:
    assert "contradict" in refusal(judge(evidence([1.0, 2.0] * 5, [2.0, 1.0] * 5)))
    assert "contradict" in refusal(judge(evidence([1.5, 3.0] * 5, [3.0, 1.5] * 5)))


@pytest.mark.parametrize(("near", "far"), [(0.42, 0.29), (2.4, 3.4)])
def test_calls_that_agree_on_a_change_correct_by_the_smaller_one(near: float, far: float) -> None:
    (found,) = judge(evidence([near, far] * 5, [far, near] * 5)).corrections
    assert found.factor == pytest.approx(near)


def test_after_a_lasting_change_only_the_newest_calls_count() -> None:
    before, after = noisy(1.0, 20, 1), noisy(2.0, 20, 2)
    (found,) = judge(evidence(before, after[:10], after[10:])).corrections
    assert math.isclose(found.factor, 2.0, rel_tol=0.06)
    assert found.num_calls <= 22


def test_noise_that_reached_the_later_level_before_the_change_does_not_hide_it() -> None:
    """As in the network lab on a machine with other load: a quarter of the calls before."""
    before, after = [1.4, 1.5, 2.8, 1.45] * 6, noisy(2.9, 12, 3)
    (found,) = judge(evidence(before, after[:6], after[6:])).corrections
    assert math.isclose(found.factor, 2.9, rel_tol=0.06)
    (found,) = judge(evidence([1 / one for one in before], [1 / 2.9] * 6, [1 / 2.9])).corrections
    assert math.isclose(found.factor, 1 / 2.9, rel_tol=0.01)


def test_after_a_change_so_late_that_it_may_be_noise_nothing_is_corrected_to_it() -> None:
    judged = judge(evidence([1.0] * 20, [2.0] * (MIN_CALLS - 2)))
    assert judged.corrections == ()


def test_after_a_lasting_change_what_was_seen_at_other_sizes_is_forgotten_too() -> None:
    judged = judge([
        *evidence([2.0] * 10, [2.0] * 10),
        *(
            Evidence(op="all_to_all", group_size=4, size=8 * SIZE, batch=batch, ratios=(1.2,) * 10)
            for batch in (7, 8)
        ),
    ])  # fmt: skip
    (found,) = judged.corrections
    assert (found.size, round(found.factor, 9)) == (8 * SIZE, 1.2)


def test_calls_beyond_the_window_are_forgotten() -> None:
    (found,) = judge(evidence([3.0] * WINDOW_CALLS, [2.0] * WINDOW_CALLS, [2.0])).corrections
    assert math.isclose(found.factor, 2.0)
    assert found.num_calls == WINDOW_CALLS


def test_sizes_and_operations_are_judged_apart() -> None:
    experts = Evidence(
        op="experts_forward", group_size=0, size=SIZE, batch=0, ratios=(0.5,) * MIN_CALLS
    )
    judged = judge([
        *evidence([2.0] * 3, [2.0] * 3),
        *evidence([1.5] * 3, [1.5] * 3, size=4 * SIZE),
        *evidence([2.0], [2.0], size=SIZE + SIZE // 100),
        experts,
    ])  # fmt: skip
    factors = [(one.op, one.size >= 4 * SIZE, round(one.factor, 9)) for one in judged.corrections]
    assert factors == [("all_to_all", False, 2.0), ("all_to_all", True, 1.5)]
    assert judged.corrections[0].num_calls == 8
    assert len(judged.waiting) == 1


def correction(size: int, factor: float, **changes: object) -> Correction:
    values: dict[str, object] = {
        "op": "all_to_all", "group_size": 4, "num_calls": 9, "num_batches": 3,
    }  # fmt: skip
    return Correction(size=size, factor=factor, **(values | changes))  # type: ignore[arg-type] # of any field


@pytest.mark.parametrize("factor", [0.2, 4.1, 0.0, -1.0, math.nan])
def test_a_correction_out_of_bounds_cannot_be_made(factor: float) -> None:
    with pytest.raises(InputError, match="must be from"):
        correction(SIZE, factor)


def test_a_factor_holds_around_its_size_and_fades_to_one() -> None:
    known = [correction(SIZE, 2.0)]
    assert factor_at(known, SIZE) == 2.0
    for side in (-1, 1):
        assert math.isclose(factor_at(known, SIZE * 2 ** (side * FULL_OCTAVES)), 2.0)
        half = SIZE * 2 ** (side * (FULL_OCTAVES + NO_OCTAVES) / 2)
        assert math.isclose(factor_at(known, half), math.sqrt(2.0))
        assert factor_at(known, SIZE * 2 ** (side * NO_OCTAVES)) == 1.0
        assert factor_at(known, SIZE * 2 ** (side * (NO_OCTAVES + 3))) == 1.0
    assert factor_at([], SIZE) == 1.0
    assert factor_at(known, 0) == 1.0


def test_between_two_sizes_it_goes_evenly_from_one_factor_to_the_other() -> None:
    known = [correction(4 * SIZE, 4.0), correction(SIZE, 1.0)]
    assert factor_at(known, SIZE) == 1.0
    assert math.isclose(factor_at(known, 2 * SIZE), 2.0)
    assert math.isclose(factor_at(known, 4 * SIZE), 4.0)


@given(
    sizes=st.lists(st.integers(1, 2**40), min_size=1, max_size=5, unique=True),
    factors=st.lists(st.floats(0.25, 4.0), min_size=5, max_size=5),
    size=st.floats(1e-3, 1e15),
)
def test_a_factor_is_never_beyond_those_observed_and_changes_smoothly(
    sizes: list[int], factors: list[float], size: float
) -> None:
    known = [correction(one, factor) for one, factor in zip(sizes, factors, strict=False)]
    used = [1.0, *(one.factor for one in known)]
    found = factor_at(known, size)
    assert min(used) * (1 - 1e-9) <= found <= max(used) * (1 + 1e-9)
    if len(known) == 1:
        assert math.isclose(factor_at(known, size * 1.001), found, rel_tol=0.01)


def test_corrected_costs_change_the_operation_that_was_observed_and_nothing_else() -> None:
    base: Costs = costs_of(measured_profile())
    found = corrected(base, [
        correction(SIZE, 2.0),
        correction(2**30, 0.5, op="experts_forward", group_size=0),
        correction(2**30, 3.0, op="experts_backward", group_size=0),
    ])  # fmt: skip

    def exchange(costs: Costs, op: str, ranks: int, several: int) -> float:
        return costs.collective(
            op=op, group_size=ranks, num_bytes=SIZE, in_flight=several  # type: ignore[arg-type] # a literal
        ).seconds  # fmt: skip

    def gemm(costs: Costs, product: str) -> float:
        return costs.gemm(
            dtype="float32", product=product, num_experts=2, rows=512, d_in=512, d_out=2048,  # type: ignore[arg-type] # a literal
        ).seconds  # fmt: skip

    for several in (1, 4):
        ratio = exchange(found, "all_to_all", 4, several) / exchange(base, "all_to_all", 4, several)
        assert math.isclose(ratio, 2.0)
    assert exchange(found, "all_to_all", 2, 1) == exchange(base, "all_to_all", 2, 1)
    assert math.isclose(gemm(found, "forward") / gemm(base, "forward"), 0.5)
    for product in ("grad_input", "grad_weight"):
        assert math.isclose(gemm(found, product) / gemm(base, product), 3.0)
    rows = {"op": "gelu", "dtype": "float32", "rows": 64, "width": 512}
    assert found.rows_op(**rows) == base.rows_op(**rows)  # type: ignore[arg-type] # its arguments
    copy = {"direction": "h2d", "pinned": True, "num_bytes": SIZE}
    assert found.copy(**copy) == base.copy(**copy)  # type: ignore[arg-type] # its arguments
    assert (found.interference, found.copy_mode) == (base.interference, base.copy_mode)
    assert found.overlap_speeds(exchange_bytes=SIZE, exchange_seconds=1e-3) == base.overlap_speeds(
        exchange_bytes=SIZE, exchange_seconds=1e-3
    )
    burst = {"op": "all_to_all", "group_size": 4}
    assert found.burst(**burst) == base.burst(**burst)  # type: ignore[arg-type] # its arguments
    attention = {
        "dtype": "float32", "num_sequences": 1, "length": 64, "num_heads": 2, "head_dim": 16,
        "backward": False,
    }  # fmt: skip
    assert found.attention(**attention) == base.attention(**attention)  # type: ignore[arg-type] # its arguments


def test_a_corrected_operation_has_no_line_and_the_others_keep_theirs() -> None:
    base = LinearCosts()
    transfers = corrected(base, [correction(SIZE, 2.0)])
    assert transfers.collective_line(op="all_to_all", group_size=4) is None
    assert transfers.collective_line(op="all_to_all", group_size=8) == base.transfer_cost
    assert transfers.gemm_line(dtype="float32") == base.gemm_cost
    experts = corrected(base, [correction(SIZE, 2.0, op="experts_forward", group_size=0)])
    assert experts.gemm_line(dtype="float32") is None
    assert experts.collective_line(op="all_to_all", group_size=4) == base.transfer_cost
    assert corrected(base, []) is base
