"""A comparison of machines as a table, a figure of time against cost, and JSON values."""

from collections.abc import Callable, Iterator, Sequence
from math import isinf
from pathlib import Path
from typing import Any

from moetune.app.files import write_text
from moetune.app.machine_choice import Choice, Comparison
from moetune.app.training import step_spread
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.targets import find_target
from moetune.domain.training_document import TrainingDocument
from moetune.domain.units import format_amount, format_days, format_share, format_train_tokens
from moetune.report.figure import Axis, Figure, Point, Series
from moetune.report.html import Chapter, environment, report_page
from moetune.report.section import EMPTY, Cell, Section, Table, plural
from moetune.report.words import spread_words
from moetune.solve.model.uncertainty import UNRECORDED, public_ratios

_DECADE = 10
COMPARE_SCHEMA = "moetune.compare/1"


def choice_document(compared: Comparison) -> dict[str, Any]:
    """Return the values that `moetune compare --json` prints."""
    question = compared.question
    return {
        "schema": COMPARE_SCHEMA,
        "inputs": {
            "model": question.model, "global_batch": question.global_batch, "seq": question.seq,
            **encode(compared.budget),
        },
        "choices": [_values(choice, compared) for choice in compared.choices],
    }  # fmt: skip


def _values(choice: Choice, compared: Comparison) -> dict[str, Any]:
    values: dict[str, Any] = {
        "profile": choice.profile, "world_size": choice.world_size, "target": choice.target,
    }  # fmt: skip
    if choice.plan is None:
        error = choice.refusal
        return values | {
            "word": choice.word,
            "error": error.what if error else "",
            "hint": getattr(error, "hint", ""),
        }
    plan, better = choice.plan, compared.better_than(choice)
    return values | {
        "layout": encode(plan.layout), "dtype": plan.inputs.dtype,
        "step_seconds": encode(step_spread(plan.step_seconds, plan.confidence)),
        "tokens_per_second": plan.tokens_per_second, "mfu": plan.throughput.mfu,
        "peak_bytes": plan.memory.peak_bytes, "run": encode(plan.run),
        "calibration": encode(plan.calibration),
        "price_per_gpu_hour": plan.inputs.budget and plan.inputs.budget.price_per_gpu_hour,
        "better": better and {
            "profile": better.profile, "world_size": better.world_size, "target": better.target,
        },
    }  # fmt: skip


def choice_sections(compared: Comparison) -> Iterator[Section]:
    """Yield the answer, the table and its figure, and why choices have no plan."""
    question, budget = compared.question, compared.budget
    name = question.model or "the model"
    tokens = format_train_tokens(budget.train_tokens)
    figures = (choice_figure(compared),) if len(compared.solved) > 1 else ()
    yield Section(
        name="answer", title=f"Training {name} on {tokens} tokens",
        scope=f"{plural(question.global_batch or 0, 'sequence')} of {question.seq or 0:,} tokens",
        paragraphs=(*_answer(compared), *_numbers(compared)), tables=(_table(compared),),
        figures=figures,
    )  # fmt: skip
    refused = [choice for choice in compared.choices if choice.refusal is not None]
    if refused:
        reasons = (f"{row.name}: {row.refusal.what}." for row in refused if row.refusal)
        yield Section(name="refused", title="Without a plan", paragraphs=tuple(reasons))


def _answer(compared: Comparison) -> Iterator[str]:
    if not compared.solved:
        yield "None of the choices has a plan."
        return
    fastest, cheapest = compared.solved[0], min(compared.solved, key=lambda choice: choice.money)
    words = {"Fastest": fastest, "Cheapest": cheapest}
    if fastest is cheapest:
        words = {"Fastest and cheapest": fastest}
    yield from (f"{what}: {_words(choice)}" for what, choice in words.items())


def _words(choice: Choice) -> str:
    plan = choice.plan
    assert plan is not None  # noqa: S101 - solved choices have a plan
    run = plan.run
    assert run is not None  # noqa: S101
    said = f"{spread_words(run.gpu_hours)} GPU-hours"
    if run.cost:
        said = f"a cost of {spread_words(run.cost)}"
    return f"{choice.name}: {spread_words(run.days, format_days)}, {said}; {plan.words}."


def _numbers(compared: Comparison) -> Iterator[str]:
    for target in sorted({find_target(choice.target).name for choice in compared.solved}):
        low, high = (f"{ratio:.2f}" for ratio in public_ratios(target))
        yield (
            f"Ranges of {target} are a guess: nobody has published its steps with their batch."
            if target in UNRECORDED
            else f"Nine in ten public runs took {low} to {high} times such a prediction ({target})."
        )
    factors = dict.fromkeys(
        f"{choice.profile} for {choice.target} by {choice.plan.calibration.factor:.2f}"
        for choice in compared.solved
        if choice.plan is not None and choice.plan.calibration is not None
    )
    if factors:
        yield (
            f"Calibrated by observed runs: {', '.join(factors)}. All else is as predicted; "
            "--uncalibrated compares all as predicted."
        )
    share = compared.budget.utilization
    busy = "all the time" if share == 1 else f"in {format_share(share, digits=0)} of the time"
    yield f"Steps run {busy}." + (
        "" if compared.has_prices else " Without --price it is by GPU-hours."
    )


def _table(compared: Comparison) -> Table:
    money = "cost" if compared.has_prices else "GPU-hours"
    columns: dict[str, Callable[[Choice], Cell | str]] = {
        "machine": lambda choice: choice.profile,
        "GPUs": lambda choice: Cell.count(choice.world_size),
        "runtime": lambda choice: choice.target,
        "step": _of_plan(lambda plan: Cell.seconds(plan.step_seconds)),
        "tokens/s": _of_plan(lambda plan: _tokens(plan.tokens_per_second)),
        "MFU": _of_plan(lambda plan: Cell.share(plan.throughput.mfu, digits=0)),
        "memory": _of_plan(lambda plan: Cell.size(plan.memory.peak_bytes)),
        "days": lambda choice: _amount(choice.days),
        money: lambda choice: _amount(choice.money),
        "": lambda choice: _verdict(choice, compared),
        "layout": lambda choice: choice.plan.words if choice.plan else "",
    }
    wide = ["layout", "tokens/s", "memory"]
    if len({choice.target for choice in compared.choices}) == 1:
        del columns["runtime"], wide[1:]
    return Table.of(
        "choices", compared.choices, columns, wide=tuple(wide),
        notes=("dominated: another choice is faster and cheaper.",),
    )  # fmt: skip


def _of_plan(cell: Callable[[TrainingDocument], Cell]) -> Callable[[Choice], Cell]:
    return lambda choice: EMPTY if choice.plan is None else cell(choice.plan)


def _tokens(rate: float) -> Cell:
    """Return a rate of tokens: "985 k", "2.15 M"."""
    factor, unit = (1e6, "M") if rate >= 1e6 else (1e3, "k")  # noqa: PLR2004
    return Cell(text=f"{format_amount(rate / factor)} {unit}", value=rate)


def _amount(number: float) -> Cell:
    return EMPTY if isinf(number) else Cell(text=format_amount(number), value=number)


def _verdict(choice: Choice, compared: Comparison) -> Cell:
    if choice.refusal is not None:
        return Cell.words(choice.word, mark="suspect")
    return Cell.words("dominated" if compared.better_than(choice) else "")


def choice_figure(compared: Comparison) -> Figure:
    """Return the figure of time against cost of all choices that have a plan."""
    front = [choice for choice in compared.solved if not compared.better_than(choice)]
    dominated = [choice for choice in compared.solved if choice not in front]
    line = _points(sorted(front, key=lambda choice: choice.money))
    points = _points(compared.solved)
    return Figure(
        name="choices", title="Time against cost",
        words="Down and to the left is better: no choice is both faster and cheaper than one on "
        "the line.",
        x=_axis("cost" if compared.has_prices else "GPU-hours", [point.x for point in points]),
        y=_axis("days", [point.y for point in points]),
        series=(
            Series(color="accent/0.6", points=line),
            Series(name="dominated", color="second", size=8, points=_points(dominated)),
            Series(name="not dominated", size=8, points=_points(front)),
        ),
    )  # fmt: skip


def _axis(title: str, values: Sequence[float]) -> Axis:
    return Axis(title=title, is_log=max(values) > _DECADE * min(values) > 0)


def _points(choices: Sequence[Choice]) -> tuple[Point, ...]:
    return tuple(
        Point(
            choice.money, choice.days,
            f"{choice.name}\n{format_days(choice.days)}, {format_amount(choice.money)}",
        )
        for choice in choices
    )  # fmt: skip


def write_choices(output: Path, compared: Comparison) -> None:
    """Write the comparison as a page."""
    first, *rest = choice_sections(compared)
    chapter = Chapter(
        name="choices", short="Machines", title=first.title, scope=first.scope,
        sections=(first, *rest),
    )  # fmt: skip
    write_text(output, report_page(title=first.title, chapters=(chapter,)))


def check_page(output: Path) -> None:
    """Raise InputError for a file whose name does not end in .html, MoetuneError without Jinja2."""
    if output.suffix != ".html":
        raise InputError(f"--output {output} does not end in .html", "name a page: machines.html")
    environment()
