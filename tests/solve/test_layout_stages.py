"""Times of 1F1B, against its closed form and a simulation of unequal stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.solve.model.stages import cut_into_stages, in_flight, one_f_one_b
from tests.solve.stage_events import event_by_event, most_kept, program_of

seconds = st.floats(0.1, 3.0)


@given(seconds, seconds, st.integers(1, 7), st.integers(1, 12))
def test_equal_stages_take_the_closed_form_of_1f1b(
    forward: float, backward: float, num_stages: int, num_micro_batches: int
) -> None:
    hops = [0.0] * (num_stages - 1)
    found = one_f_one_b(
        stage_seconds=[forward + backward] * num_stages,
        hop_seconds=hops,
        num_micro_batches=num_micro_batches,
    )
    closed = (num_micro_batches + num_stages - 1) * (forward + backward)
    assert found.seconds == pytest.approx(closed, rel=1e-9)
    simulated = event_by_event(
        [forward] * num_stages, [backward] * num_stages, hops, num_micro_batches
    )
    assert found.seconds == pytest.approx(simulated, rel=1e-9)
    kept = [
        most_kept(program_of(stage, num_stages, num_micro_batches)) for stage in range(num_stages)
    ]
    assert kept == [
        in_flight(stage=one, num_stages=num_stages, num_micro_batches=num_micro_batches)
        for one in range(num_stages)
    ]
    assert found.send_seconds == 0


@given(st.lists(seconds, min_size=1, max_size=7), st.integers(1, 12))
def test_unequal_stages_take_between_the_simulation_and_the_slowest_stage_everywhere(
    forward: list[float], num_micro_batches: int
) -> None:
    hops = [0.0] * (len(forward) - 1)
    backward = [2 * one for one in forward]
    found = one_f_one_b(
        stage_seconds=[3 * one for one in forward],
        hop_seconds=hops,
        num_micro_batches=num_micro_batches,
    )
    simulated = event_by_event(forward, backward, hops, num_micro_batches)
    slowest = 3 * max(forward)
    assert simulated <= found.seconds * (1 + 1e-9)
    assert found.seconds <= (num_micro_batches + len(forward) - 1) * slowest * (1 + 1e-9)
    assert 3 * forward[found.slowest] == slowest


@given(seconds, st.integers(1, 7), st.integers(2, 16), st.data())
def test_a_slow_last_stage_is_exact(
    forward: float, num_stages: int, num_micro_batches: int, data: st.DataObject
) -> None:
    """The head is on the last stage: the usual way in which stages differ."""
    extra = data.draw(st.floats(0.0, 4.0))
    each = [forward] * (num_stages - 1) + [forward + extra]
    hops = [0.0] * (num_stages - 1)
    found = one_f_one_b(
        stage_seconds=[3 * one for one in each], hop_seconds=hops,
        num_micro_batches=num_micro_batches,
    )  # fmt: skip
    simulated = event_by_event(each, [2 * one for one in each], hops, num_micro_batches)
    assert found.seconds == pytest.approx(simulated, rel=1e-9)


@given(
    st.lists(st.tuples(seconds, st.floats(0.0, 1.0)), min_size=2, max_size=7), st.integers(1, 16)
)
def test_unequal_stages_and_sends_take_about_what_the_simulation_says(
    stages: list[tuple[float, float]], num_micro_batches: int
) -> None:
    forward = [one for one, _ in stages]
    hops = [
        share * min(before, one) for before, (one, share) in zip(forward, stages[1:], strict=False)
    ]
    found = one_f_one_b(
        stage_seconds=[3 * one for one in forward], hop_seconds=hops,
        num_micro_batches=num_micro_batches,
    )  # fmt: skip
    simulated = event_by_event(forward, [2 * one for one in forward], hops, num_micro_batches)
    assert 0.8 * simulated <= found.seconds <= 1.5 * simulated


@given(seconds, st.floats(0.0, 3.0), st.integers(2, 16))
def test_two_equal_stages_meet_once_for_every_micro_batch(
    forward: float, hop: float, num_micro_batches: int
) -> None:
    found = one_f_one_b(
        stage_seconds=[3 * forward] * 2, hop_seconds=[hop], num_micro_batches=num_micro_batches
    )
    simulated = event_by_event([forward] * 2, [2 * forward] * 2, [hop], num_micro_batches)
    assert found.seconds == pytest.approx(simulated, rel=1e-9)
    free = (num_micro_batches + 1) * 3 * forward
    assert found.seconds - found.send_seconds == pytest.approx(free, rel=1e-9)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5))
def test_stages_hold_every_block_once_and_differ_by_one_at_most(
    num_layers: int, num_stages: int, moe_every: int
) -> None:
    num_layers, moe_every = max(num_layers, num_stages), min(moe_every, num_layers)
    model = Transformer(
        moe=LayerShape(d_model=8, d_hidden=8, num_experts=2), num_layers=num_layers,
        num_heads=2, length=4, vocab_size=8, moe_every=min(moe_every, num_layers),
    )  # fmt: skip
    stages = cut_into_stages(model, num_stages)
    start = 0
    for index, stage in enumerate(stages):
        blocks = range(start, start + stage.num_blocks)
        assert stage.num_moe == sum(model.has_experts(block) for block in blocks)
        assert (stage.is_first, stage.is_last) == (index == 0, index == num_stages - 1)
        start += stage.num_blocks
    assert start == num_layers
    sizes = [stage.num_blocks for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
