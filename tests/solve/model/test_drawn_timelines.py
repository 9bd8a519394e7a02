"""Timelines that are drawn of a model's step: as long as the prices that a plan is chosen by."""

from dataclasses import replace
from itertools import pairwise

import pytest

from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.model.pipeline import pass_spans, play
from tests.solve.model.brute_force import OLMOE, search_of

JOB = TrainingJob(decoder=OLMOE, world_size=8, global_batch=64, length=2048)
PLAIN = FoldedLayout(dp=8, ep=8)


@pytest.mark.parametrize(
    ("layout", "num"),
    [
        (FoldedLayout(dp=4, pp=2, ep=4), 16), (FoldedLayout(dp=2, pp=4, vpp=2, ep=2), 16),
        (FoldedLayout(dp=2, pp=4, ep=2, schedule="zero_bubble"), 16),
    ],
)  # fmt: skip
def test_passes_of_a_pipeline_end_when_it_does(layout: FoldedLayout, num: int) -> None:
    pipeline = replace(search_of(JOB).prices.pipeline(layout), num_micro_batches=num)
    spans = pass_spans(pipeline, num)
    assert max(span.end_seconds for span in spans) == pytest.approx(play(pipeline))
    assert sum(span.kind == "F" for span in spans) == num * layout.num_stages
    passes = [(span.kind, span.stage, span.batch) for span in spans]
    assert len(set(passes)) == len(passes)
    for rank in range(layout.pp):
        mine = sorted((s for s in spans if s.rank == rank), key=lambda s: s.end_seconds)
        for earlier, later in pairwise(mine):
            assert later.start_seconds >= earlier.end_seconds - 1e-12


def test_the_fullest_rank_is_the_peak_and_none_has_less_than_the_least() -> None:
    memory = search_of(JOB).fitting.memory
    for layout in (PLAIN, FoldedLayout(dp=2, pp=4, ep=2), FoldedLayout(dp=2, pp=4, vpp=2, zero=2)):
        ranks = [memory.of_rank(layout, rank) for rank in range(layout.pp)]
        assert [rank.rank for rank in ranks] == list(range(layout.pp))
        peak = max(rank.peak_bytes for rank in ranks)
        assert peak == memory.peak(layout).peak_bytes == memory.needs(layout)[0]
        assert memory.least(layout, on_host=0.0) < peak
        assert memory.least(layout, on_host=1.0) < memory.least(layout, on_host=0.0)
