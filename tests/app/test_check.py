"""A profile that was measured here is checked by real measurements."""

from dataclasses import replace
from pathlib import Path

import pytest

from moetune.app.profile import profile_machine
from moetune.app.profile_request import MeasurementSetting, ProfileRequest
from moetune.app.recording import Progress
from moetune.app.staleness import check_profile
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.profile import Profile
from moetune.store import open_store

pytestmark = pytest.mark.unmeasured

SETTING = MeasurementSetting(environment={})


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    request = ProfileRequest(
        name="here", num_ranks=1, dtypes=("float32",), max_tokens=256, budget_seconds=6.0,
        layers=(LayerShape(d_model=64, d_hidden=128, num_experts=2),),
    )  # fmt: skip
    with open_store(f"{tmp_path_factory.mktemp('check')}/m.db") as store:
        return profile_machine(request, SETTING, store=store, progress=Progress()).profile


def test_a_profile_that_holds_is_stored_with_the_software_of_now(
    profile: Profile, tmp_path: Path
) -> None:
    old = replace(profile.fingerprint, software={**profile.fingerprint.software, "torch": "1.0"})
    with open_store(f"{tmp_path}/m.db") as store:
        store.save_profile(replace(profile, fingerprint=old))
        check = check_profile(replace(profile, fingerprint=old), SETTING, store=store)
        found = store.profile("here")
    assert check is not None
    assert check.points
    assert found is not None
    is_kept = found.fingerprint == profile.fingerprint
    assert is_kept == (check.verdict == "keep")


def test_a_profile_of_a_machine_ten_times_as_fast_does_not_hold(
    profile: Profile, tmp_path: Path
) -> None:
    samples = tuple(
        replace(one, seconds=tuple(seconds / 10 for seconds in one.seconds))
        for one in profile.samples
    )
    with open_store(f"{tmp_path}/m.db") as store:
        check = check_profile(replace(profile, samples=samples), SETTING, store=store)
        assert store.profile("here") is None
    assert check is not None
    assert check.verdict == "measure"


def test_a_profile_of_another_machine_is_refused(profile: Profile, tmp_path: Path) -> None:
    hardware = {**profile.fingerprint.hardware, "cpu": "another"}
    other = replace(profile, fingerprint=replace(profile.fingerprint, hardware=hardware))
    with open_store(f"{tmp_path}/m.db") as store, pytest.raises(InputError, match="here"):
        check_profile(other, SETTING, store=store)
