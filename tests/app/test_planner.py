"""The planner: from inputs to stored plans, by many threads at once."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetune.app import planner as planner_module
from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.plan import make_plan, plan_for
from moetune.app.planner import ServicePlanner, open_planner
from moetune.app.whatif import WhatIf, whatif
from moetune.config import Settings
from moetune.domain.document import canonical_json, encode
from moetune.domain.errors import (
    AbandonedError,
    InfeasiblePlanError,
    InputError,
    MoetuneError,
    NotFoundError,
    ProfileError,
    StoreUnavailableError,
)
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.question import Question
from moetune.domain.request import PlanInputs
from moetune.domain.spelling import AS_FIELDS
from moetune.store import storable
from tests.fit.measured import measured_profile
from tests.store.values import observed_run

NUM_THREADS = 16
PUBLISHED = "rtx2080ti-x64"
ASKED = {"model": "gpt-s", "profile": PUBLISHED}
MEASURED = measured_profile()
LAYER = {"d_model": 512, "d_hidden": 2048, "num_experts": 4}
QUICK = {"max-degree": "4", "strategy": "none"}
DEGREES = {"constraints": {"max-degree": "257"}}


@pytest.fixture
def planner(tmp_path: Path) -> Iterator[ServicePlanner]:
    with open_planner(Settings(db=str(tmp_path / "moetune.db"))) as opened:
        yield opened


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[PlanInputs]:
    """All inputs that were solved for."""
    solved: list[PlanInputs] = []

    def count(inputs: PlanInputs, profile: Profile) -> Plan:
        solved.append(inputs)
        time.sleep(0.05)
        return plan_for(inputs, profile)

    monkeypatch.setattr(planner_module, "plan_for", count)
    return solved


def test_a_question_gets_the_plan_of_the_command_line_and_is_kept(planner: ServicePlanner) -> None:
    plan = planner.resolve(ASKED)
    profile = load_profile_file(bundled_profiles()[PUBLISHED])
    assert plan == make_plan(Question(model="gpt-s"), profile=profile)
    assert planner.reading.plan_documents([plan.id]) == {plan.id: canonical_json(plan)}


def test_a_known_question_is_not_solved_again_however_it_is_asked(
    planner: ServicePlanner, solved: list[PlanInputs]
) -> None:
    plan = planner.resolve(ASKED)
    assert planner.resolve(ASKED) == plan
    assert planner.resolve(encode(plan.inputs)) == plan
    assert planner.resolve({**ASKED, "world_size": 64, "constraints": {"max-degree": "64"}}) == plan
    assert len(solved) == 1
    other = planner.resolve({**ASKED, "tokens_per_rank": 4096})
    assert other.id != plan.id
    assert len(solved) == 2


def test_a_measured_profile_is_the_default_and_the_newest_counts(
    planner: ServicePlanner, solved: list[PlanInputs]
) -> None:
    asked = {"layer": LAYER, "tokens_per_rank": 512, "constraints": QUICK}
    with pytest.raises(ProfileError, match="none was measured yet"):
        planner.resolve(asked)
    planner.store.save_profile(MEASURED)
    first = planner.resolve(asked)
    assert (first.inputs.profile, first.inputs.profile_fingerprint) == ("lab", MEASURED.digest)
    assert planner.resolve(asked) == first
    faster = replace(MEASURED, samples=MEASURED.samples[:-1])
    planner.store.save_profile(faster)
    second = planner.resolve(asked)
    assert second.inputs.profile_fingerprint == faster.digest
    assert len(solved) == 2
    with pytest.raises(InputError, match="fingerprint"):
        planner.resolve(encode(first.inputs))
    planner.store.remove_profile("lab")
    with pytest.raises(ProfileError, match="'lab' is unknown"):
        planner.resolve({**asked, "profile": "lab"})


def test_settings_say_what_is_planned_with_where_nothing_is_asked_for(tmp_path: Path) -> None:
    db = str(tmp_path / "moetune.db")
    with open_planner(Settings(db=db, profile=PUBLISHED, dtype="float16")) as planner:
        plan = planner.resolve({"model": "gpt-s"})
        assert (plan.inputs.profile, plan.inputs.dtype) == (PUBLISHED, "float16")
        other = {"model": "gpt-s", "profile": "rtx2080ti-x32", "dtype": "float32"}
        inputs = planner.resolve(other).inputs
        assert (inputs.profile, inputs.dtype) == ("rtx2080ti-x32", "float32")
    with (
        pytest.raises(InputError, match="profile"),
        open_planner(Settings(db=db, profile="lab.toml")),
    ):
        pass


@pytest.mark.parametrize("name", ["rtx", "../rtx2080ti-x64", "./moetune.toml", "x.toml"])
def test_nobody_outside_names_a_file(planner: ServicePlanner, name: str) -> None:
    with pytest.raises((InputError, ProfileError)) as caught:
        planner.resolve({"model": "gpt-s", "profile": name})
    assert "cannot be read" not in str(caught.value)


def test_a_stored_plan_whose_profile_is_called_like_a_file_reads_no_file(
    planner: ServicePlanner, tmp_path: Path
) -> None:
    path = tmp_path / "secret.toml"
    path.write_text("secret = 1")
    profile = replace(load_profile_file(bundled_profiles()[PUBLISHED]), name=str(path))
    plan = make_plan(Question(model="gpt-s"), profile=profile)
    planner.store.save_plan(plan)
    assert "there is no profile" in planner.explain(plan).missing
    with pytest.raises(ProfileError, match="there is no profile"):
        planner.trace(plan)


@pytest.mark.parametrize("plan_id", ["ab" * 32, "", "nothing", "%", "0" * 10**5, "\0", "\ud800"])
def test_a_plan_that_is_not_there_is_not_found(planner: ServicePlanner, plan_id: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        planner.sources.plan(plan_id)
    assert len(str(caught.value)) < 300


def test_reading_cannot_write(planner: ServicePlanner) -> None:
    plan = planner.resolve(ASKED)
    with pytest.raises(MoetuneError, match="read-only"):
        planner.reading.save_plan(plan)
    with pytest.raises(MoetuneError, match="read-only"):
        planner.reading.add_observed_run(observed_run())


def test_the_planner_is_ready_until_its_database_is_gone_and_again_when_it_is_back(
    planner: ServicePlanner, tmp_path: Path
) -> None:
    assert planner.problems() == ()
    plan = planner.resolve(ASKED)
    file, away = tmp_path / "moetune.db", tmp_path / "away.db"
    file.rename(away)
    (problem,) = planner.problems()
    assert "cannot be opened" in problem
    with pytest.raises(StoreUnavailableError):
        planner.resolve(ASKED)
    away.rename(file)
    assert planner.problems() == ()
    assert planner.resolve(ASKED) == plan


@pytest.mark.parametrize(("question", "part"), [
    (WhatIf(), "nothing is changed"),
    (WhatIf(changes={"degrees": 2}), "changes.constraints.degrees is no flag of a plan"),
    (WhatIf(speeds={"network": 2.0}), "unknown key 'network'"),
    (WhatIf(changes=DEGREES), "changes.constraints.max-degree must be from 1"),
    (WhatIf(changes=DEGREES, spelling=AS_FIELDS), "max-degree must be from 1"),
])  # fmt: skip
def test_a_wrong_what_if_is_named(planner: ServicePlanner, question: WhatIf, part: str) -> None:
    with pytest.raises(InputError) as caught:
        whatif(planner, planner.draft(ASKED), question)
    assert part in str(caught.value)


def test_a_profile_with_absurd_numbers_is_to_blame_for_what_cannot_be_computed(
    planner: ServicePlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = load_profile_file(bundled_profiles()[PUBLISHED])
    (line,) = published.collective
    endless = replace(line, alpha_seconds=1.7e308)
    # Stores of versions that did not look have such rows.
    monkeypatch.setattr(storable, "check", lambda _: None)
    planner.store.save_profile(replace(published, name="absurd", collective=(endless,)))
    with pytest.raises(ProfileError, match="'absurd'"):
        planner.resolve({**ASKED, "profile": "absurd"})
    assert planner.reading.plans() == ()


SMALL = st.fixed_dictionaries(
    {"profile": st.just(PUBLISHED)},
    optional={
        "model": st.sampled_from(["gpt-s", "tm-1", "gpt-2.7b", "none"]),
        "layer": st.fixed_dictionaries(
            {"d_model": st.integers(0, 2**20), "d_hidden": st.integers(0, 2**20),
             "num_experts": st.sampled_from([0, 1, 64, 128, 2**20])}
        ),
        "world_size": st.sampled_from([1, 2, 64, 2**20]),
        "tokens_per_rank": st.integers(0, 2**31),
        "dtype": st.sampled_from(["float32", "float16", "float64"]),
        "memory_limit_bytes": st.integers(1, 2**50),
        "constraints": st.dictionaries(
            st.sampled_from(
                ["max-degree", "forward-degree", "strategy", "order", "expert-parallel", "tp",
                 "allow-modelled", "memory-taken", "zero"]
            ),
            st.sampled_from(["0", "1", "8", "256", "true", "tensor", "S4", "interleaved"]),
            max_size=3,
        ),
    },
)  # fmt: skip


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(document=SMALL)
def test_any_question_of_the_right_form_is_answered_or_refused_with_a_reason(
    planner: ServicePlanner, document: Mapping[str, object]
) -> None:
    plan: Plan | None = None
    with suppress(InputError, InfeasiblePlanError, ProfileError):
        plan = planner.resolve(document)
    assert plan is None or planner.reading.plan(plan.id) == plan


def asked_at_once(planner: ServicePlanner) -> list[Plan | MoetuneError]:
    def ask(_: int) -> Plan | MoetuneError:
        try:
            return planner.resolve(ASKED)
        except MoetuneError as error:
            return error

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return [*threads.map(ask, range(NUM_THREADS))]


def test_a_question_that_many_ask_at_once_is_solved_once(
    planner: ServicePlanner, solved: list[PlanInputs]
) -> None:
    plans = asked_at_once(planner)
    assert len(solved) == 1
    assert plans == [planner.resolve(ASKED)] * NUM_THREADS


def test_only_who_hangs_up_stays_without_an_answer(
    planner: ServicePlanner, solved: list[PlanInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_first(inputs: PlanInputs, profile: Profile) -> Plan:
        solved.append(inputs)
        if len(solved) == 1:
            raise AbandonedError("nobody waits for the answer", "ask again")
        return plan_for(inputs, profile)

    monkeypatch.setattr(planner_module, "plan_for", end_first)
    answers = asked_at_once(planner)
    assert sum(isinstance(answer, AbandonedError) for answer in answers) == 1
    assert answers.count(planner.resolve(ASKED)) == NUM_THREADS - 1
    assert len(solved) == 2
