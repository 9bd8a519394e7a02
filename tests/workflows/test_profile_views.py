"""Profiles in lists, tables and comparisons: every number that one has, and none that it lacks."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.domain.cluster import Cluster, Fingerprint
from moetune.domain.errors import MoetuneError, ProfileError
from moetune.domain.interference import Interference
from moetune.domain.profile import FitError, Profile, ProfileQuality, RowsLine, SuspectGroup
from moetune.domain.samples import (
    CollectivePoint,
    CopyPoint,
    InterferencePoint,
    Quality,
    RowsPoint,
    Sample,
)
from moetune.fit.profile import fit_profile
from moetune.report.section import Section, Table, all_figures
from moetune.store import open_store
from moetune.workflows import wiring
from moetune.workflows.files import bundled_profiles
from moetune.workflows.profile_quality import quality_of
from moetune.workflows.profiles import (
    Difference,
    FoundProfile,
    compare_profiles,
    find_profile,
    list_profiles,
    machine_note,
    newest_measured,
    remove_profile,
)
from moetune.workflows.views.comparison import (
    comparison_sections,
    machine_sections,
    plan_differences,
)
from moetune.workflows.views.profile import (
    profile_page,
    profile_report,
    profile_sections,
)
from moetune.workflows.wiring import StoreFinder
from tests.fit.measured import FINGERPRINT, MACHINE
from tests.report.lab import lab_plan, lab_profile

LINES = ("gemm", "collective", "copy")


def found(profile: Profile) -> FoundProfile:
    return FoundProfile(profile=profile, source="store")


def table_of(sections: tuple[Section, ...], name: str) -> Table:
    return next(one for section in sections for one in section.tables if one.name == name)


def with_error(profile: Profile, error: FitError | None) -> Profile:
    kept: dict[str, Any] = {
        name: tuple(replace(line, error=error) for line in getattr(profile, name)) for name in LINES
    }
    return replace(profile, **kept)


def error_of(*, median: float = 0.01, p95: float = 0.02, quality: Quality = "good") -> FitError:
    known = lab_profile().gemm[0].error
    assert known is not None
    return replace(known, median=median, p95=p95, quality=quality)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0123, "1.23 %"), (0.5, "50 %"), (0.99, "99 %"), (1.0, "100 %"), (1.5, "150 %"),
     (12.345, "1,234 %")],
)  # fmt: skip
def test_errors_are_percentages_with_three_digits_and_no_exponent(share: float, text: str) -> None:
    profile = with_error(lab_profile(), error_of(median=share, p95=2 * share))
    table = table_of(profile_sections(found(profile)), "operations")
    shown = {(row[4].text, row[4].value, row[5].value) for row in table.rows}
    assert (text, share, 2 * share) in shown


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
            found = quality_of(replace(good, **worse))
            assert found is not None
            assert found.label == label
            assert len(found.suspect) == (label == "suspect")


def test_a_suspect_group_has_the_errors_of_its_worst_fit() -> None:
    good = with_error(replace(lab_profile(), samples=()), error_of(quality="good"))
    first, *rest = good.copy
    bad = error_of(median=0.2, p95=0.5, quality="suspect")
    found = quality_of(replace(good, copy=(replace(first, error=bad), *rest)))
    copies = SuspectGroup(group="copies", median_error=0.2, p95_error=0.5)
    assert found == ProfileQuality(label="suspect", suspect=(copies,))


def test_groups_without_fits_are_judged_by_their_samples() -> None:
    profile = with_error(lab_profile(), error_of(quality="good"))
    rows = [one for one in profile.samples if isinstance(one.point, RowsPoint)]
    assert rows
    marked = tuple(replace(one, marks=("busy",)) if one in rows else one for one in profile.samples)
    found = quality_of(replace(profile, samples=marked))
    assert found is not None
    assert found.suspect == (SuspectGroup(group="memory-bound operations"),)


def test_rates_are_bytes_and_products_a_second_where_there_is_a_slope() -> None:
    profile = lab_profile()
    slope = profile.collective[0].beta_seconds_per_byte
    flat = replace(profile.collective[0], alpha_seconds=1.0, beta_seconds_per_byte=0.0)
    for line, rate in ((profile.collective[0], 1 / slope), (flat, None)):
        changed = replace(profile, samples=(), collective=(line,), gemm=(), copy=(), rows=())
        (row,) = table_of(profile_sections(found(changed)), "operations").rows
        assert row[2].value == rate
        assert (row[2].text == "") is (rate is None)
    products = replace(profile, samples=(), collective=(), copy=(), rows=())
    (row,) = table_of(profile_sections(found(products)), "operations").rows
    assert row[2].value == 1 / profile.gemm[0].beta_seconds_per_mac
    assert row[2].text.split()[0] == f"{1e-12 / profile.gemm[0].beta_seconds_per_mac:.3g}"
    assert row[3].value == 0


def test_a_layers_launches_are_seconds_of_each_chunk() -> None:
    line = RowsLine(
        op="chunked_layer", dtype="bfloat16", alpha_seconds=2e-3, beta_seconds_per_element=4e-4
    )
    changed = replace(
        lab_profile(), samples=(), collective=(), gemm=(), copy=(), rows=(line,)
    )  # fmt: skip
    (row,) = table_of(profile_sections(found(changed)), "operations").rows
    assert (row[1].value, row[2].value) == (2e-3, 4e-4)
    assert row[2].text == "400 µs each"


def test_samples_that_vary_are_counted_and_good_ones_need_no_note() -> None:
    profile = replace(lab_profile(), samples=())
    point = CopyPoint(direction="h2d", pinned=True, num_bytes=1)
    good, bad = (
        Sample(point=point, seconds=(1.0, 1.0, 1.0 + spread, 1.0 + spread))
        for spread in (0.01, 3.0)
    )
    for samples, numbers in (
        ((good,), []), ((good, bad), ["1", "2"]), ((bad, bad, good), ["2", "3"]),
    ):  # fmt: skip
        head = profile_sections(found(replace(profile, samples=samples)))[0]
        assert [number for note in head.notes for number in re.findall(r"\d+", note)] == numbers
        words = head.paragraphs[0]
        assert f"{len(samples)} sample" in words


def test_what_an_exchange_takes_from_computation_is_told_by_its_size() -> None:
    size = 64 * 1024
    alone, beside = (
        InterferencePoint(victim="comp", comm_bytes=0),
        InterferencePoint(victim="comp", others=("comm",), comm_bytes=size),
    )
    exchange = CollectivePoint(op="all_to_all", group_size=2, num_bytes=size, in_flight=4)
    samples = (
        Sample(point=alone, seconds=(4e-3,) * 3), Sample(point=beside, seconds=(5e-3,) * 3),
        Sample(point=exchange, seconds=(2e-3,) * 3),
    )  # fmt: skip
    lab = lab_profile()
    profile = fit_profile(
        name="lab", machine=lab.machine, fingerprint=lab.fingerprint, samples=samples
    )
    (section,) = (one for one in profile_sections(found(profile)) if one.name == "interference")
    # A fifth of the 2 ms of an exchange.
    assert "400 µs at 64.0 KiB" in section.paragraphs[0]


def test_a_page_draws_the_operation_that_was_asked_for() -> None:
    page = profile_page(found(lab_profile()), operation="h2d-pinned", here="/x?operation=")
    table = table_of(page, "operations")
    assert [row[0].text for row in table.rows if row[0].mark == "chosen"] == ["h2d pinned"]
    assert all(row[0].href.startswith("/x?operation=") for row in table.rows if row[3].value)
    bare = table_of(profile_page(found(lab_profile())), "operations")
    assert {row[0].href for row in bare.rows} == {""}
    empty = replace(
        lab_profile(), samples=(), gemm=(), collective=(), copy=(), rows=(),
        interference=Interference(),
    )  # fmt: skip
    assert not all_figures(profile_page(found(empty)))


def test_a_page_draws_an_all_to_all_that_is_alone_on_the_link_before_one_in_flight() -> None:
    profile = lab_profile()
    (shown,) = (
        row[0].text
        for row in table_of(profile_page(found(profile)), "operations").rows
        if row[0].mark == "chosen"
    )
    assert "in flight" not in shown
    crowded = [line for line in profile.collective if line.in_flight > 1]
    only = replace(profile, samples=(), collective=tuple(crowded))
    (shown,) = (
        row[0].text
        for row in table_of(profile_page(found(only)), "operations").rows
        if row[0].mark == "chosen"
    )
    assert "in flight" in shown


def test_a_report_draws_six_of_a_kind_at_most_each_under_its_own_name() -> None:
    figures = all_figures(profile_report(found(lab_profile())))
    names = [one.name for one in figures]
    assert len(set(names)) == len(names)
    assert sum("gemm" in name for name in names) == 6
    assert sum("all-to-all" in name for name in names) == 4


@pytest.fixture
def stores(tmp_path: Path) -> StoreFinder:
    path = str(tmp_path / "m.db")
    return lambda: open_store(path)


def test_a_profile_is_listed_once_as_its_newest_run_with_the_samples_of_all(
    stores: StoreFinder,
) -> None:
    first = lab_profile()
    second = replace(
        first, machine=replace(first.machine, num_devices=16, device="New GPU"),
        samples=first.samples[:10],
    )  # fmt: skip
    with stores() as store:
        assert store is not None
        for one in (first, lab_profile("other"), second):
            store.save_profile(one)
        listed = [one for one in list_profiles(store) if one.source == "store"]
    assert [one.name for one in listed] == ["lab", "other"]
    newest = listed[0]
    assert (newest.num_runs, newest.device, newest.num_devices) == (2, "New GPU", 16)
    assert newest.num_samples == len(first.samples) + 10
    assert newest.created_at > listed[1].created_at


def test_without_a_store_the_bundled_profiles_are_all() -> None:
    listed = list_profiles(None)
    assert [one.name for one in listed] == list(bundled_profiles())
    assert {(one.source, one.num_runs, one.status, one.created_at) for one in listed} == {
        ("bundled", 0, "", "")
    }


def test_the_newest_measured_profile_is_found_and_published_ones_are_not(
    stores: StoreFinder,
) -> None:
    with stores() as store:
        assert store is not None
        with pytest.raises(ProfileError):
            newest_measured(store)
        store.save_profile(replace(lab_profile("paper"), provenance="published", citation="a"))
        with pytest.raises(ProfileError):
            newest_measured(store)
        store.save_profile(lab_profile())
        store.save_profile(lab_profile("newer"))
        assert newest_measured(store) == "newer"
        store.save_profile(replace(lab_profile("paper"), provenance="published", citation="a"))
        assert newest_measured(store) == "newer"
    with pytest.raises(ProfileError):
        newest_measured(None)
    assert find_profile(None, stores=stores).profile.name == "newer"
    assert find_profile("lab", stores=stores).source == "store"
    assert find_profile("rtx2080ti-x64", stores=stores).source == "bundled"


def test_a_suspect_profile_and_one_of_a_cpu_are_no_default_where_there_are_others(
    stores: StoreFinder,
) -> None:
    good, bad = (_with_gemm_error(one) for one in ("good", "suspect"))
    gpus = replace(lab_profile("gpus"), machine=replace(lab_profile().machine, kind="cuda"))
    cpu = replace(lab_profile(), machine=replace(lab_profile().machine, kind="cpu"))
    with stores() as store:
        assert store is not None
        store.save_profile(replace(bad, name="bad", machine=cpu.machine))
        assert newest_measured(store) == "bad"
        with pytest.raises(ProfileError, match="on GPUs") as caught:
            newest_measured(store, for_models=True)
        assert "this one" not in caught.value.hint  # measured again it is no profile of GPUs
        store.save_profile(replace(good, name="good", machine=cpu.machine))
        store.save_profile(replace(bad, name="worse", machine=cpu.machine))
        assert newest_measured(store) == "good"
        store.save_profile(gpus)
        store.save_profile(replace(good, name="newest", machine=cpu.machine))
        assert newest_measured(store, for_models=True) == "gpus"
    assert find_profile(None, stores=stores).profile.name == "newest"
    assert find_profile(None, stores=stores, for_models=True).profile.name == "gpus"


def _with_gemm_error(quality: Quality) -> Profile:
    error = FitError(
        num_points=9, median=0.1, p95=0.4, low=1.0, high=2.0, quality=quality,
        alpha_seconds=(0.0, 1.0), beta_seconds=(0.0, 1.0),
    )  # fmt: skip
    good = replace(error, quality="good")
    profile = lab_profile()
    return replace(
        profile,
        gemm=tuple(replace(line, error=error) for line in profile.gemm),
        collective=tuple(replace(line, error=good) for line in profile.collective),
        copy=tuple(replace(line, error=good) for line in profile.copy),
        samples=(),
    )


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


def test_a_measurement_that_was_ended_can_be_resumed_and_is_no_unknown_name(
    stores: StoreFinder,
) -> None:
    with stores() as store:
        assert store is not None
        cluster = Cluster(machine=MACHINE, fingerprint=FINGERPRINT)
        run = store.start_run(name="lab", cluster=cluster, preset="quick")
        store.finish_run(run, status="partial")
    with pytest.raises(ProfileError, match="not finished") as caught:
        find_profile("lab", stores=stores)
    assert "moetune profile --name lab --resume" in caught.value.hint


def test_every_number_of_every_line_is_compared_under_a_key_of_its_own() -> None:
    profile = lab_profile()
    changed = 0
    for kind in (*LINES, "rows"):
        for at, line in enumerate(getattr(profile, kind)):
            names = [name for name in line.__dataclass_fields__ if "_seconds" in name]
            for name in names:
                twice = replace(line, **{name: 2 * getattr(line, name) or 1e-3})
                lines = list(getattr(profile, kind))
                lines[at] = twice
                other: dict[str, Any] = {kind: tuple(lines)}
                (one,) = compare_profiles(profile, replace(profile, **other))
                assert one.key.endswith(name)
                assert (one.first, one.second) == (getattr(line, name), getattr(twice, name))
                changed += 1
    assert changed == 2 * sum(len(getattr(profile, kind)) for kind in (*LINES, "rows"))


def test_machines_and_facts_are_compared_and_what_one_lacks_is_none() -> None:
    profile = lab_profile()
    for name, value in (
        ("device", "Other GPU"), ("num_devices", 16), ("devices_per_node", 8),
        ("memory_bytes", 2**31),
    ):  # fmt: skip
        changed: dict[str, Any] = {name: value}
        machine = replace(profile.machine, **changed)
        (one,) = compare_profiles(profile, replace(profile, machine=machine))
        assert (one.key, one.second) == (name, value)
    bare = replace(profile, fingerprint=Fingerprint(hardware={"device": "Lab GPU"}, software={}))
    found = {one.key: (one.first, one.second) for one in compare_profiles(profile, bare)}
    assert found == {
        "hardware cores": ("64", None), "software torch": ("2.13", None),
        "software nccl": ("2.27", None),
    }  # fmt: skip
    back = {one.key: (one.first, one.second) for one in compare_profiles(bare, profile)}
    assert back == {key: (second, first) for key, (first, second) in found.items()}


@pytest.mark.parametrize(
    ("first", "second", "ratio"),
    [(2.0, 3.0, 1.5), (2.0, 0.0, 0.0), (0.0, 2.0, None), (None, 2.0, None), (2.0, None, None),
     ("a", 2.0, None), (2.0, "b", None)],
)  # fmt: skip
def test_a_ratio_is_of_two_numbers_and_not_of_nothing(
    first: float | str | None, second: float | str | None, ratio: float | None
) -> None:
    assert Difference(key="k", first=first, second=second).ratio == ratio


def test_this_machine_is_compared_with_the_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = lab_profile()
    there = profile.fingerprint

    def note(hardware: dict[str, str] | None = None, software: dict[str, str] | None = None) -> str:
        here = Fingerprint(
            hardware={**there.hardware, **(hardware or {})},
            software={**there.software, **(software or {})},
        )
        cluster = Cluster(machine=profile.machine, fingerprint=here)
        monkeypatch.setattr(wiring, "detect_cluster", lambda **_: cluster)
        return machine_note(profile)

    assert note() == ""
    assert "cores 64 there, 8 here" in note({"cores": "8"})
    assert "driver — there, 9 here" in note(None, {"driver": "9"})
    assert note(None, {"editor": "9"}) == ""  # not what decides the speed
    assert note({"cores": "8"}, {"torch": "1"}).count("there,") == 1
    many = note({"a": "1", "b": "2", "c": "3"})
    assert many.count("there,") == 2
    bare = replace(profile, fingerprint=Fingerprint(hardware={}, software={}))
    assert machine_note(bare) == ""

    def nothing(**_: object) -> Cluster:
        raise MoetuneError("no such device")

    monkeypatch.setattr(wiring, "detect_cluster", nothing)
    assert "no such device" in machine_note(profile)


def ratios(sections: tuple[Section, ...]) -> dict[object, tuple[str, ...]]:
    table = table_of(sections, "differences")
    return {row[0].value: tuple(cell.text for cell in row[1:]) for row in table.rows}


def test_numbers_are_shown_in_the_unit_of_their_key() -> None:
    profile = lab_profile()
    gemm = replace(profile.gemm[0], alpha_seconds=1e-3, beta_seconds_per_mac=1e-12)
    slow = replace(gemm, alpha_seconds=2.5e-1, beta_seconds_per_mac=2e-12)
    machine = replace(profile.machine, memory_bytes=2**31, num_devices=4096)
    link = replace(profile.collective[0], beta_seconds_per_byte=1e-9)
    slow_link = replace(link, beta_seconds_per_byte=3e-9)
    shown = ratios(
        machine_sections(
            replace(profile, gemm=(gemm,), collective=(link,)),
            replace(profile, gemm=(slow,), collective=(slow_link,), machine=machine),
            names=("a", "b"),
        )
    )
    label = "all_to_all 2 ranks"
    assert shown == {
        "num_devices": ("8", "4,096", "512 ×"),
        "memory_bytes": ("1.00 GiB", "2.00 GiB", "2.00 ×"),
        "gemm float32 alpha_seconds": ("1.00 ms", "250 ms", "250 ×"),
        "gemm float32 beta_seconds_per_mac": ("1.00 s per TMAC", "2.00 s per TMAC", "2.00 ×"),
        f"{label} beta_seconds_per_byte": ("1.00 s per GB", "3.00 s per GB", "3.00 ×"),
    }


def test_operations_that_both_profiles_have_in_one_unit_are_drawn_over_each_other() -> None:
    first, second = lab_profile(), lab_profile("after", slower=1.3)
    drawn, _ = machine_sections(first, second, names=("a", "b"), is_drawn=True)
    assert 0 < len(drawn.figures) <= 6
    assert len(machine_sections(first, second, names=("a", "b"))) == 1
    # Products by shape of one, and over all shapes of the other, have no common axis.
    lines = replace(second, samples=(), collective=(), copy=(), rows=())
    shapes, _ = machine_sections(first, lines, names=("a", "b"), is_drawn=True)
    assert shapes.figures == ()
    copies = replace(second, collective=(), samples=(), gemm=(), rows=())
    both, _ = machine_sections(first, copies, names=("a", "b"), is_drawn=True)
    assert len(both.figures) == len(second.copy)


def test_a_plan_and_itself_have_no_figures_and_no_differences() -> None:
    one, other = lab_plan(), lab_plan(8192)
    answer, figures, differences = comparison_sections(one, one, names=("a", "b"))
    assert answer.paragraphs == ("a and b are the same plan.",)
    assert figures.figures == ()
    assert differences == plan_differences(one, one, names=("a", "b"))
    _, figures, _ = comparison_sections(one, other, names=("a", "b"))
    assert len(figures.figures) == 2
