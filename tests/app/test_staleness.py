"""New software: what makes a profile stale, which points check it, and what they decide."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moetune.app import staleness
from moetune.app.staleness import (
    AGREEMENT,
    MOST_POINTS,
    changes,
    check_points,
    is_of_this_processor,
    judge_check,
    software_here,
    stale_note,
)
from moetune.domain.cluster import Fingerprint
from moetune.domain.profile import Profile
from moetune.domain.samples import (
    AttentionPoint,
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    InterferencePoint,
    Point,
    RowsPoint,
    Sample,
)
from tests.fit.measured import measured_profile

SOFTWARE = {"torch": "2.12", "backend": "nccl", "nccl": "2.20", "python": "3.11"}
PROFILE = replace(
    measured_profile(),
    fingerprint=Fingerprint(hardware={"cpu": "Lab CPU"}, software=SOFTWARE),
)


def again(
    profile: Profile, factor: Callable[[Point], float], *, noise: float = 0.01, seed: int = 1
) -> list[Sample]:
    """Return the check's points, measured on a machine that is so much slower now."""
    rng = np.random.default_rng(seed)
    then = {one.point: one.median_seconds for one in profile.samples if one.seconds}
    return [
        Sample(
            point=point,
            seconds=tuple(then[point] * factor(point) * np.exp(noise * rng.normal(size=9))),
        )
        for point in check_points(profile)
    ]


def test_what_changes_speed_makes_a_profile_stale_and_nothing_else_does() -> None:
    now = {**SOFTWARE, "torch": "2.13", "python": "3.12", "nccl": "2.21"}
    assert changes(PROFILE, now) == ("torch 2.12 there, 2.13 here", "nccl 2.20 there, 2.21 here")
    assert changes(PROFILE, SOFTWARE) == ()
    assert changes(PROFILE, {"torch": "2.12"}) == ()
    assert len(changes(PROFILE, {"torch": "2.13"})) == 1
    assert changes(replace(PROFILE, fingerprint=Fingerprint()), now) == ()


def test_the_note_names_the_change_and_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "is_of_this_processor", lambda _: True)
    monkeypatch.setattr(staleness, "software_here", lambda: {"torch": "2.13"})
    note = stale_note(PROFILE)
    assert "2.12" in note
    assert "2.13" in note
    assert f"profiles check {PROFILE.name}" in note
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


def test_a_check_measures_every_operation_of_the_profile_before_a_second_size_of_any() -> None:
    extra: Sequence[Point] = (
        AttentionPoint(dtype="float32", num_sequences=4, length=64, num_heads=2, head_dim=16),
        InterferencePoint(victim="comp", others=("comm",)),
        CopyPoint(direction="h2d", pinned=False, num_bytes=64),
        RowsPoint(op="gate", dtype="float32", rows=9, width=4),
    )
    profile = replace(
        PROFILE,
        samples=(
            *PROFILE.samples,
            *(Sample(point=point, seconds=(1e-3,)) for point in extra),
            Sample(
                point=CopyPoint(direction="h2d", pinned=True, num_bytes=65),
                seconds=(),
                error="out of memory",
            ),
        ),
    )
    points = check_points(profile)
    assert len(points) == len(set(points)) == MOST_POINTS
    measured = {one.point for one in profile.samples if one.seconds}
    assert set(points) <= measured
    assert [point.kind for point in points[:5]] == [
        "collective", "gemm", "rows", "attention", "copy",
    ]  # fmt: skip
    groups = {one.group for one in points if isinstance(one, CollectivePoint)}
    assert groups == {(2, 0), (4, 0)}
    assert len({one.product for one in points if isinstance(one, GemmPoint)}) >= 2
    assert check_points(replace(PROFILE, samples=())) == ()


@pytest.mark.parametrize("factor", [1.0, 1.03, 0.97])
def test_a_machine_within_five_percent_keeps_its_profile(factor: float) -> None:
    found = judge_check(PROFILE, again(PROFILE, lambda _: factor))
    assert found.verdict == "keep"
    assert found.median_difference <= AGREEMENT
    assert PROFILE.name in found.words(PROFILE)


@pytest.mark.parametrize(
    "factor",
    [
        lambda _: 1.12,
        lambda _: 0.7,
        lambda point: 2.0 if point.kind == "collective" else 1.0,
    ],
    ids=["all slower", "all faster", "collectives slower"],
)
def test_a_machine_that_changed_is_measured_again(factor: Callable[[Point], float]) -> None:
    found = judge_check(PROFILE, again(PROFILE, factor))
    assert found.verdict == "measure"
    assert f"moetune profile --name {PROFILE.name}" in found.words(PROFILE)


def test_noise_and_too_few_points_decide_nothing() -> None:
    noisy = again(PROFILE, lambda _: 1.06, noise=0.4)
    few = again(PROFILE, lambda _: 2.0)[:2]
    failed = [replace(one, seconds=(), error="a rank is gone") for one in few]
    for samples in (noisy, few, [], failed):
        found = judge_check(PROFILE, samples)
        assert found.verdict == "unsure"
        assert f"moetune profile --name {PROFILE.name}" in found.words(PROFILE)


def test_points_that_the_profile_lacks_are_not_compared() -> None:
    strange = Sample(point=CopyPoint(direction="d2h", pinned=False, num_bytes=3), seconds=(9.0,))
    found = judge_check(PROFILE, [*again(PROFILE, lambda _: 1.0), strange])
    assert found.verdict == "keep"
    assert strange.point not in {one.point for one in found.points}
