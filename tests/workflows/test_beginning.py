"""What a run of a profile that has samples begins with."""

from dataclasses import replace
from pathlib import Path

import pytest

from moetune.domain.cluster import Cluster
from moetune.domain.corrections import Correction
from moetune.domain.errors import ProfileError
from moetune.domain.ports import Store
from moetune.domain.profile import Profile
from moetune.domain.samples import CollectivePoint, CopyPoint, GemmPoint, Sample
from moetune.store import open_store
from moetune.workflows.beginning import added_to, still_correct
from tests.fit.measured import FINGERPRINT, MACHINE, measured_profile

CLUSTER = Cluster(machine=MACHINE, fingerprint=FINGERPRINT)
NEW = Sample(point=GemmPoint(dtype="float32", rows=7, d_in=8, d_out=8), seconds=(1e-3,))
FAILED = Sample(
    point=GemmPoint(dtype="float32", rows=9, d_in=8, d_out=8), seconds=(), error="no memory"
)


@pytest.fixture
def profile() -> Profile:
    return measured_profile()


def unfinished(store: Store, *samples: Sample) -> int:
    run = store.start_run(name="lab", cluster=CLUSTER, preset="quick")
    store.add_samples(run, samples)
    store.finish_run(run, status="partial")
    return run


def test_what_adds_to_a_profile_begins_with_its_samples(tmp_path: Path, profile: Profile) -> None:
    with open_store(f"{tmp_path}/m.db") as store:
        store.save_profile(profile)
        found = added_to(store, "lab", CLUSTER)
        assert (found.run_id, found.known, found.done) == (None, profile.samples, frozenset())
        unfinished(store, NEW)  # of another measurement, which began anew
        assert added_to(store, "lab", CLUSTER) == found


def test_an_interrupted_addition_goes_on_with_what_is_left(
    tmp_path: Path, profile: Profile
) -> None:
    with open_store(f"{tmp_path}/m.db") as store:
        store.save_profile(profile)
        run = unfinished(store, *profile.samples, NEW, FAILED)
        found = added_to(store, "lab", CLUSTER)
        assert found.run_id == run
        assert found.known == (*profile.samples, NEW, FAILED)
        assert found.done == {NEW.point}


def test_a_profile_that_is_not_in_the_store_cannot_be_added_to(tmp_path: Path) -> None:
    with open_store(f"{tmp_path}/m.db") as store, pytest.raises(ProfileError, match="'lab'"):
        added_to(store, "lab", CLUSTER)


def test_corrections_hold_until_their_operation_is_measured_again() -> None:
    def correction(op: str, ranks: int) -> Correction:
        return Correction(
            op=op,  # type: ignore[arg-type]  # one of them
            group_size=ranks, size=2**14, factor=1.1, num_calls=9, num_batches=3,
        )  # fmt: skip

    exchange, forward, backward = known = (
        correction("all_to_all", 2), correction("experts_forward", 0),
        correction("experts_backward", 0),
    )  # fmt: skip
    other = CollectivePoint(op="all_to_all", group_size=4, num_bytes=64)
    copy = CopyPoint(direction="h2d", pinned=True, num_bytes=64)
    assert still_correct(known, frozenset({other, copy})) == known
    again = replace(other, group_size=2)
    assert still_correct(known, frozenset({again})) == (forward, backward)
    product = GemmPoint(dtype="float32", rows=8, d_in=8, d_out=8)
    assert still_correct(known, frozenset({product})) == (exchange, backward)
    gradient = replace(product, product="grad_weight")
    assert still_correct(known, frozenset({gradient})) == (exchange, forward)
