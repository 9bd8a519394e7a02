"""One study: it prunes, stops, says what it spent, and goes on after it was killed."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.app.tuning import StudyTuner, TuningStudy
from moetune.domain.layer import LayerShape
from moetune.domain.plan import SAFE_DECISION, Decision
from moetune.runtime.plans.tuner import TuningTask
from moetune.solve.layer.online import PRUNE_AFTER, REPEATS, Space, Tried, next_decision
from moetune.store import open_store
from tests.runtime.plans import small_plan

NAME = "a layer at 1000 tokens"
WORKER = Path(__file__).with_name("search_worker.py")
SPACE = Space(seed=SAFE_DECISION.with_degree(4), degrees=(1, 16), strategies=("none",), budget=None)


def seconds(decision: Decision) -> float:
    """Best at 7."""
    return 49 / decision.degree + decision.degree


def run(study: TuningStudy) -> int:
    num_steps = 0
    while (decision := study.ask()) is not None:
        goes_on = True
        while goes_on:
            goes_on = study.report(seconds(decision))
            num_steps += 1
    return num_steps


def study_in(folder: Path) -> TuningStudy:
    return TuningStudy(file=folder / "searches" / "one.log", name=NAME, space=SPACE)


def test_it_begins_with_the_plans_answer_and_finds_the_best(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    num_steps = run(study)
    best = min(seconds(SAFE_DECISION.with_degree(degree)) for degree in range(1, 17))
    assert study.best().median_seconds <= 1.02 * best
    assert study.tried[0].decision == SPACE.seed
    assert study.planned() == study.tried[0]
    assert study.num_steps == num_steps + len(study.tried)


def test_the_curve_over_degrees_is_of_the_fastest_strategy_alone() -> None:
    seed = replace(SPACE.seed, strategy="S4")
    space = replace(SPACE, seed=seed, strategies=("S4", "S1", "none"))
    tried = [Tried(decision=seed, seconds=(10.0,))]
    wanted = next_decision(space=space, tried=tried)
    for strategy in ("S1", "none"):
        rivals = [
            Tried(decision=replace(seed, strategy=strategy).with_degree(degree), seconds=(99.0,))
            for degree in (1, 2, 3, 5, 8, 16)
        ]
        assert next_decision(space=space, tried=[*tried, *rivals]) == wanted


def test_searches_of_a_plan_with_and_without_its_strategy_are_two(tmp_path: Path) -> None:
    plan = small_plan(layer=LayerShape(d_model=16, d_hidden=32, num_experts=4))
    tuner = StudyTuner(folder=tmp_path, hardware_id="abc", stores=lambda: open_store("sqlite://"))
    for reuse in (None, "none"):
        tuner.begin(TuningTask(plan=plan, tokens_per_rank=64, memory_reuse=reuse, space=SPACE))
    names = {f"{plan.id[:16]}-abc-{how}-64.log" for how in ("planned", "none")}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_clearly_worse_degree_is_not_measured_to_its_end(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    run(study)
    best = study.tried[0].median_seconds
    lengths = set()
    for trial in study.tried:
        is_worse = trial.median_seconds > 1.05 * best
        assert len(trial.seconds) == (PRUNE_AFTER if is_worse else REPEATS)
        lengths.add(len(trial.seconds))
        best = min(best, trial.median_seconds)
    assert lengths == {PRUNE_AFTER, REPEATS}


def test_a_study_opened_again_knows_its_trials_and_that_it_is_over(tmp_path: Path) -> None:
    first = study_in(tmp_path)
    run(first)
    again = study_in(tmp_path)
    assert again.tried == first.tried
    assert again.num_steps == first.num_steps
    assert again.ask() is None
    assert again.best() == first.best()


def test_a_killed_search_keeps_its_trials_and_goes_on(tmp_path: Path) -> None:
    uninterrupted = study_in(tmp_path / "whole")
    run(uninterrupted)
    file = tmp_path / "killed.log"
    with subprocess.Popen(
        (sys.executable, WORKER, file), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        for step in range(REPEATS + 1):
            assert worker.stdout.readline() == "step\n"
            if step < REPEATS:
                worker.stdin.write("go\n")
                worker.stdin.flush()
        worker.kill()
    study = TuningStudy(file=file, name=NAME, space=SPACE)
    assert study.tried == uninterrupted.tried[:1]
    run(study)
    assert study.tried == uninterrupted.tried
    lost_steps = 2  # of the trial that was under way: one to warm up, one told
    assert study.num_steps == uninterrupted.num_steps + lost_steps


def test_optuna_says_nothing_on_the_trainers_screen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import optuna

    before = optuna.logging.get_verbosity()
    run(study_in(tmp_path))
    assert optuna.logging.get_verbosity() == before == logging.INFO
    assert capfd.readouterr() == ("", "")


def test_trials_of_an_older_study_with_exchanges_in_two_steps_do_not_count(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    study.ask()
    assert study._trial is not None
    study._trial.set_user_attr("dispatcher", "hierarchical")
    while study.report(1.0):
        pass
    assert study.tried == ()
    assert study.ask() == SPACE.seed
