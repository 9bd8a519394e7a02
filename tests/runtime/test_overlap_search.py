"""The search for the overlap of two batches: what it settles, costs, keeps and leaves alone."""

import logging
from pathlib import Path

import pytest
import torch

from moetune.domain.plan import Plan
from moetune.domain.records import Settled
from moetune.runtime.plans import overlap_search
from moetune.store import open_store
from tests.ranks import run_ranks
from tests.runtime import overlap_search_workers
from tests.runtime.companion_nets import TOKENS, batch
from tests.runtime.overlap_search_workers import Job, Seconds, plan_of
from tests.runtime.plans import small_plan

TWO = [batch(0), batch(1)]


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_every_overlap_computes_what_one_process_does_and_ranks_agree(
    num_ranks: int, tmp_path: Path
) -> None:
    found = run_ranks(overlap_search_workers.several_ranks, num_ranks, tmp_path)
    assert found == [""] * num_ranks


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({"both": 1.0, "batch": 2.0, "chunks": 1.02}, "in turns, in chunks as planned; as fast"),
        ({"both": 2.0, "batch": 1.0, "chunks": 1.5}, "in one chunk each; 1.00 s (100.0 %)"),
        ({"both": 1.2, "batch": 2.0, "chunks": 1.0}, "one after the other, in chunks"),
    ],
)
def test_the_fastest_is_settled_told_stored_and_reported(
    seconds: Seconds, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[tuple[Plan, Settled]] = []
    plan = plan_of(1)
    job = Job(tmp_path, seconds, plan=plan, report=lambda *both: reported.append(both))
    with caplog.at_level(logging.INFO):
        job.until_settled(TWO)
    fastest = min(seconds, key=seconds.__getitem__)
    assert job.overlap.overlap == fastest
    with open_store(f"{tmp_path}/moetune.db") as store:
        (one,) = store.settled(plan.id)
    assert reported == [(plan, one)]
    # Five steps for each, of which one warms up, but three for the clearly slower one.
    assert (one.overlap, one.num_steps, one.tokens_per_rank) == (fastest, 5 + 5 + 3, TOKENS)
    assert (one.seconds, one.planned_seconds) == ((seconds[fastest],) * 4, seconds["both"])
    is_whole = fastest == "batch"
    assert (one.decision.forward_degree == one.decision.backward_degree == 1) is is_whole
    (line,) = [each.getMessage() for each in caplog.records if each.name == "moetune"]
    assert f"{TOKENS} tokens: search settled after 3 trials" in line
    assert words in line


def test_the_budget_ends_it_with_the_best_known(tmp_path: Path) -> None:
    seconds: Seconds = {"both": 1.0, "batch": 9.0, "chunks": 0.5}
    job = Job(tmp_path, seconds, plan=plan_of(1), budget_seconds=10.0)
    job.until_settled(TWO)
    assert job.overlap.overlap == "both"
    assert job.search.has_ended
    assert job.search.lost.lost_seconds == 2 * 8.0  # one step to warm up, one measured
    assert "chunks" not in job.ran


def test_layers_are_searched_once_their_batches_run_one_after_the_other(tmp_path: Path) -> None:
    job = Job(tmp_path, {"both": 2.0, "batch": 2.0, "chunks": 1.0}, plan=plan_of(1))
    job.until_settled(TWO)
    assert job.tuner.tasks == []
    for _ in range(3):
        job.step(TWO)
    assert [one.tokens_per_rank for one in job.tuner.tasks] == [TOKENS]
    in_turns = Job(tmp_path / "2", {"both": 1.0, "batch": 2.0, "chunks": 2.0}, plan=plan_of(1))
    in_turns.until_settled(TWO)
    for _ in range(3):
        in_turns.step(TWO)
    assert in_turns.tuner.tasks == []


def test_steps_of_other_sizes_do_not_count_and_a_size_that_is_gone_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap_search, "PATIENCE_STEPS", 4)
    job = Job(tmp_path, {"both": 2.0, "batch": 1.0, "chunks": 1.0}, plan=plan_of(1))
    small = [one[:2] for one in TWO]
    for _ in range(5 + 1):
        job.step(TWO)
    for _ in range(3):
        job.step(small)
    assert not job.overlap.is_settled
    job.step(TWO)
    for _ in range(4):
        job.step(small)
    assert (job.overlap.is_settled, job.overlap.overlap) == (True, "both")
    assert job.tuner.settled == []


@pytest.mark.parametrize(
    "plan",
    [None, small_plan(layer=overlap_search_workers.SHAPE, world_size=1, dtype="float32")],
)
def test_without_a_plan_two_batches_take_turns_as_they_did(
    plan: Plan | None, tmp_path: Path
) -> None:
    job = Job(tmp_path, {"both": 2.0, "batch": 1.0, "chunks": 1.0}, plan=plan)
    for _ in range(8):
        job.step(TWO)
    assert set(job.ran) == {"both"}
    assert not job.overlap.is_open


def test_a_pinned_overlap_runs_from_the_second_step_on(tmp_path: Path) -> None:
    plan = small_plan(
        layer=overlap_search_workers.SHAPE, world_size=1, tokens=TOKENS, dtype="float64",
        constraints={"overlap": "chunks"},
    )  # fmt: skip
    job = Job(tmp_path, {"both": 1.0, "batch": 1.0, "chunks": 2.0}, plan=plan)
    for _ in range(3):
        job.step(TWO)
    assert job.ran == ["both", "chunks", "chunks"]


def test_a_plan_of_gradients_is_recorded_with_one_batch(tmp_path: Path) -> None:
    found = run_ranks(overlap_search_workers.recording, 2, tmp_path)
    assert found == ["", ""]


def test_an_error_of_a_batch_is_told_and_nothing_is_noted(tmp_path: Path) -> None:
    job = Job(tmp_path, {"both": 1.0, "batch": 1.0, "chunks": 2.0}, plan=plan_of(1))
    with pytest.raises(RuntimeError, match="shapes"):
        job.step([torch.zeros(2, 3, dtype=torch.float64)] * 2)
    assert not job.overlap.is_open
    job.until_settled(TWO)
