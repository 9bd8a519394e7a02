"""A whole training in words: its days, GPU-hours and cost, each with its range."""

from collections.abc import Callable, Iterator

from moetune.domain.budget import Budget, Spread, TrainingRun
from moetune.domain.units import format_amount, format_days, format_share, format_train_tokens
from moetune.report.section import Cell, Highlight, plural


def run_words(budget: Budget | None, run: TrainingRun | None) -> Iterator[str]:
    """Yield what a whole training takes; nothing where nobody asked."""
    if budget is None or run is None:
        return
    hours = spread_words(run.gpu_hours)
    said = f"{spread_words(run.days, format_days)}, {hours} GPU-hours"
    if run.cost is not None:
        said += f", a cost of {spread_words(run.cost)} at {budget.price_per_gpu_hour:g} each"
    busy = "if nothing stops it"
    if budget.utilization < 1:
        busy = f"where steps run in {format_share(budget.utilization, digits=0)} of the time"
    tokens = format_train_tokens(budget.train_tokens)
    yield f"All {tokens} tokens: {plural(run.steps, 'step')}, {said}, {busy}."


def run_highlights(run: TrainingRun | None) -> Iterator[Highlight]:
    """Yield the days of a whole training, with its cost or its GPU-hours."""
    if run is None:
        return
    days, money = run.days, run.cost or run.gpu_hours
    words = "" if run.cost else " GPU-hours"
    note = f"{format_days(days.p05)} to {format_days(days.p95)}; {spread_words(money)}{words}"
    cell = Cell(text=format_days(days.predicted), value=days.predicted * 86_400, unit="s")
    yield Highlight("The whole training", cell, note)


def spread_words(spread: Spread, words: Callable[[float], str] = format_amount) -> str:
    """Return "28.1 days (24.2 days–38.2 days)"."""
    low, middle, high = map(words, (spread.p05, spread.predicted, spread.p95))
    if low.partition(" ")[2] == high.partition(" ")[2]:  # units once
        low, high = low.partition(" ")[0], high.partition(" ")[0]
    return f"{middle} ({low}–{high})"
