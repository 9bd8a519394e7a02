"""Pipelines of ranks that share a core: bounds between a core each and free sends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.layouts.shared_core import pipeline_by_turns
from moetune.solve.model.stages import one_f_one_b

seconds = st.floats(0.01, 10.0)


@given(st.lists(st.tuples(seconds, st.floats(0.0, 5.0)), min_size=1, max_size=6), st.integers(1, 9))
def test_with_a_core_each_it_is_the_solvers_own_time(
    stages: list[tuple[float, float]], num_micro_batches: int
) -> None:
    each, hops = [one for one, _ in stages], [hop for _, hop in stages[1:]]
    apart = pipeline_by_turns(
        stage_seconds=each, hop_seconds=hops, num_micro_batches=num_micro_batches,
        stages_per_core=1,
    )  # fmt: skip
    assert apart == one_f_one_b(
        stage_seconds=each, hop_seconds=hops, num_micro_batches=num_micro_batches
    )


@given(
    st.lists(st.tuples(seconds, st.floats(0.0, 1.0)), min_size=4, max_size=4), st.integers(1, 16)
)
def test_stages_that_share_a_core_keep_it_busy_and_wait_less(
    stages: list[tuple[float, float]], num_micro_batches: int
) -> None:
    each, hops = [one for one, _ in stages], [hop for _, hop in stages[1:]]
    apart, shared, alone = (
        pipeline_by_turns(
            stage_seconds=each, hop_seconds=hops, num_micro_batches=num_micro_batches,
            stages_per_core=per_core,
        )
        for per_core in (1, 2, 4)
    )  # fmt: skip
    cores = sum(each[:2]) / 2, sum(each[2:]) / 2
    assert shared.seconds >= num_micro_batches * max(cores) + 2 * hops[1]
    assert shared.seconds <= apart.seconds * (1 + 1e-9)
    assert shared.busy_seconds == pytest.approx(num_micro_batches * cores[shared.slowest // 2])
    assert alone.seconds == pytest.approx(num_micro_batches * sum(each) / 4)
    assert alone.send_seconds == 0
