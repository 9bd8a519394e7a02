"""The closed loop: what jobs observe corrects the profile, and the next plan is right again."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moetune.domain.corrections import Correction
from moetune.domain.document import canonical_json, decode
from moetune.domain.layer import LayerShape
from moetune.domain.operations import Operation, OperationTimes, operations_of
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile, is_same_but_for_corrections, profile_from_document
from moetune.domain.records import Observation, Stored
from moetune.domain.request import PlanRequest
from moetune.fit.costs import costs_of
from moetune.fit.scaled import Speeds, scale_profile
from moetune.solve.layer.observed import watched_seconds
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.predict import plan_step
from moetune.store import open_store
from moetune.workflows.corrections import judge_observations, update_corrections
from moetune.workflows.files import profile_to_toml
from moetune.workflows.plan import make_plan
from tests.fit.measured import FINGERPRINT, measured_profile

pytestmark = pytest.mark.unmeasured

LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=8, top_k=1, activation="gelu")
PROFILE = measured_profile()
REQUEST = PlanRequest(layer=LAYER, tokens_per_rank=4096, dtype="float32", world_size=4)
PLAN = make_plan(REQUEST, profile=PROFILE)


def observed(
    plan: Plan, truth: Profile, *, num: int = 4, seed: int = 0, noise: float = 0.03
) -> Observation:
    """Return what a job shows whose machine is as `truth` says, with noise."""
    rng = np.random.default_rng(seed)
    costs = layer_costs(workload=plan.workload, costs=costs_of(truth))
    decision = plan.decide(plan.tokens_per_rank)

    def times(operation: Operation) -> OperationTimes:
        seconds = watched_seconds(
            operation, workload=plan.workload, costs=costs, order=plan.pipeline.order
        )
        noisy = tuple((seconds * np.exp(noise * rng.normal(size=num))).tolist())
        return OperationTimes(operation=operation, predicted_seconds=None, seconds=noisy)

    operations = tuple(times(one) for one in operations_of(plan.workload, decision))
    return Observation(
        plan_id=plan.id, forward_degree=decision.forward_degree,
        backward_degree=decision.backward_degree, tokens_per_rank=plan.tokens_per_rank,
        predicted_seconds=plan.predicted.step_seconds, seconds=(1.0,) * num, source="training",
        operations=operations, device_id=FINGERPRINT.device_id,
    )  # fmt: skip


def stored(*observations: Observation) -> list[tuple[Plan, Stored[Observation]]]:
    return [
        (PLAN, Stored(id=number, created_at="", value=one))
        for number, one in enumerate(observations, 1)
    ]


def best_step_seconds(plan: Plan, truth: Profile) -> float:
    """Return the step of the degrees that are best on the true machine, tried one by one."""
    decision, costs = plan.decide(plan.tokens_per_rank), costs_of(truth)
    return min(
        plan_step(
            plan=plan, costs=costs,
            decision=replace(decision, forward_degree=forward, backward_degree=backward),
        ).seconds
        for forward in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
        for backward in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    )  # fmt: skip


@pytest.mark.parametrize(
    "speeds",
    [
        Speeds(communication=0.4), Speeds(communication=2.5), Speeds(computation=0.5),
        Speeds(communication=0.5, computation=0.7),
    ],
)  # fmt: skip
def test_the_plan_that_follows_is_within_five_percent_of_the_best(
    tmp_path: Path, speeds: Speeds
) -> None:
    truth = scale_profile(PROFILE, speeds)
    with open_store(f"{tmp_path}/it.db") as store:
        store.save_profile(PROFILE)
        store.save_plan(PLAN)
        store.add_observations([observed(PLAN, truth, seed=seed) for seed in range(3)])
        found = update_corrections(store, PROFILE.name)
        assert found.is_changed
        corrected = store.profile(PROFILE.name)
        again = update_corrections(store, PROFILE.name)
    assert not again.is_changed
    assert again.corrections == found.corrections
    assert corrected is not None
    assert corrected == replace(PROFILE, corrections=found.corrections)
    made = make_plan(REQUEST, profile=corrected)
    assert made.id != PLAN.id
    assert len(made.warnings) > len(PLAN.warnings)
    measured = plan_step(
        plan=made, costs=costs_of(truth), decision=made.decide(made.tokens_per_rank)
    ).seconds
    assert measured <= 1.05 * best_step_seconds(made, truth)
    assert made.predicted.step_seconds == pytest.approx(measured, rel=0.1)


def test_a_plan_of_a_corrected_profile_is_observed_and_corrected_on(tmp_path: Path) -> None:
    """Each round's factors are on the measured costs, not on those corrected before."""
    with open_store(f"{tmp_path}/it.db") as store:
        store.save_profile(PROFILE)
        profile: Profile | None = PROFILE
        for factor in (0.5, 0.8, 0.5):
            assert profile is not None
            plan = make_plan(REQUEST, profile=profile)
            store.save_plan(plan)
            truth = scale_profile(PROFILE, Speeds(communication=factor))
            for seed in range(15):
                store.add_observation(observed(plan, truth, seed=seed))
            update_corrections(store, PROFILE.name)
            profile = store.profile(PROFILE.name)
            assert profile is not None
            known = [one for one in profile.corrections if one.op == "all_to_all"]
            assert known
            for one in known:
                assert one.factor == pytest.approx(1 / factor, rel=0.1)
        assert len(store.runs()) == 1


def test_a_machine_as_measured_is_not_corrected() -> None:
    found = judge_observations(
        PROFILE, stored(*(observed(PLAN, PROFILE, seed=n) for n in range(9)))
    )
    assert all(0.9 < one.factor < 1.1 for one in found.corrections)


def _slower_step(one: Observation) -> Observation:
    return replace(one, seconds=(1e-9,) * len(one.seconds))


WRONG: dict[str, Callable[[Observation], Observation]] = {
    "another plan": lambda one: replace(one, plan_id="ab" * 32),
    "another machine": lambda one: replace(one, device_id="0123456789abcdef"),
    "no machine": lambda one: replace(one, device_id=""),
    "no operations": lambda one: replace(one, operations=()),
    "another size": lambda one: replace(one, tokens_per_rank=one.tokens_per_rank + 1),
    "other chunks": lambda one: replace(one, forward_degree=one.forward_degree + 1),
    "no time": lambda one: replace(one, seconds=(0.0, *one.seconds[1:])),
    "a clock that jumped": _slower_step,
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_observation_is_refused_with_a_reason(kind: str) -> None:
    truth = scale_profile(PROFILE, Speeds(communication=0.5))
    good = [observed(PLAN, truth, seed=seed) for seed in range(3)]
    assert judge_observations(PROFILE, stored(*good)).corrections
    found = judge_observations(PROFILE, stored(*map(WRONG[kind], good)))
    assert found.corrections == ()
    assert len(found.refused) == 3
    mixed = judge_observations(PROFILE, stored(*good, *map(WRONG[kind], good)))
    assert mixed.corrections == judge_observations(PROFILE, stored(*good)).corrections
    assert len(mixed.refused) == 3


def test_observations_that_contradict_each_other_are_refused() -> None:
    slow, fast = (scale_profile(PROFILE, Speeds(communication=one)) for one in (0.4, 1.0))
    mixed = [observed(PLAN, (slow, fast)[n % 2], seed=n) for n in range(10)]
    found = judge_observations(PROFILE, stored(*mixed))
    assert all(one.op != "all_to_all" for one in found.corrections)
    assert any("contradict" in reason for reason in found.refused)


@pytest.mark.parametrize("wrong", ["profile", "strategy"])
def test_observations_of_plans_that_say_nothing_of_the_profile_are_refused(wrong: str) -> None:
    other = measured_profile(noise=0.05)
    plan = make_plan(REQUEST, profile=other)
    if wrong == "strategy":
        plan = replace(PLAN, memory=replace(PLAN.memory, strategy="S4"))
    truth = scale_profile(PROFILE, Speeds(communication=0.5))
    rows = [
        (plan, Stored(id=n, created_at="", value=observed(plan, truth, seed=n)))
        for n in range(1, 4)
    ]
    found = judge_observations(PROFILE, rows)
    assert found.corrections == ()
    assert len(found.refused) == 3


@pytest.mark.parametrize("provenance", ["published", None])
def test_only_a_profile_that_was_measured_is_corrected(
    tmp_path: Path, provenance: str | None
) -> None:
    with open_store(f"{tmp_path}/it.db") as store:
        if provenance:
            store.save_profile(replace(PROFILE, provenance="published"))
        found = update_corrections(store, PROFILE.name)
    assert not found.is_changed
    assert len(found.refused) == 1


CORRECTIONS = (
    Correction(
        op="all_to_all", group_size=4, size=2**21, factor=2.0, num_calls=9, num_batches=3
    ),
)  # fmt: skip


def test_corrections_travel_in_a_profiles_file_and_digest() -> None:
    import tomllib

    found = replace(PROFILE, corrections=CORRECTIONS)
    assert profile_from_document(tomllib.loads(profile_to_toml(found))) == found
    other = replace(
        found, corrections=tuple(replace(one, factor=2.1) for one in CORRECTIONS)
    )  # fmt: skip
    digests = {one.digest for one in (PROFILE, found, other)}
    assert len(digests) == 3
    assert all(is_same_but_for_corrections(one, PROFILE.digest) for one in digests)
    assert not is_same_but_for_corrections(PROFILE.digest, measured_profile(noise=0.05).digest)
    text = canonical_json(CORRECTIONS[0])
    assert decode(Correction, __import__("json").loads(text), "correction") == CORRECTIONS[0]


def test_a_plan_of_a_corrected_profile_says_which_of_its_operations_are_corrected() -> None:
    elsewhere = replace(CORRECTIONS[0], op="all_reduce")
    one = make_plan(REQUEST, profile=replace(PROFILE, corrections=(*CORRECTIONS, elsewhere)))
    new: Sequence[str] = [text for text in one.warnings if text not in PLAN.warnings]
    assert sum("all_to_all of 4 ranks × 2.00" in text for text in new) == 1
    assert not any("all_reduce" in text for text in new)
