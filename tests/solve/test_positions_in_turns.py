"""Halves of positions in turns: their timeline, prices and memory, and when plans have them."""

from dataclasses import replace
from functools import partial
from typing import cast

import pytest

from moetune.domain.constraints import Bounds
from moetune.domain.costs import Costs, Estimate
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.plan import plan_from_document
from moetune.domain.samples import TurnsPoint
from moetune.domain.training import Overlap
from moetune.domain.turns import TurnsRecord
from moetune.solve.layer.all_to_all import AllToAllCosts
from moetune.solve.layout.candidates import Candidate
from moetune.solve.layout.choose import LayoutProblem, search_layouts
from moetune.solve.layout.plan import solve_layout
from moetune.solve.layout.words import explain_between, name_setting
from moetune.solve.model.costs import PositionsHalf
from moetune.solve.model.in_turns import turns_factor, turns_seconds
from moetune.solve.model.prices import Priced, Prices
from moetune.solve.model.replicas import ReplicaStep
from tests.solve.test_in_turns import DTYPE, EXCHANGING, MODEL, WORLD, problem


def point_of(degree: int = 1) -> TurnsPoint:
    return TurnsPoint(
        model=MODEL, world_size=WORLD, sequences=1, dtype=DTYPE, degree=degree, split="positions"
    )


def record(degree: int = 1, factor: float = 1.0) -> TurnsRecord:
    return TurnsRecord(point=point_of(degree), predicted_seconds=0.5, measured_seconds=0.5 * factor)


def asked(
    *turns: TurnsRecord, sequences: int = 1, overlap: Overlap | None = None, dtype: str = DTYPE
) -> LayoutProblem:
    whole = problem(turns, degree=1)
    pins = replace(whole.pins, overlap=overlap)
    inputs = replace(whole.inputs, tokens_per_rank=sequences * MODEL.length, dtype=dtype)
    return replace(whole, inputs=inputs, pins=pins)


def candidates(of: LayoutProblem) -> list[Candidate]:
    search, _ = search_layouts(of)
    return list(search.trial(EXCHANGING).candidates())


def in_turns(of: LayoutProblem) -> list[Candidate]:
    return [one for one in candidates(of) if one.setting.in_flight == 2]


def fastest(of: LayoutProblem) -> Candidate:
    search, _ = search_layouts(of)
    return search.ranked(candidates(of))[0]


def prices_of(of: LayoutProblem) -> Prices:
    return Prices(
        model=MODEL, dtype=DTYPE, costs=of.costs, bounds=Bounds(max_degree=1), per_node=of.per_node
    )


def test_only_a_profile_that_measured_them_has_plans_with_halves_of_positions() -> None:
    (found,) = in_turns(asked(record()))
    assert (found.setting.split, found.setting.num_micro_batches) == ("positions", 1)
    assert found.setting.num_backward_passes == 2
    assert "halves of its positions in turns" in name_setting(found.setting)
    text = explain_between(found, other=None, reduce_seconds=1.0)
    assert "First and last positions of a micro-batch take turns" in text
    by_sequences = replace(record(), point=replace(point_of(), split="sequences"))
    for turns in ((), (by_sequences,)):
        assert not in_turns(asked(*turns))


def test_micro_batches_that_come_in_pairs_take_turns_whole() -> None:
    found = in_turns(asked(record(), sequences=6))
    splits = {one.setting.num_micro_batches: one.setting.split for one in found}
    assert splits == {6: None, 3: "positions", 1: "positions"}
    passes = {one.setting.num_micro_batches: one.setting.num_backward_passes for one in found}
    assert passes == {6: 6, 3: 6, 1: 2}


def test_a_plan_has_them_where_they_are_faster_and_says_so() -> None:
    fast, slow = (fastest(asked(record(factor=one))) for one in (0.3, 3.0))
    assert fast.setting.split == "positions"
    assert slow.setting.in_flight == 1


def test_a_plan_is_for_the_tokens_that_a_layer_sees_in_a_half() -> None:
    plan = solve_layout(asked(record(factor=0.3))).plan
    transformer = plan.transformer
    assert transformer is not None
    assert (transformer.split, transformer.batches_in_flight) == ("positions", 2)
    assert transformer.micro_batch_tokens == MODEL.length
    assert plan.workload.tokens_per_rank == plan.tokens_per_rank == MODEL.length // 2
    own = plan.decide(MODEL.length // 2)
    assert own.forward_degree == plan.pipeline.forward_degree
    again = plan_from_document(encode(plan))
    assert again.transformer == transformer
    whole = solve_layout(asked(record(factor=3.0))).plan
    assert whole.tokens_per_rank == MODEL.length


def test_plans_take_as_much_longer_as_their_blocks_did() -> None:
    (plain,), (slower,) = (in_turns(asked(record(factor=one))) for one in (1.0, 1.25))
    assert slower.pipeline.seconds == pytest.approx(1.25 * plain.pipeline.seconds)
    factor = partial(turns_factor, [record(factor=1.25)], model=MODEL, dtype=DTYPE, degrees=(1, 1))
    assert factor(split="positions") == pytest.approx(1.25)
    assert factor() == 1.0


class Attending:
    """Costs of attention that were measured: a second for each sequence, two backward."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def __getattr__(self, name: str) -> object:
        return getattr(self._costs, name)

    def attention(self, *, num_sequences: float, backward: bool, **_: object) -> Estimate:
        return Estimate(num_sequences * (2.0 if backward else 1.0), "measured")


@pytest.mark.parametrize("is_measured", [False, True])
def test_the_last_positions_have_three_quarters_of_attention_and_half_of_the_rest(
    is_measured: bool,  # noqa: FBT001 - a case
) -> None:
    of = problem()
    costs = cast("Costs", Attending(of.costs)) if is_measured else of.costs
    prices = prices_of(replace(of, costs=costs))
    whole, first, last = (halves_of(prices, one) for one in (None, "first", "last"))
    forward, backward = (
        last.backbone.attention[0].forward.seconds - first.backbone.attention[0].forward.seconds,
        last.backbone.attention[0].backward.seconds - first.backbone.attention[0].backward.seconds,
    )
    assert 0 < forward < backward
    if is_measured:
        assert (forward, backward) == pytest.approx((0.5, 1.0))
    assert first.moe.step == last.moe.step
    assert first.moe.step.forward.seconds < whole.moe.step.forward.seconds
    ends = [one.seconds.first + one.seconds.last for one in (first, last, whole)]
    assert ends[0] == ends[1] < ends[2] <= ends[0] + ends[1]


def halves_of(prices: Prices, half: PositionsHalf | None) -> Priced:
    return prices.priced(
        layout=EXCHANGING, groups=prices.groups(EXCHANGING), sequences=1, one_chunk=True, half=half
    )


@pytest.mark.parametrize("degree", [1, 3])
def test_blocks_take_as_long_as_a_model_of_them_without_its_ends(degree: int) -> None:
    of, point = problem(), point_of(degree)
    prices = prices_of(of)
    first, last = halves_of(prices, "first"), halves_of(prices, "last")
    load, groups = point.workload, prices.groups(EXCHANGING)
    step = ReplicaStep(
        model=MODEL, dtype=DTYPE, costs=of.costs, priced=first, last=last, groups=groups,
        tokens=load.tokens_per_rank,
        layer=AllToAllCosts(
            layer=load.layer, world_size=WORLD, dtype=DTYPE, costs=of.costs,
            num_nodes=groups.experts.num_nodes,
        ),
    )  # fmt: skip
    whole = step.timeline(
        (degree, degree), in_flight=2, sums_replicas=False, reduces=False
    ).makespan_seconds
    ends = first.seconds.first + first.seconds.last + last.seconds.first + last.seconds.last
    found = turns_seconds(point, costs=of.costs, per_node=of.per_node)
    assert 0 < whole - ends <= found <= whole
    assert ends < 0.1 * whole


def test_halves_keep_the_activations_of_a_batch_and_joined_keys_and_values() -> None:
    of = asked(record())
    (split,) = in_turns(of)
    (whole,) = (one for one in candidates(of) if one.setting.between and one.setting.in_flight == 1)
    more = split.memory.activation_bytes - whole.memory.activation_bytes
    tokens, element = MODEL.length, 2
    assert more == 12 * 2 * tokens * MODEL.moe.d_model * element
    assert split.memory.buffer_bytes == whole.memory.buffer_bytes


def test_turns_can_be_asked_for_where_positions_were_measured() -> None:
    (found,) = candidates(asked(record(), overlap="batch"))
    assert found.setting.split == "positions"
    with pytest.raises(InputError, match="an even number of micro-batches") as raised:
        search_layouts(asked(overlap="batch"))
    assert "halves of its positions" in str(raised.value.hint)
