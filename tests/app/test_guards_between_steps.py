"""What one step of the work accepts of another: samples, profiles, measured steps."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import moetune.app.profile as measuring
from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.plan import make_plan
from moetune.app.planner import Planner
from moetune.app.profile_request import ProfileRequest, detect_cluster
from moetune.app.recording import Progress, RecordedRun, resume_state
from moetune.app.sources import Sources
from moetune.config import Launch
from moetune.domain.cluster import HOST_MEMORY, Cluster, Fingerprint, Machine
from moetune.domain.errors import ProfileError
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Plan
from moetune.domain.profile import GemmLine, Profile
from moetune.domain.question import Question
from moetune.domain.samples import CopyPoint, Point, Sample
from moetune.domain.site import site_of
from moetune.measure.session import Assignment, Estimates
from moetune.store import SqlStore, open_store

NAME = "rtx2080ti-x64"
SMALL, LARGE = (CopyPoint(direction="h2d", pinned=True, num_bytes=2**size) for size in (20, 21))


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "moetune.db")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile_file(bundled_profiles()[NAME])


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return make_plan(Question(model="gpt-s"), profile=profile)


def with_slower_products(profile: Profile) -> Profile:
    slower = [
        replace(line, beta_seconds_per_mac=2 * line.beta_seconds_per_mac) for line in profile.gemm
    ]
    return replace(profile, gemm=tuple(slower))


def test_the_profile_behind_a_plan_is_that_it_was_made_from_or_none(
    database: str, plan: Plan, profile: Profile, tmp_path: Path
) -> None:
    @contextmanager
    def stores() -> Iterator[SqlStore]:
        with open_store(database) as store:
            yield store

    def planner(named: str | None = None) -> Planner:
        return Planner(sources=Sources(stores=stores, named=named))

    assert planner().explain(plan).profile == profile
    with stores() as store:
        store.save_profile(with_slower_products(profile))
    assert planner().explain(plan).profile is None
    with pytest.raises(ProfileError, match=f"{NAME}.*{plan.id[:6]}"):
        planner(NAME).explain(plan)
    inputs = replace(plan.inputs, profile="of-nobody")
    gone = replace(plan, inputs=inputs, id=inputs.plan_id)
    assert planner().explain(gone).profile is None
    same = tmp_path / "same.toml"
    same.write_bytes(bundled_profiles()[NAME].read_bytes())
    assert planner(str(same)).explain(plan).profile == profile


REQUEST = ProfileRequest(
    name="lab", dtypes=("float32",), max_tokens=64,
    layers=(LayerShape(d_model=16, d_hidden=32, num_experts=2),), environment=dict(os.environ),
)  # fmt: skip


def test_a_launch_says_the_ranks_of_its_cluster() -> None:
    launch = Launch(
        rank=0, world_size=4, local_rank=0, local_world_size=2, master_addr="x", master_port=1
    )
    machine = detect_cluster(replace(REQUEST, launch=launch)).machine
    assert (machine.num_devices, machine.devices_per_node) == (4, 2)


def points_left(store: SqlStore) -> set[Point]:
    """Return the points that a resumed measurement hands to its ranks."""
    cluster, assigned = detect_cluster(REQUEST), list[Assignment]()
    begun = resume_state(store, "lab", cluster)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measuring, "measure_on_ranks", lambda given, *_: assigned.append(given))
        measuring._measure(REQUEST, cluster, begun.done, print)
    return set(assigned[0].points)


def test_resumed_measuring_omits_what_has_times_and_nothing_that_failed(database: str) -> None:
    cluster = detect_cluster(REQUEST)
    with open_store(database) as store:
        everything = sorted(points_left(store), key=repr)
        timed, failed = everything[:5], everything[5:8]
        run = store.start_run(name="lab", cluster=cluster, preset="quick")
        store.add_samples(run, [Sample(point=point, seconds=(1e-3,)) for point in timed])
        wrong = [Sample(point=point, seconds=(), error="out of memory") for point in failed]
        store.add_samples(run, wrong)
        assert points_left(store) == set(everything) - set(timed)


@pytest.mark.parametrize("is_other", [False, True])
def test_resumed_measuring_takes_samples_of_this_machine(database: str, *, is_other: bool) -> None:
    cluster = detect_cluster(REQUEST)
    fingerprint = cluster.fingerprint
    if is_other:
        software = {**fingerprint.software, "torch": "1.0"}
        fingerprint = Fingerprint(hardware=fingerprint.hardware, software=software)
    with open_store(database) as store:
        everything = points_left(store)
        known = min(everything, key=repr)
        finished = Profile(
            name="lab", provenance="measured", machine=cluster.machine, fingerprint=fingerprint,
            gemm=(GemmLine(dtype="float32", alpha_seconds=1e-5, beta_seconds_per_mac=1e-12),),
            samples=(Sample(point=known, seconds=(1e-3,)),),
        )  # fmt: skip
        store.save_profile(finished)
        assert points_left(store) == (everything if is_other else everything - {known})


@pytest.mark.parametrize(
    ("kind", "known", "expected"),
    [("cpu", "", 3 * 2**30), ("cuda", "77", 77), ("cuda", "", None), ("cuda", "much", None)],
)
def test_the_hosts_memory_is_that_of_all_devices_of_a_node_or_what_the_profile_knows(
    profile: Profile, kind: str, known: str, expected: int | None
) -> None:
    machine = Machine(
        kind=kind,  # type: ignore[arg-type]  # one of the two kinds
        device="any", num_devices=12, devices_per_node=3, memory_bytes=2**30,
    )  # fmt: skip
    fingerprint = Fingerprint(hardware={HOST_MEMORY: known} if known else {}, software={})
    changed = replace(profile, machine=machine, fingerprint=fingerprint)
    assert site_of(changed).host_memory_bytes == expected


class LeftSeconds(Progress):
    """Remembers the time left that is shown."""

    def __init__(self) -> None:
        self.total = 0.0
        self.left: list[float] = []

    def start(self, groups: Mapping[str, int], seconds: float) -> None:
        assert groups
        self.total = seconds

    def advance(self, sample: Sample, group: str, seconds_left: float) -> None:
        assert sample.seconds
        assert group
        self.left.append(seconds_left)


def test_the_time_left_is_that_of_all_visits_and_never_negative(
    profile: Profile, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    shown = LeftSeconds()
    cluster = Cluster(machine=profile.machine, fingerprint=profile.fingerprint)
    with open_store(database) as store:
        run = RecordedRun(store, name="lab", cluster=cluster, preset="quick", progress=shown)
        run.receive(Estimates(seconds={SMALL: 1.0, LARGE: 2.0}, total_seconds=7.0))
        now += 3.0
        run.receive(Sample(point=SMALL, seconds=(1.0,)))
        now += 5.0
        run.receive(Sample(point=LARGE, seconds=(1.0,)))
    assert shown.total == 7.0
    assert shown.left == [4.0, 0.0]
