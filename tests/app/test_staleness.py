"""New software: what makes a profile stale, and what the note says."""

from dataclasses import replace
from pathlib import Path

import pytest

from moetune.app import staleness
from moetune.app.staleness import is_of_this_processor, software_here, stale_note
from moetune.domain.cluster import Fingerprint
from tests.fit.measured import measured_profile

SOFTWARE = {"torch": "2.12", "backend": "nccl", "nccl": "2.20", "python": "3.11"}
PROFILE = replace(
    measured_profile(), fingerprint=Fingerprint(hardware={"cpu": "Lab CPU"}, software=SOFTWARE)
)


def test_what_changes_speed_makes_a_profile_stale_and_nothing_else_does() -> None:
    changes = PROFILE.fingerprint.software_changes
    now = {**SOFTWARE, "torch": "2.13", "python": "3.12", "nccl": "2.21"}
    assert changes(now) == ("torch 2.12 there, 2.13 here", "nccl 2.20 there, 2.21 here")
    assert changes(SOFTWARE) == ()
    assert changes({"torch": "2.12"}) == ()
    assert len(changes({"torch": "2.13"})) == 1
    assert len(changes({"torch": "2.11"})) == 1
    assert Fingerprint().software_changes(now) == ()


def test_the_note_names_the_change_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "is_of_this_processor", lambda _: True)
    monkeypatch.setattr(staleness, "software_here", lambda: {"torch": "2.13"})
    note = stale_note(PROFILE)
    assert "2.12" in note
    assert "2.13" in note
    assert f"moetune profile --name {PROFILE.name}`" in note
    assert stale_note(replace(PROFILE, provenance="published")) == ""
    monkeypatch.setattr(staleness, "software_here", lambda: SOFTWARE)
    assert stale_note(PROFILE) == ""


@pytest.mark.parametrize(
    ("cpuinfo", "is_same"),
    [("model name\t: Lab CPU\n", True), ("model name\t: Lab CPU 2\n", False), ("", False)],
)
def test_a_processor_is_known_by_its_name(tmp_path: Path, cpuinfo: str, is_same: bool) -> None:  # noqa: FBT001 - a case
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    assert is_of_this_processor(PROFILE, file) == is_same
    assert not is_of_this_processor(replace(PROFILE, fingerprint=Fingerprint()), file)
    assert not is_of_this_processor(PROFILE, tmp_path / "nowhere")


def test_torch_is_known_without_loading_it() -> None:
    import torch

    assert software_here() == {"torch": torch.__version__}
