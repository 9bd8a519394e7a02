"""What layouts beyond branch and bound save: `python -m benchmarks.wider_layouts`.

Plans of published machines: the best step of branch and bound, and of Optuna's study seeded with
its answer, after so many layouts; beside it as many random edits of the answer, without a study.
Writes docs/results/wider-layouts.md. Predicted steps, none of them run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moetune.domain.pipeline import stage_words
from moetune.domain.targets import TargetName, find_target
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.huggingface.registry import named_model
from moetune.search import LayoutStudy
from moetune.search.edits import LayoutEdits
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.joint.ties import PricedLayout
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.training import search_training
from moetune.workflows.training_plan import TrainingRequest, layout_words

RESULT = Path(__file__).parents[1] / "docs/results/wider-layouts.md"
TRIES = (250, 1000, 4000)
_OF_RANDOM = 1000
_LENGTH = 4096
_PINS = LayoutRequest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A plan; `memory_gib` is None for the machine's."""

    model: str
    profile: str
    ranks: int
    global_batch: int
    target: TargetName = "megatron"
    memory_gib: int | None = None


QUESTIONS = (
    Question(model="mixtral-8x7b", profile="a100-x8", ranks=32, global_batch=512, memory_gib=40),
    Question(model="mixtral-8x7b", profile="h100-x8", ranks=64, global_batch=1024),
    Question(model="qwen3-30b-a3b", profile="h100-x8", ranks=16, global_batch=512),
    Question(
        model="qwen3-30b-a3b", profile="h100-x8", ranks=64, global_batch=1024, target="moetune",
        memory_gib=24,
    ),
    Question(model="qwen3-235b-a22b", profile="h100-x8", ranks=64, global_batch=1024),
    Question(
        model="qwen3-235b-a22b", profile="h100-x8", ranks=64, global_batch=1024,
        target="torchtitan",
    ),
    Question(model="glm-4.5-air", profile="h100-x8", ranks=64, global_batch=1024),
    Question(model="deepseek-v3", profile="h100-x8", ranks=128, global_batch=1024),
    Question(model="deepseek-v3", profile="h100-x8", ranks=256, global_batch=1024),
    Question(
        model="deepseek-v3", profile="h100-x8", ranks=256, global_batch=1024, target="moetune"
    ),
    Question(model="deepseek-v3", profile="h800-x8", ranks=2048, global_batch=15_360),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Steps of one question.

    Args:
        shares: of the bounded step after each of `TRIES`, the fastest that fits.
        seconds: of the clock that as many tries took.
        edited_share: after random edits of the bounded answer alone.
    """

    bounded: PricedLayout
    best: PricedLayout
    shares: Sequence[float]
    seconds: Sequence[float]
    edited_share: float


def main() -> None:
    """Solve the questions and write the table."""
    rows = []
    for question in QUESTIONS:
        rows.append(_row(question, _found(question)))
        print(rows[-1], flush=True)
    RESULT.write_text(_page(rows), encoding="utf-8")


def _found(question: Question) -> Found:
    profile = load_profile_file(bundled_profiles()[question.profile])
    job = TrainingJob(
        decoder=named_model(question.model).decoder, world_size=question.ranks,
        global_batch=question.global_batch, length=_LENGTH,
    )  # fmt: skip
    request = TrainingRequest(
        job=job, pins=_PINS, target=find_target(question.target),
        memory_limit_bytes=question.memory_gib and question.memory_gib * 2**30,
    )  # fmt: skip
    plan, search = search_training(request, profile)
    best, shares, seconds = plan.best, [], []
    study, started = LayoutStudy(search, _PINS, plan.found), time.perf_counter()
    for number in range(1, TRIES[-1] + 1):
        best = _faster(search, best, study.try_next())
        if number in TRIES:
            shares.append(best.step.seconds / plan.best.step.seconds)
            seconds.append(time.perf_counter() - started)
    edited = _edited(search, plan.best)
    return Found(
        bounded=plan.best, best=best, shares=shares, seconds=seconds,
        edited_share=edited.step.seconds / plan.best.step.seconds,
    )  # fmt: skip


def _faster(search: FoldedSearch, best: PricedLayout, one: PricedLayout) -> PricedLayout:
    return one if one.step.seconds < best.step.seconds and search.fits(one.layout) else best


def _edited(search: FoldedSearch, first: PricedLayout) -> PricedLayout:
    """Return the fastest of random edits of one layout."""
    edits = LayoutEdits(space=search.space, prices=search.prices, pins=_PINS)
    best, draw = first, np.random.default_rng(0)
    start = first.layout.changed(degree=None)
    for _ in range(_OF_RANDOM):
        layout = edits.edited(start, draw)
        if layout is not None:
            best = _faster(search, best, search.priced(layout))
    return best


def _row(question: Question, found: Found) -> str:
    memory = f", {question.memory_gib} GiB" if question.memory_gib else ""
    saved = " | ".join(f"{100 * (1 - share):.1f} %" for share in found.shares)
    return (
        f"| {question.model} | {question.profile}{memory} | {question.ranks} | {question.target} | "
        f"{found.bounded.step.seconds:.2f} s | {saved} | {100 * (1 - found.edited_share):.1f} % | "
        f"{found.seconds[1]:.1f} s | {_change(found.bounded.layout, found.best.layout)} |"
    )


def _change(before: FoldedLayout, after: FoldedLayout) -> str:
    """Return what one layout has that another one does not."""
    words = []
    if layout_words(after) != layout_words(before):
        words.append(layout_words(after))
    if {*after.recompute} != {*before.recompute}:
        words.append("recompute " + (", ".join(after.recompute) or "nothing"))
    words += [
        f"{name.replace('_', ' ')} {getattr(after, name)}"
        for name in ("overlap", "dispatcher", "zero", "offload_activations", "offload_optimizer")
        if getattr(after, name) != getattr(before, name)
    ]
    if after.stages != before.stages:
        words.append("stages " + (stage_words(after.stages) if after.stages else "equal"))
    return "; ".join(words).replace("|", "\\|") or "nothing"


def _page(rows: Sequence[str]) -> str:
    tries = " | ".join(f"{count:,} tried" for count in TRIES)
    marks = "---:|" * (len(TRIES) + 2)
    about = (
        "Predicted steps of published machines, sequences of 4,096 tokens: what the fastest layout "
        "saves that fits, of those that `moetune plan --search-trials` tries, against the best of "
        f"branch and bound. Not run. Beside it {_OF_RANDOM:,} random edits of that best one, "
        "without a study. Less than 1 % changes no plan. `python -m benchmarks.wider_layouts`; the "
        f"seconds are of one core, for {TRIES[1]:,} layouts."
    )
    header = (
        f"| model | machine | ranks | target | branch and bound | {tries} | random edits | seconds "
        "| what is changed |"
    )
    rule = f"|---|---|---:|---|---:|{marks}---|"
    title = "# Layouts beyond branch and bound"
    return "\n".join([title, "", about, "", header, rule, *rows, ""])


if __name__ == "__main__":
    main()
