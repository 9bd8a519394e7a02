"""Blocks in turns: their timeline against whole models', and what measured ones change in plans."""

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.constraints import Bounds, LayoutPins
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.samples import TurnsPoint
from moetune.domain.turns import TurnsRecord
from moetune.solve.layer.all_to_all import AllToAllCosts
from moetune.solve.layout.candidates import Candidate
from moetune.solve.layout.choose import LayoutProblem, search_layouts
from moetune.solve.layout.search import LayoutSearch
from moetune.solve.layout.uncertainty import judge_layout
from moetune.solve.model.in_turns import turns_error, turns_factor, turns_seconds
from moetune.solve.model.prices import Prices
from moetune.solve.model.replicas import ReplicaStep
from tests.solve.test_layout_plan import question

MODEL = Transformer(
    moe=LayerShape(d_model=256, d_hidden=512, num_experts=16, top_k=2), num_layers=4, num_heads=4,
    length=128, vocab_size=1, moe_every=1,
)  # fmt: skip
WORLD, DTYPE = 16, "float16"
DIFFERENT = {1: -0.1, 2: 0.0, 4: 0.1}
"""Numbers of chunks, and how their factors' logarithms differ."""
EXCHANGING = Layout(expert_parallel="all_to_all", dp=WORLD, ep=WORLD, tp=1, pp=1)


def point_of(degree: int = 1) -> TurnsPoint:
    return TurnsPoint(model=MODEL, world_size=WORLD, sequences=2, dtype=DTYPE, degree=degree)


def record(degree: int, factor: float, error: float = 0.0) -> TurnsRecord:
    return TurnsRecord(
        point=point_of(degree), predicted_seconds=0.5, measured_seconds=0.5 * factor,
        standard_error=error,
    )  # fmt: skip


def problem(turns: tuple[TurnsRecord, ...] = (), degree: int | None = None) -> LayoutProblem:
    pins = LayoutPins(dp=WORLD, ep=WORLD, tp=1, pp=1, zero=False)
    model = replace(MODEL, num_layers=12, vocab_size=500)
    asked = question(model=model, world_size=WORLD, tokens=4 * MODEL.length, pins=pins)
    bounds = Bounds(forward_degree=degree, backward_degree=degree)
    return replace(asked, turns=turns, bounds=bounds, runs_ahead=False)


@settings(deadline=None)
@given(st.floats(0.5, 2), st.floats(0.5, 2), st.integers(1, 64), st.integers(1, 64))
def test_a_factor_is_the_measured_one_and_between_two_that_are_known(
    first: float, last: float, forward: int, backward: int
) -> None:
    known = record(1, first), record(4, last)
    model = replace(MODEL, num_layers=32, vocab_size=77)
    found = turns_factor(known, model=model, dtype=DTYPE, degrees=(forward, backward))
    at = math.sqrt(forward * backward)
    share = min(math.log(at) / math.log(4), 1.0)
    assert found == pytest.approx(first ** (1 - share) * last**share)


@pytest.mark.parametrize(
    ("degrees", "wanted"),
    [((1, 1), 1.1), ((2, 2), 1.21), ((1, 4), 1.21), ((3, 12), 1.33), ((16, 16), 1.33)],
)
def test_a_factor_is_between_those_of_the_nearest_numbers_of_chunks(
    degrees: tuple[int, int], wanted: float
) -> None:
    known = record(4, 1.331), record(1, 1.1)
    found = turns_factor(known, model=MODEL, dtype=DTYPE, degrees=degrees)
    assert found == pytest.approx(wanted, abs=2e-3)
    assert known[0].point.group == (WORLD, 0)


@pytest.mark.parametrize(
    ("error", "kept"), [(0.0, 1.0), (0.06, 0.64), (0.08, 0.36), (0.1, 0.0), (0.3, 0.0)]
)
def test_factors_are_drawn_to_their_mean_by_the_share_of_their_spread_that_is_noise(
    error: float, kept: float
) -> None:
    # Their standard deviation is 0.1.
    known = [record(degree, math.exp(0.2 + off), error) for degree, off in DIFFERENT.items()]
    for degree, off in DIFFERENT.items():
        found = turns_factor(known, model=MODEL, dtype=DTYPE, degrees=(degree, degree))
        assert math.log(found) == pytest.approx(0.2 + kept * off)
    # Of a mean of three, or of each alone.
    left = turns_error(known, model=MODEL, dtype=DTYPE, split="sequences")
    assert left == pytest.approx(error * math.sqrt(kept + (1 - kept) / 3))


def test_a_factor_that_was_measured_alone_or_like_all_others_stays() -> None:
    for known in ([record(2, 1.3, 0.05)], [record(2, 1.3, 0.05), record(4, 1.3, 0.05)]):
        for degrees in ((1, 1), (3, 3), (8, 8)):
            found = turns_factor(known, model=MODEL, dtype=DTYPE, degrees=degrees)
            assert found == pytest.approx(1.3)


def test_the_number_of_chunks_that_looks_fastest_is_not_the_one_with_the_luckiest_runs() -> None:
    generator = random.Random(5)
    promised: list[float] = []
    undrawn: list[float] = []
    for _ in range(400):
        seen = {degree: math.exp(generator.gauss(0, 0.06)) for degree in DIFFERENT}
        for error, into in ((0.06, promised), (0.0, undrawn)):
            known = [record(degree, factor, error) for degree, factor in seen.items()]
            into.append(
                min(
                    turns_factor(known, model=MODEL, dtype=DTYPE, degrees=(one, one))
                    for one in DIFFERENT
                )
            )
    # All are as fast, so that the true factor is 1.
    assert statistics.fmean(undrawn) == pytest.approx(0.95, abs=0.01)
    assert statistics.fmean(promised) == pytest.approx(0.99, abs=0.01)


def test_other_blocks_have_no_factor() -> None:
    known = (record(1, 1.5),)
    wider = replace(MODEL, moe=replace(MODEL.moe, d_hidden=1024))
    for model, dtype in ((wider, DTYPE), (MODEL, "bfloat16")):
        assert turns_factor(known, model=model, dtype=dtype, degrees=(1, 1)) == 1.0
    assert turns_factor((), model=MODEL, dtype=DTYPE, degrees=(1, 1)) == 1.0
    assert turns_error((), model=MODEL, dtype=DTYPE, split="sequences") == 0.0


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="positive and finite"):
        record(1, 0.0)
    for error in (-0.1, math.inf, math.nan):
        with pytest.raises(InputError, match="standard error"):
            record(1, 1.0, error)


@pytest.mark.parametrize("degree", [1, 3])
def test_blocks_take_as_long_as_a_model_of_them_without_its_ends(degree: int) -> None:
    asked = problem()
    costs, point = asked.costs, point_of(degree)
    prices = Prices(
        model=MODEL, dtype=point.dtype, costs=costs, bounds=Bounds(max_degree=1),
        per_node=asked.per_node,
    )  # fmt: skip
    groups = prices.groups(EXCHANGING)
    priced = prices.priced(
        layout=EXCHANGING, groups=groups, sequences=point.sequences, one_chunk=True
    )
    load = point.workload
    step = ReplicaStep(
        model=MODEL, dtype=point.dtype, costs=costs, priced=priced, groups=groups,
        tokens=load.tokens_per_rank,
        layer=AllToAllCosts(
            layer=load.layer, world_size=WORLD, dtype=point.dtype, costs=costs,
            num_nodes=groups.experts.num_nodes,
        ),
    )  # fmt: skip
    whole = step.timeline(
        (degree, degree), in_flight=2, sums_replicas=False, reduces=False
    ).makespan_seconds
    ends = sum(
        part.forward.seconds + part.backward.seconds
        for part in (*priced.backbone.first, *priced.backbone.last)
    )
    found = turns_seconds(point, costs=costs, per_node=asked.per_node)
    assert 0 < whole - 2 * ends <= found <= whole
    assert ends < 0.1 * whole


def _pipeline_seconds(search: LayoutSearch, in_flight: int) -> float:
    found = [
        one
        for one in search.trial(EXCHANGING).candidates()
        if one.setting.between and one.setting.in_flight == in_flight
    ]
    return min(one.pipeline.seconds / one.setting.num_micro_batches for one in found)


def test_plans_in_turns_take_as_much_longer_as_their_blocks_did() -> None:
    plain, _ = search_layouts(problem(degree=1))
    slower, _ = search_layouts(problem((record(1, 1.25),), degree=1))
    assert _pipeline_seconds(slower, 2) == pytest.approx(1.25 * _pipeline_seconds(plain, 2))
    assert _pipeline_seconds(slower, 1) == _pipeline_seconds(plain, 1)


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_the_range_of_a_plan_in_turns_is_as_wide_as_its_blocks_were_uncertain(error: float) -> None:
    search, found = search_layouts(problem((record(1, 0.5, error),), degree=1))
    assert found.best[0].setting.in_flight == 2
    sure = judge_layout(search, found.best[:1], [search.prices.costs])
    judged = judge_layout(search, found.best[:1], [search.prices.costs] * 50)
    width = math.log(judged.p95_step_seconds / judged.p05_step_seconds)
    assert width == pytest.approx(2 * 1.645 * error, rel=0.1)
    assert sure.p05_step_seconds == sure.p95_step_seconds


@pytest.mark.unmeasured
def test_batches_that_take_turns_too_slowly_go_one_after_the_other() -> None:
    def in_flight(turns: tuple[TurnsRecord, ...]) -> int:
        search, _ = search_layouts(problem(turns))
        best = search.ranked(list(search.trial(EXCHANGING).candidates()))[0]
        return best.setting.in_flight

    assert in_flight((record(1, 0.5),)) == 2
    assert in_flight((record(1, 2.0),)) == 1


@pytest.mark.unmeasured
@pytest.mark.parametrize(("saved", "chosen"), [(0.01, 1), (0.06, 3)])
def test_batches_in_turns_have_more_chunks_where_these_save_what_can_be_told_apart(
    saved: float, chosen: int
) -> None:
    # So many tokens that gradients hardly count.
    asked = replace(problem(), model=replace(MODEL, vocab_size=500))
    asked = replace(asked, inputs=replace(asked.inputs, tokens_per_rank=256 * MODEL.length))

    def in_turns(turns: tuple[TurnsRecord, ...], degree: int | None = None) -> Candidate:
        bounds = Bounds(forward_degree=degree, backward_degree=degree)
        search, _ = search_layouts(replace(asked, turns=turns, bounds=bounds))
        (found,) = (
            one
            for one in search.trial(EXCHANGING).candidates()
            if one.setting.in_flight == 2 and one.setting.num_micro_batches == 2
        )
        return found

    one, three = in_turns((), 1), in_turns((), 3)
    factor = (1 - saved) * one.seconds / three.seconds
    turns = record(1, 1.0), record(2, 9.0), record(3, factor), record(4, 9.0)
    assert in_turns(turns).priced.moe.step.degrees == (chosen, chosen)
