"""The store's contract, run on SQLite and on a real PostgreSQL."""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetune.domain.cluster import Fingerprint
from moetune.domain.errors import InputError, NotFoundError
from moetune.domain.plan import Decision
from moetune.domain.records import LONGEST_SECONDS, SHORTEST_SECONDS, Removed, Settled
from moetune.domain.samples import GemmPoint, Sample
from moetune.store import SqlStore, check, open_store
from moetune.store.rows import utc_now
from tests.store.values import CLUSTER, MEASURED, execute, make_plan, make_profile, observed_run
from tests.training_plans import training_plan


def settled(plan_id: str, *seconds: float, tokens: int = 2**33) -> Settled:
    decision = Decision(forward_degree=4, backward_degree=3, order="interleaved", strategy="S4")
    return Settled(plan_id=plan_id, hardware_id="0123456789abcdef", memory_reuse=None,
                   tokens_per_rank=tokens, decision=decision, seconds=seconds or (1 / 3, 0.1 + 0.2),
                   planned_seconds=1.0000000000000002e-9, num_steps=23)  # fmt: skip


def test_runs_are_listed_newest_first_with_what_they_hold(store: SqlStore) -> None:
    first = store.start_run(name="one", cluster=CLUSTER, preset="quick")
    second = store.start_run(name="two", cluster=CLUSTER, preset="full")
    store.add_samples(first, MEASURED)
    store.finish_run(first, status="complete")
    newest, oldest = store.runs()
    assert (newest.id, newest.name, newest.preset) == (second, "two", "full")
    assert (newest.status, newest.num_samples) == ("running", 0)
    assert (oldest.status, oldest.num_samples) == ("complete", len(MEASURED))
    assert (oldest.device, oldest.num_devices) == ("NVIDIA H200", 8)
    assert oldest.provenance == "measured"
    assert oldest.created_at.endswith("+00:00")
    assert newest.created_at > oldest.created_at


def test_open_run_is_the_latest_of_this_software_that_is_not_complete(store: SqlStore) -> None:
    fingerprint = CLUSTER.fingerprint
    assert store.open_run(name="h200", fingerprint=fingerprint) is None
    run_id = store.start_run(name="h200", cluster=CLUSTER, preset="quick")
    assert store.open_run(name="h200", fingerprint=fingerprint) == run_id
    updated = replace(fingerprint, software={"torch": "99.0"})
    assert store.open_run(name="h200", fingerprint=updated) is None
    store.finish_run(run_id, status="partial")
    assert store.open_run(name="h200", fingerprint=fingerprint) == run_id
    store.finish_run(run_id, status="complete")
    assert store.open_run(name="h200", fingerprint=fingerprint) is None


def test_observed_runs_come_back_exactly_and_by_what_they_are_of(store: SqlStore) -> None:
    given = [observed_run(), observed_run(target="torchtitan", memory_bytes=None),
             observed_run(profile_fingerprint="e" * 64, plan_id="ab")]  # fmt: skip
    numbers = [store.add_observed_run(run) for run in given]
    assert [row.value for row in store.observed_runs()] == given[::-1]
    of_profile = store.observed_runs(profile_fingerprint="f" * 64)
    assert [row.id for row in of_profile] == numbers[1::-1]
    assert [row.id for row in store.observed_runs(plan_id="ab")] == numbers[2:]
    assert len(store.observed_runs(target="megatron", limit=1)) == 1
    with pytest.raises(NotFoundError, match="r99"):
        store.remove_observed_runs([numbers[0], 99])
    assert store.remove_observed_runs(numbers[:2]) == 2
    assert [row.id for row in store.observed_runs()] == numbers[2:]
    for wrong in ({"seconds": math.nan}, {"predicted_seconds": 0.0}, {"world_size": 0}):
        with pytest.raises(InputError):
            observed_run(**wrong)


def test_a_run_that_is_not_there_is_named(store: SqlStore) -> None:
    for call in (
        lambda: store.add_samples(17, MEASURED), lambda: store.finish_run(17, status="complete"),
        lambda: store.samples(17), lambda: store.save_profile(make_profile(), run_id=17),
    ):  # fmt: skip
        with pytest.raises(InputError, match="17"):
            call()


def test_samples_added_after_a_fit_do_not_change_it(store: SqlStore) -> None:
    run_id = store.start_run(name="h200-x8", cluster=CLUSTER, preset="quick")
    store.add_samples(run_id, MEASURED[:2])
    profile = make_profile(samples=MEASURED[:2])
    store.save_profile(profile, run_id=run_id)
    store.add_samples(run_id, MEASURED[2:])
    assert store.profile("h200-x8") == profile
    store.save_profile(make_profile(samples=MEASURED), run_id=run_id)
    assert store.profile("h200-x8") == make_profile(samples=MEASURED)


def test_a_fitted_profile_with_samples_that_are_not_its_runs_is_refused(store: SqlStore) -> None:
    run_id = store.start_run(name="h200-x8", cluster=CLUSTER, preset="quick")
    with pytest.raises(InputError, match=f"other samples than run {run_id}"):
        store.save_profile(make_profile(samples=MEASURED), run_id=run_id)
    assert store.profile("h200-x8") is None


def test_an_imported_profile_comes_back_exactly(store: SqlStore) -> None:
    profile = replace(
        make_profile("rtx", samples=MEASURED), provenance="published", citation="PipeMoE, Fig. 6"
    )
    store.save_profile(profile)
    assert store.profile("rtx") == profile
    (run,) = store.runs()
    assert (run.provenance, run.status, run.num_samples) == ("published", "complete", 5)


def test_published_profiles_without_a_fingerprint_keep_their_machines(store: SqlStore) -> None:
    for name, devices in (("x16", 16), ("x64", 64)):
        profile = make_profile(name)
        machine = replace(profile.machine, num_devices=devices)
        store.save_profile(replace(profile, machine=machine, fingerprint=Fingerprint()))
    assert [run.num_devices for run in store.runs()] == [64, 16]


def test_the_newest_profile_of_a_name_is_current(store: SqlStore) -> None:
    for beta in (1e-12, 3e-12, 2e-12):
        store.save_profile(make_profile(beta=beta))
    assert store.profile("h200-x8") == make_profile(beta=2e-12)
    assert len(store.runs()) == 3


def test_removing_a_profile_takes_its_runs_and_nothing_else(store: SqlStore) -> None:
    store.save_profile(make_profile("kept", samples=MEASURED))
    store.save_profile(make_profile("gone", samples=MEASURED))
    run_id = store.start_run(name="gone", cluster=CLUSTER, preset="quick")
    assert store.remove_profile("gone") == 2
    assert store.remove_profile("gone") == 0
    assert store.profile("gone") is None
    assert [run.name for run in store.runs()] == ["kept"]
    assert store.profile("kept") == make_profile("kept", samples=MEASURED)
    with pytest.raises(InputError, match=f"no run {run_id}"):
        store.add_samples(run_id, MEASURED)


def test_the_id_of_a_removed_run_is_never_given_again(store: SqlStore) -> None:
    removed = store.start_run(name="gone", cluster=CLUSTER, preset="quick")
    store.remove_profile("gone")
    assert store.start_run(name="new", cluster=CLUSTER, preset="quick") > removed


@pytest.mark.parametrize("digit", ["0", "f"])
def test_a_plan_comes_back_exactly_by_any_prefix_whatever_digit_follows(
    store: SqlStore, digit: str
) -> None:
    plan = next(made for made in map(make_plan, itertools.count(1)) if made.id[2] == digit)
    store.save_plan(plan)
    for length in (1, 2, 3, 63, 64):
        assert store.plan(plan.id[:length]) == plan
        assert store.plan_id(plan.id[:length]) == plan.id


@pytest.mark.parametrize("prefix", ["", "%", "_", "z", "A", "0" * 65, "'"])
def test_what_is_no_prefix_of_an_id_finds_nothing(store: SqlStore, prefix: str) -> None:
    store.save_plan(make_plan())
    assert store.plan(prefix) is None


def test_a_prefix_of_several_plans_is_ambiguous_and_names_them(store: SqlStore) -> None:
    plans = [make_plan(tokens) for tokens in range(1, 40)]
    for plan in plans:
        store.save_plan(plan)
    first = plans[0].id[0]
    with pytest.raises(InputError, match="ambiguous") as caught:
        store.plan(first)
    same = sorted(plan.id for plan in plans if plan.id.startswith(first))
    assert same[1][:8] in str(caught.value)
    assert store.plan(same[1]) is not None


def test_a_removed_plan_takes_what_was_settled_under_it(store: SqlStore) -> None:
    kept, gone = make_plan(1), make_plan(2)
    for plan in (kept, gone):
        store.save_plan(plan)
        store.add_settled(settled(plan.id))
    assert store.remove_plans([gone.id]) == Removed(plans=1, settled=1)
    assert store.plan(gone.id) is None
    assert store.settled(gone.id) == ()
    assert store.plan(kept.id) == kept
    assert len(store.settled(kept.id)) == 1


def test_nothing_is_removed_where_any_is_not_stored(store: SqlStore) -> None:
    plan = make_plan(1)
    store.save_plan(plan)
    with pytest.raises(NotFoundError, match="'abababababab'"):
        store.remove_plans([plan.id, "ab" * 32])
    assert store.plan(plan.id) == plan


def test_pruning_takes_what_is_older_and_keeps_plans_that_are_in_use(store: SqlStore) -> None:
    unused, used, settling, new = map(make_plan, range(1, 5))
    for plan in (unused, used, settling):
        store.save_plan(plan)
    for plan in (unused, used):
        store.add_settled(settled(plan.id))
    time.sleep(0.01)
    then = utc_now()
    store.save_plan(new)
    for plan in (used, settling):
        store.add_settled(settled(plan.id, 2.0))
    old = Removed(plans=1, settled=2)
    assert store.prune(then, dry_run=True) == old
    assert len(store.plans()) == 4
    assert store.prune(then) == old
    assert {plan.id for plan in store.plans()} == {used.id, settling.id, new.id}
    assert store.settled(used.id) == (settled(used.id, 2.0),)
    assert store.prune(then) == Removed(plans=0, settled=0)


def test_times_that_nothing_takes_are_refused_wherever_they_enter(store: SqlStore) -> None:
    plan = make_plan(1)
    store.save_plan(plan)
    run_id = store.start_run(name="h200", cluster=CLUSTER, preset="quick")
    point = GemmPoint(dtype="float32", rows=1, d_in=1, d_out=1)
    sample = Sample(point=point, seconds=(1.0, 1e308))
    calls: tuple[Callable[[], object], ...] = (
        lambda: store.add_settled(settled(plan.id, 1e308)),
        lambda: store.add_settled(settled(plan.id, 5e-324)),
        lambda: store.save_plan(make_plan(2, step_seconds=1e-320)),
        lambda: store.add_samples(run_id, [sample]),
        lambda: store.save_profile(make_profile(samples=(sample,))),
        lambda: store.save_profile(make_profile(beta=1e300)),
    )
    for call in calls:
        with pytest.raises(InputError, match="which no"):
            call()
    assert len(store.plans()) == 1
    assert store.current_fit("h200-x8") is None
    assert (store.samples(run_id), store.settled(plan.id)) == ((), ())


def test_what_searches_decided_comes_back_exactly_and_every_time(store: SqlStore) -> None:
    for tokens in (1, 2):
        store.save_plan(make_plan(tokens))
    first, second = make_plan(1).id, make_plan(2).id
    made = [
        settled(first),
        replace(settled(first, 9999999.999999998), memory_reuse="S4"),
        replace(
            settled(first), decision=Decision(forward_degree=2, backward_degree=1, strategy="S3")
        ),
        settled(first),
    ]
    store.add_settled(made[0])
    store.add_settled(settled(second, tokens=7))
    for other in made[1:]:
        store.add_settled(other)
    assert store.settled(first) == tuple(made)
    assert store.settled(second) == (settled(second, tokens=7),)


def test_a_decision_that_another_program_changed_is_named(store: SqlStore, url: str) -> None:
    store.save_plan(make_plan())
    store.add_settled(settled(make_plan().id))
    execute(url, "UPDATE settled SET strategy = 'S9'")
    with pytest.raises(InputError, match=r"settled size 1.*S9"):
        store.settled(make_plan().id)
    assert any("settled size 1" in problem for problem in check(url))


def test_values_that_no_column_holds_are_refused(store: SqlStore) -> None:
    for machine, name in (
        (replace(CLUSTER.machine, memory_bytes=2**70), "big"),
        (CLUSTER.machine, "half a character \ud800"),
    ):
        with pytest.raises(InputError, match="cannot hold this value"):
            store.start_run(name=name, cluster=replace(CLUSTER, machine=machine), preset="quick")
    assert store.runs() == ()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seconds=st.lists(st.floats(SHORTEST_SECONDS, LONGEST_SECONDS), min_size=1),
    marks=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9)),
)
def test_any_sample_comes_back(store: SqlStore, seconds: list[float], marks: list[str]) -> None:
    sample = Sample(
        point=GemmPoint(dtype="float32", rows=1, d_in=1, d_out=1),
        seconds=tuple(seconds),
        marks=tuple(marks),
    )
    run_id = store.start_run(name="any", cluster=CLUSTER, preset="quick")
    store.add_samples(run_id, [sample])
    assert store.samples(run_id) == (sample,)


def test_a_read_only_store_refuses_to_write(url: str) -> None:
    open_store(url).close()
    with open_store(url, read_only=True) as store:
        with pytest.raises(Exception, match="read-only"):
            store.start_run(name="h200", cluster=CLUSTER, preset="quick")
        with pytest.raises(Exception, match="read-only"):
            store.save_plan(make_plan())
        assert store.runs() == ()


def test_a_training_plan_comes_back_exactly(store: SqlStore) -> None:
    plan = training_plan()
    store.save_plan(plan)
    store.save_plan(plan)
    store.save_plan(make_plan())
    assert store.plan(plan.id) == store.plan("0123") == plan
    assert store.plan(make_plan().id) == make_plan()
    [info] = [row for row in store.plans() if row.id == plan.id]
    assert (info.model, info.profile, info.world_size) == ("olmoe", "h100-x8", 16)
    assert info.tokens_per_rank == 64 * 4096 // 16
    later = training_plan(trust="measured")
    store.save_plan(later)
    assert store.plan(plan.id) == later
    assert store.remove_plans([plan.id]).plans == 1
    assert store.plan(plan.id) is None
