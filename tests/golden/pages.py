"""Pages as people and programs read them: of fixed plans, machines and measured steps.

`python -m tests.golden.pages` writes them anew, `python -m tests.golden.pages NAME …` some. A file
has the lines that a screen of 80 columns shows, the figures' words, and the values of `--json`.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import moetune
from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.library import StoredPlan
from moetune.app.plan import make_plan
from moetune.app.profiles import ResolvedProfile
from moetune.app.subjects import LayerSubject, Subject, subject_of
from moetune.app.verify import Verification, VerifiedStep
from moetune.app.views.comparison import comparison_sections, whatif_sections
from moetune.app.views.models import model_section, models_section
from moetune.app.views.observed import runs_section, verification_sections
from moetune.app.views.plan import explanation_sections, plan_sections
from moetune.app.views.profile import profile_sections
from moetune.app.views.stored_plans import stored_plans_table
from moetune.app.whatif import WhatIf, change_plan
from moetune.domain.any_plan import AnyPlan
from moetune.domain.constraints import Strategy
from moetune.domain.document import encode
from moetune.domain.model import MODELS
from moetune.domain.plan import Plan
from moetune.domain.question import Question
from moetune.domain.records import PlanInfo, Stored
from moetune.report.section import Section, values_of
from moetune.report.text import text_of
from tests.golden.answers import FOLDER
from tests.golden.facts import plain
from tests.report.lab import LAYER, lab_plan, lab_profile
from tests.solve.clusters import cluster_profile
from tests.store.values import observed_run
from tests.training_plans import TRAINING, training_plan

PAGE_FOLDER = FOLDER.with_name("pages")
NAMES = ("one", "two")
# Processors round drawn profiles differently: hashes of them are not compared.
HASH = re.compile(r"(?<![\w.])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{6,64}\b(?!-)")
STEEP = " ".join(str(round(100 / rank)) for rank in range(1, 65))
OTHER_TRAINING = training_plan(
    id="fedcba98" * 8, layout=TRAINING["layout"] | {"recompute": ["norm", "moe"]}
)


def explained(**answers: Any) -> LayerSubject:
    """Return the explanation of a layer's plan on eight ranks of a described cluster."""
    profile = cluster_profile(num_devices=8)
    request = Question(**encode(LAYER), world_size=8, tokens=8192, dtype="float16", **answers)
    return LayerSubject(plan=make_plan(request, profile=profile), profile=profile)


@cache
def lab() -> LayerSubject:
    return LayerSubject(plan=lab_plan(), profile=lab_profile())


def placed() -> tuple[Plan, Plan]:
    """Return plans of one uneven routing: experts in their order, and placed by their loads."""
    profile = load_profile_file(Path(bundled_profiles()["rtx2080ti-x64"]))

    def plan(order: str) -> Plan:
        question: dict[str, Any] = {"model": "gpt-s", "world_size": 8, "allow_modelled": True}
        question |= {"routing": f"{STEEP} / 1", "expert_placement": order}
        return make_plan(Question(**question), profile=profile)

    return plan("natural"), plan("planned")


def changed() -> tuple[Section, ...]:
    question = WhatIf(changes={"tokens_per_rank": 16384}, speeds={"communication": 0.5})
    answer = change_plan(lab_plan(), profile=lab_profile(), question=question)
    return whatif_sections(answer)


def step(
    forward: int, backward: int, *, seconds: float, predicted: float | None = 1.0,
    strategy: Strategy = "none", is_planned: bool = False,
) -> VerifiedStep:  # fmt: skip
    return VerifiedStep(
        forward_degree=forward, backward_degree=backward, strategy=strategy,
        is_planned=is_planned, predicted_seconds=predicted, forward_seconds=seconds / 3,
        backward_seconds=seconds / 2, step_seconds=seconds, raw_step_seconds=(seconds,),
        deviation=forward * 1e-7,
    )  # fmt: skip


def verified() -> tuple[Section, ...]:
    steps = (
        step(1, 1, seconds=2.5, predicted=3.0),
        step(2, 3, seconds=1.25, is_planned=True),
        step(4, 5, seconds=1.0, predicted=None),
        step(6, 7, seconds=0.5, strategy="S4"),
    )
    plan = lab_plan()
    return verification_sections(
        plan, Verification(plan_id=plan.id, steps=steps, tolerance=1e-5, imbalance=1.25)
    )


def watched() -> tuple[Section, ...]:
    """Return observed runs, that were as predicted and that were not."""
    ratios = (1.0, 0.75, 2.5)
    stored = [
        Stored(
            id=number, created_at=f"2026-03-0{number}T04:05:06.789", value=observed_run(ratio=ratio)
        )
        for number, ratio in enumerate(ratios, start=1)
    ]  # fmt: skip
    return (runs_section(stored),)


def stored() -> tuple[Section, ...]:
    plans = (lab_plan(), training_plan(), None)
    rows = [
        StoredPlan(
            info=PlanInfo(
                id=plan.id if plan else "ab" * 32, model="x", profile="y", world_size=8,
                tokens_per_rank=64, created_at="2026-11-24T00:00:00+00:00",
            ),
            plan=plan,
        )
        for plan in plans
    ]  # fmt: skip
    return (Section(name="plans", tables=(stored_plans_table(rows, empty="None."),)),)


def without_profile() -> tuple[Section, ...]:
    plan = replace(lab_plan(), schema=1, terms=None)
    lost = LayerSubject(plan=plan, missing="the profile is gone")
    return explanation_sections(lost)


def comparison(first: AnyPlan, second: AnyPlan) -> Iterable[Section]:
    return comparison_sections(first, second, names=NAMES)


def drawn(subject: Subject) -> Iterable[Section]:
    return plan_sections(subject, is_page=True)


def whole(**pins: Any) -> Iterable[Section]:
    """Return the page of a model's plan on published numbers."""
    made = moetune.plan(
        "mixtral-8x7b", profile="h100-x8", global_batch=256, seq="4k", save=False,
        uncalibrated=True, **pins,
    )  # fmt: skip
    return drawn(subject_of(made.plan, profile=made.profile))


def lines_alone() -> ResolvedProfile:
    """Return a profile without samples: one line of products, and those of links and copies."""
    profile = lab_profile()
    return ResolvedProfile(
        profile=replace(profile, samples=(), gemm=profile.gemm[:1], rows=()), source="bundled"
    )


PAGES: Mapping[str, Callable[[], Iterable[Section]]] = {
    "layer": lambda: drawn(lab()),
    "layer-limit": lambda: drawn(
        LayerSubject(plan=lab_plan(memory_limit_bytes=120 * 2**20), profile=lab_profile())
    ),
    "layer-tensor": lambda: explanation_sections(explained(expert_parallel="tensor")),
    "layer-pinned": lambda: explanation_sections(explained(strategy="S4", order="interleaved")),
    "layer-one-chunk": lambda: explanation_sections(explained(forward_degree=1, backward_degree=1)),
    "layer-without-profile": without_profile,
    "layer-placed": lambda: plan_sections(LayerSubject(plan=placed()[1], profile=None)),
    "placed-differ": lambda: comparison(*placed()),
    "plans-differ": lambda: comparison(lab_plan(), lab_plan(8192)),
    "plans-equal": lambda: comparison(lab_plan(), lab_plan()),
    "training": lambda: plan_sections(subject_of(training_plan())),
    "training-megatron": lambda: whole(world_size=64, target="megatron"),
    "training-short": lambda: whole(
        world_size=32, target="megatron", memory_limit="50GiB", front=True
    ),
    "trainings-differ": lambda: comparison(training_plan(), OTHER_TRAINING),
    "whatif": changed,
    "profile": lambda: profile_sections(ResolvedProfile(profile=lab_profile(), source="store")),
    "profile-lines": lambda: profile_sections(lines_alone()),
    "models": lambda: (
        models_section(),
        *(model_section(MODELS[name], world_size=64) for name in ("tm-1", "gpt-s")),
    ),
    "verified": verified,
    "observed": watched,
    "stored-plans": stored,
}


def page(name: str) -> dict[str, Any]:
    """Return a page's lines, its figures' words and the values of its sections."""
    sections = tuple(PAGES[name]())
    figures = [
        {"name": figure.name, "title": figure.title, "said": figure.words,
         "drawn": _outline([plain(part) for part in (figure.x, figure.y, *figure.series)])}
        for section in sections
        for figure in section.figures
    ]  # fmt: skip
    lines = text_of(sections).splitlines()
    shown = {"lines": lines, "figures": figures, "values": [values_of(part) for part in sections]}
    text = json.dumps(shown, ensure_ascii=False)
    masked: dict[str, Any] = json.loads(HASH.sub(lambda match: "x" * len(match[0]), text))
    return masked


def _outline(value: object) -> object:
    """Return a drawing's marks with the ends of long series alone."""
    if isinstance(value, dict):
        return {key: _outline(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_outline(item) for item in (value if len(value) < 8 else [*value[:2], value[-1]])]
    return value


def frozen_page(name: str) -> dict[str, Any]:
    """Return a page as it was."""
    document = json.loads((PAGE_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


if __name__ == "__main__":
    PAGE_FOLDER.mkdir(exist_ok=True)
    for page_name in sys.argv[1:] or PAGES:
        (PAGE_FOLDER / f"{page_name}.json").write_text(
            json.dumps(page(page_name), indent=1, sort_keys=True, ensure_ascii=False) + "\n",
            encoding="utf-8",
        )
        print(page_name)  # noqa: T201 - a tool for the developer's terminal
