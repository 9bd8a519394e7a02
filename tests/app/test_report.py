"""What `moetune report` chooses to report: the plans, the profile, and what was observed."""

import re
from pathlib import Path
from typing import Any

import pytest

from moetune.app.files import find_plan
from moetune.app.report import NUM_PLANS, Report, write_report
from moetune.app.wiring import StoreFinder
from moetune.domain.errors import InputError, ProfileError
from tests.report.lab import lab_plan, lab_profile
from tests.store.values import observed_run
from tests.training_plans import training_plan


def report(stores: StoreFinder, file: Path, **options: Any) -> Report:
    asked = {"profile": None, "plans": (), **options}
    return write_report(file, stores=stores, **asked)


def test_the_newest_plans_are_reported_with_the_newest_profile(
    stores: StoreFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NUM_PLANS > 2
    monkeypatch.setattr("moetune.app.report.NUM_PLANS", 2)
    plans = [lab_plan(tokens) for tokens in (64, 128, 192)]
    with stores() as store:
        assert store is not None
        store.save_profile(lab_profile())
        for plan in plans:
            store.save_plan(plan)
    file = tmp_path / "out.html"
    result = report(stores, file)
    assert result.file == file
    assert result.profiles == ("lab",)
    assert list(result.plans) == [plan.id for plan in reversed(plans)][:2]
    text = file.read_text(encoding="utf-8")
    counts = [len(re.findall(rf"\bPlan {plan.id[:6]}\b", text)) for plan in plans]
    assert counts[0] == 0
    assert min(counts[1:]) >= 2  # in the contents and above the chapter
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", text)


def test_observed_runs_are_listed_for_plans_of_their_machine(
    stores: StoreFinder, tmp_path: Path
) -> None:
    layer, model = lab_plan(64), training_plan()
    with stores() as store:
        assert store is not None
        store.save_profile(lab_profile())
        for plan in (layer, model):
            store.save_plan(plan)
            digest = plan.inputs.profile_fingerprint
            store.add_observed_run(observed_run(profile_fingerprint=digest))
    for plan, is_observed in ((layer, False), (model, True)):
        report(stores, tmp_path / "out.html", plans=(plan.id,))
        text = (tmp_path / "out.html").read_text(encoding="utf-8")
        assert ('data-figure="timeline"' in text) is not is_observed
        assert ('data-table="runs"' in text) is is_observed


def test_a_plan_of_a_file_is_reported_with_its_profile(stores: StoreFinder, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = lab_plan(64)
    file.write_text(plan.text, encoding="utf-8")
    with pytest.raises(ProfileError):  # a named profile has to be there
        report(stores, tmp_path / "a.html", plans=(str(file),), profile="nobodys")
    alone = report(stores, tmp_path / "a.html", plans=(str(file),))
    assert (alone.profiles, alone.plans) == ((), (plan.id,))
    title = re.search(r"<title>(.*?)</title>", (tmp_path / "a.html").read_text(encoding="utf-8"))
    assert title is not None
    assert plan.inputs.profile in title[1]
    named = report(stores, tmp_path / "b.html", plans=(str(file),), profile="rtx2080ti-x64")
    assert named.profiles == ("rtx2080ti-x64",)
    with stores() as store:
        assert store is not None
        store.save_profile(lab_profile())
    assert report(stores, tmp_path / "c.html", plans=(str(file),)).profiles == ("lab",)


@pytest.mark.parametrize("name", ["a100-x8", "h100-x8", "h200-x8", "b200-x8", "rtx2080ti-x64"])
def test_reference_machines_are_reported(stores: StoreFinder, tmp_path: Path, name: str) -> None:
    result = report(stores, tmp_path / "out.html", profile=name)
    assert result.profiles == (name,)
    assert "start-up" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_a_plan_of_another_machine_is_not_reported_with_the_newest_measured_profile(
    stores: StoreFinder, tmp_path: Path
) -> None:
    with stores() as store:
        assert store is not None
        store.save_profile(lab_profile())
        store.save_plan(training_plan())
    result = report(stores, tmp_path / "out.html", plans=(training_plan().id,), default="lab")
    assert result.profiles == ("h100-x8",)
    assert report(stores, tmp_path / "b.html", default="lab").profiles == ("h100-x8",)
    with stores() as store:
        assert store is not None
        store.remove_plans([training_plan().id])
    assert report(stores, tmp_path / "c.html", default="rtx2080ti-x64").profiles == (
        "rtx2080ti-x64",
    )


def test_nothing_to_report_is_an_error(stores: StoreFinder, tmp_path: Path) -> None:
    with pytest.raises(ProfileError):
        report(stores, tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_an_unknown_plan_is_answered_with_the_newest(stores: StoreFinder, tmp_path: Path) -> None:
    def hint(wanted: str) -> str:
        with pytest.raises(InputError) as caught:
            find_plan(wanted, stores=stores)
        assert repr(wanted) in caught.value.what
        return caught.value.hint

    old, new = lab_plan(64), lab_plan(128)
    assert old.id[:6] not in hint("nothing")
    with stores() as store:
        assert store is not None
        for plan in (old, new):
            store.save_plan(plan)
    for unknown in ("nothing", ""):
        assert re.findall(r"\b[0-9a-f]{6}\b", hint(unknown)) == [new.id[:6]]
    assert find_plan(old.id[:6], stores=stores) == old
    file = tmp_path / "plan.json"
    file.write_text(old.text, encoding="utf-8")
    assert find_plan(str(file), stores=stores) == old
