"""Profiles in lists, tables and comparisons: every number that one has, and none that it lacks."""

from dataclasses import replace
from typing import Any

import pytest

from moetune.app.files import bundled_profiles
from moetune.app.profiles import find_profile, list_profiles, newest_measured, remove_profile
from moetune.app.wiring import StoreFinder
from moetune.domain.cluster import Cluster
from moetune.domain.errors import ProfileError
from moetune.domain.profile import FitError, Profile, ProfileQuality, SuspectGroup
from moetune.domain.samples import Quality, RowsPoint
from moetune.fit.quality import quality_of
from tests.fit.measured import FINGERPRINT, MACHINE
from tests.report.lab import lab_profile

LINES = ("gemm", "collective", "copy")


def with_error(profile: Profile, error: FitError | None) -> Profile:
    kept: dict[str, Any] = {
        name: tuple(replace(line, error=error) for line in getattr(profile, name)) for name in LINES
    }
    return replace(profile, **kept)


def error_of(*, median: float = 0.01, p95: float = 0.02, quality: Quality = "good") -> FitError:
    known = lab_profile().gemm[0].error
    assert known is not None
    return replace(known, median=median, p95=p95, quality=quality)


def test_the_worst_label_of_any_line_is_the_profiles() -> None:
    profile = replace(lab_profile(), samples=())
    assert quality_of(with_error(profile, None)) is None
    good = with_error(profile, error_of(quality="good"))
    assert quality_of(good) == ProfileQuality(label="good")
    labels: tuple[Quality, ...] = ("usable", "suspect")
    for kind in LINES:
        first, *rest = getattr(good, kind)
        for label in labels:
            worse: dict[str, Any] = {kind: (replace(first, error=error_of(quality=label)), *rest)}
            quality = quality_of(replace(good, **worse))
            assert quality is not None
            assert quality.label == label
            assert len(quality.suspect) == (label == "suspect")


def test_a_suspect_group_has_the_errors_of_its_worst_fit() -> None:
    good = with_error(replace(lab_profile(), samples=()), error_of(quality="good"))
    first, *rest = good.copy
    bad = error_of(median=0.2, p95=0.5, quality="suspect")
    quality = quality_of(replace(good, copy=(replace(first, error=bad), *rest)))
    copies = SuspectGroup(group="copies", median_error=0.2, p95_error=0.5)
    assert quality == ProfileQuality(label="suspect", suspect=(copies,))


def test_groups_without_fits_are_judged_by_their_samples() -> None:
    profile = with_error(lab_profile(), error_of(quality="good"))
    rows = [row for row in profile.samples if isinstance(row.point, RowsPoint)]
    assert rows
    marked = tuple(replace(row, marks=("busy",)) if row in rows else row for row in profile.samples)
    quality = quality_of(replace(profile, samples=marked))
    assert quality is not None
    assert quality.suspect == (SuspectGroup(group="memory-bound operations"),)


def test_a_profile_is_listed_as_its_newest_run_with_samples_of_all(stores: StoreFinder) -> None:
    first = lab_profile()
    second = replace(first, machine=replace(first.machine, num_devices=16, device="New GPU"),
                     samples=first.samples[:10])  # fmt: skip
    with stores() as store:
        assert store is not None
        for profile in (first, lab_profile("other"), second):
            store.save_profile(profile)
        listed = [entry for entry in list_profiles(store) if entry.source == "store"]
    assert [entry.name for entry in listed] == ["lab", "other"]
    newest = listed[0]
    assert (newest.num_runs, newest.device, newest.num_devices) == (2, "New GPU", 16)
    assert newest.num_samples == len(first.samples) + 10
    assert newest.created_at > listed[1].created_at


def test_the_newest_measured_profile_is_taken_and_no_published(stores: StoreFinder) -> None:
    with stores() as store:
        assert store is not None
        with pytest.raises(ProfileError):
            newest_measured(store, for_models=False)
        store.save_profile(replace(lab_profile("paper"), provenance="published", citation="a"))
        with pytest.raises(ProfileError):
            newest_measured(store, for_models=False)
        store.save_profile(lab_profile())
        store.save_profile(lab_profile("newer"))
        assert newest_measured(store, for_models=False) == "newer"
        store.save_profile(replace(lab_profile("paper"), provenance="published", citation="a"))
        assert newest_measured(store, for_models=False) == "newer"
    with pytest.raises(ProfileError):
        newest_measured(None, for_models=False)
    assert find_profile(None, stores=stores).profile.name == "newer"
    assert find_profile("lab", stores=stores).source == "store"
    assert find_profile("rtx2080ti-x64", stores=stores).source == "bundled"


def test_suspect_profiles_and_those_of_a_cpu_are_no_default_elsewhere(stores: StoreFinder) -> None:
    good = with_error(replace(lab_profile(), samples=()), error_of(quality="good"))
    suspect = error_of(quality="suspect")
    bad = replace(good, gemm=tuple(replace(line, error=suspect) for line in good.gemm))
    gpus = replace(lab_profile("gpus"), machine=replace(lab_profile().machine, kind="cuda"))
    cpu = replace(lab_profile(), machine=replace(lab_profile().machine, kind="cpu"))
    with stores() as store:
        assert store is not None
        store.save_profile(replace(bad, name="bad", machine=cpu.machine))
        assert newest_measured(store, for_models=False) == "bad"
        with pytest.raises(ProfileError, match="on GPUs") as caught:
            newest_measured(store, for_models=True)
        assert "this one" not in caught.value.hint  # measured again it is no profile of GPUs
        store.save_profile(replace(good, name="good", machine=cpu.machine))
        store.save_profile(replace(bad, name="worse", machine=cpu.machine))
        assert newest_measured(store, for_models=False) == "good"
        store.save_profile(gpus)
        store.save_profile(replace(good, name="newest", machine=cpu.machine))
        assert newest_measured(store, for_models=True) == "gpus"
    assert find_profile(None, stores=stores).profile.name == "newest"
    assert find_profile(None, stores=stores, for_models=True).profile.name == "gpus"


def test_an_unknown_name_is_answered_with_the_nearest_of_all(stores: StoreFinder) -> None:
    with stores() as store:
        assert store is not None
        store.save_profile(lab_profile("cluster-a"))
        for name, near in (("cluster-b", "cluster-a"), ("rtx2080ti-x63", "rtx2080ti-x64")):
            with pytest.raises(ProfileError) as caught:
                find_profile(name, stores=stores)
            assert near in caught.value.hint.partition("?")[0]
        with pytest.raises(ProfileError) as far:
            find_profile("zzz", stores=stores)
        assert "?" not in far.value.hint
        for name in ("cluster-a", *bundled_profiles()):
            assert name in far.value.hint
        with pytest.raises(ProfileError) as bundled:
            remove_profile("rtx2080ti-x64", store=store)
        assert "?" not in bundled.value.hint
        assert remove_profile("cluster-a", store=store) == 1
        with pytest.raises(ProfileError) as gone:
            remove_profile("cluster-a", store=store)
        assert "rtx2080ti-x64" not in gone.value.hint


def test_an_ended_measurement_can_be_resumed_and_is_no_unknown_name(stores: StoreFinder) -> None:
    with stores() as store:
        assert store is not None
        cluster = Cluster(machine=MACHINE, fingerprint=FINGERPRINT)
        run = store.start_run(name="lab", cluster=cluster, preset="quick")
        store.finish_run(run, status="partial")
    with pytest.raises(ProfileError, match="not finished") as caught:
        find_profile("lab", stores=stores)
    assert "moetune profile --name lab --resume" in caught.value.hint
