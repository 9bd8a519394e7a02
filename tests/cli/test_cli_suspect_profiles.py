"""A plan says wherever it is shown that the profile behind it is suspect."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.app.files import bundled_profiles, load_profile_file, profile_to_toml
from moetune.app.plan import make_plan
from moetune.app.subjects import LayerSubject
from moetune.app.views.comparison import whatif_sections
from moetune.app.views.plan import explanation_sections, plan_sections
from moetune.app.whatif import WhatIf, change_plan
from moetune.domain.any_plan import plan_from_document
from moetune.domain.document import encode
from moetune.domain.plan import Plan
from moetune.domain.profile import FitError, Profile, ProfileQuality, SuspectGroup
from moetune.domain.question import Question
from moetune.report.section import Section
from tests.cli.running import Cli
from tests.report.lab import LAYER, lab_profile

BAD = FitError(num_points=9, median=0.14, p95=0.41, low=1.0, high=2.0, quality="suspect",
               alpha_seconds=(0.0, 1.0), beta_seconds=(0.0, 1.0))  # fmt: skip
GOOD = replace(BAD, median=0.01, p95=0.02, quality="good")
SUSPECT = ProfileQuality(
    label="suspect", suspect=(SuspectGroup(group="GEMM", median_error=0.14, p95_error=0.41),)
)
TRAINING = (
    "plan", "--model", "olmoe", "--global-batch", "64", "--seq", "4k", "--target", "megatron",
)  # fmt: skip


def with_errors(profile: Profile, *, gemm: FitError) -> Profile:
    """Return the profile with these errors of its GEMMs, and small ones of all else."""
    return replace(
        profile,
        gemm=tuple(replace(line, error=gemm) for line in profile.gemm),
        collective=tuple(replace(line, error=GOOD) for line in profile.collective),
        copy=tuple(replace(line, error=GOOD) for line in profile.copy),
    )


def plan_of(profile: Profile, *, tokens: int = 4096) -> Plan:
    request = Question(**encode(LAYER), tokens=tokens, dtype="float32")
    return make_plan(request, profile=profile)


def said(sections: Iterable[Section]) -> list[str]:
    return [text for section in sections for text in section.doubts if "'lab' is suspect" in text]


@pytest.fixture(scope="module")
def suspect() -> Profile:
    return with_errors(lab_profile(), gemm=BAD)


def test_a_plan_has_the_quality_of_its_profile(suspect: Profile) -> None:
    plan = plan_of(suspect)
    assert plan.profile_quality == SUSPECT
    assert plan.is_suspect
    assert plan_from_document(json.loads(json.dumps(encode(plan)))) == plan
    good = plan_of(with_errors(lab_profile(), gemm=GOOD))
    assert good.profile_quality == ProfileQuality(label="good")
    assert not good.is_suspect


def test_plans_without_it_are_read(suspect: Profile) -> None:
    document = encode(plan_of(suspect))
    del document["profile_quality"]
    plan = plan_from_document(document)
    assert plan.profile_quality is None
    assert not plan.is_suspect
    assert "profile_quality" not in encode(plan)


def test_every_view_of_a_plan_says_so(suspect: Profile) -> None:
    plan = plan_of(suspect)
    explanation = LayerSubject(plan=plan, profile=suspect)
    answer = change_plan(plan, profile=suspect, question=WhatIf(changes={"tokens_per_rank": 2048}))
    pages = (plan_sections(explanation, is_page=page) for page in (False, True))
    for sections in (*pages, explanation_sections(explanation), whatif_sections(answer)):
        (text,) = said(sections)
        assert {"GEMM", "14.0", "41.0", "show"} <= set(text.replace("(", " ").split())


def test_lists_mark_such_plans(cli: Cli, suspect: Profile, tmp_path: Path) -> None:
    file = tmp_path / "suspect.toml"
    file.write_text(profile_to_toml(suspect), encoding="utf-8")
    layer = ("--d-model", "512", "--d-hidden", "2048", "--num-experts", "8", "--tokens", "4k")
    made = cli("plan", *layer, "--dtype", "float32", "--profile", str(file), "--json")
    assert made.document["profile_quality"] == encode(SUSPECT)
    listed = cli("plans", "list", "--json").document
    assert "interpolated, suspect" in json.dumps(listed["sections"])


def test_training_plans_and_their_explanations_have_it(cli: Cli, tmp_path: Path) -> None:
    h100 = load_profile_file(bundled_profiles()["h100-x8"])
    known = cli(*TRAINING, "--profile", "h100-x8", "--json").document
    assert known["profile_quality"] is None
    file, plan = tmp_path / "h100.toml", tmp_path / "plan.json"
    line = replace(h100.copy[0], error=replace(BAD, p95=0.5))
    file.write_text(profile_to_toml(replace(h100, copy=(line, *h100.copy[1:]))), encoding="utf-8")
    made = cli(*TRAINING, "--profile", str(file), "--output", str(plan))
    assert "is suspect" in made.out
    quality = json.loads(plan.read_text(encoding="utf-8"))["profile_quality"]
    copies = {"group": "copies", "median_error": 0.14, "p95_error": 0.5}
    assert quality == {"label": "suspect", "suspect": [copies]}
    explained = cli("explain", str(plan), "--json").document
    assert explained["profile_quality"] == quality
    assert "is suspect" in cli("explain", str(plan)).out
