"""Sentences on a plan of either kind: its workload, speed, memory, and how sure it is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moetune.domain.any_plan import AnyPlan
from moetune.domain.budget import Budget, Spread, TrainingRun
from moetune.domain.layer import LayerShape, Throughput
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile, SuspectGroup
from moetune.domain.units import (
    format_amount,
    format_days,
    format_flops,
    format_share,
    format_train_tokens,
)
from moetune.report.section import EMPTY, Cell, Highlight, Section, Table, chance, plural, sentence

LEAST_REGRET = 5e-4


def plan_scope(plan: AnyPlan, *, profile: Profile | None = None) -> str:
    """Return a plan's workload: "64 experts over 64 GPUs · 8,192 tokens per GPU · bfloat16".

    Args:
        profile: tells whether a rank is a GPU.
    """
    device = device_word(profile)
    devices, dtype = plural(plan.inputs.world_size, device), plan.inputs.dtype
    if plan.kind == "training":
        batch = f"{plural(plan.inputs.global_batch, 'sequence')} of {plan.inputs.seq:,} tokens"
        return f"{devices} · {batch} · {dtype} · for {plan.inputs.runtime}"
    tokens, experts = plan.inputs.tokens_per_rank, plan.inputs.layer.num_experts
    place = f"on every {device}" if plan.kind == "tensor" else f"per {device}"
    return (
        f"{plural(experts, 'expert')} over {devices} · {plural(tokens, 'token')} {place} · {dtype}"
    )


def layer_words(layer: LayerShape) -> str:
    """Return "512 × 2048, 8 experts, top 1, gelu"."""
    experts = (
        f"{layer.num_experts} experts, top {layer.top_k}" if layer.num_experts > 1 else "dense"
    )
    return f"{layer.d_model} × {layer.d_hidden}, {experts}, {layer.activation}"


def speed_words(speed: Throughput, device: str = "device") -> str:
    """Return "423 TFLOP/s a GPU, MFU 42.8 %", or "no peak known" in place of MFU."""
    rate = format_flops(speed.flops_per_second) + (f" a {device}" if device else "")
    return f"{rate}, {mfu_words(speed)}"


def mfu_words(speed: Throughput) -> str:
    """Return "MFU 42.8 %", or "no peak known"."""
    return "no peak known" if speed.mfu is None else f"MFU {format_share(speed.mfu)}"


def speed_cell(speed: Throughput | None) -> Cell:
    """Return the cell of model FLOPs a second on a device; an empty cell for None."""
    if speed is None:
        return EMPTY
    return Cell(text=format_flops(speed.flops_per_second), value=speed.flops_per_second)


def suspect_words(plan: AnyPlan, profile: str | None = None) -> tuple[str, ...]:
    """Return what is suspect in a plan's profile, and what to do; empty if nothing is suspect.

    Args:
        profile: the profile's name, if the plan has the name of a changed profile.
    """
    quality, name = plan.profile_quality, profile or plan.inputs.profile
    if quality is None or quality.label != "suspect":
        return ()
    groups = ", ".join(map(_suspect_group, quality.suspect))
    words = (
        f"The profile {name!r} is suspect, and so is this plan: {groups}. Measure it again on "
        f"an idle machine; `moetune profiles show {name}` says how."
    )
    return (words,)


def parts_table(
    name: str, header: tuple[str, str], parts: Mapping[str, float],
    cell: Callable[[float], Cell] = lambda size: Cell.size(round(size)),
) -> Table:  # fmt: skip
    """Return the parts above zero with their shares of the sum, the largest first.

    Args:
        header: headings of the parts and of their sizes.
        cell: returns the cell of a size; default, of bytes.
    """
    rows, whole = sorted(parts.items(), key=lambda part: -part[1]), sum(parts.values())
    return Table(
        name=name,
        header=(*header, "share"),
        rows=tuple(
            (Cell.words(part), cell(size), Cell.share(size / whole)) for part, size in rows if size
        ),
    )


def trust_words(plan: AnyPlan) -> str:
    """Return "measured", or "measured, suspect" if the profile is suspect."""
    return f"{plan.trust}, suspect" if plan.is_suspect else plan.trust


def _suspect_group(suspect: SuspectGroup) -> str:
    if suspect.median_error is None or suspect.p95_error is None:
        return f"{suspect.group} (times vary too much)"
    return (
        f"{suspect.group} (sizes left out are predicted {format_share(suspect.median_error)} off "
        f"in the median, {format_share(suspect.p95_error)} at p95)"
    )


def device_word(profile: Profile | None) -> str:
    """Return the word for a rank: "GPU" if the profile's machine has GPUs."""
    return "GPU" if profile is not None and profile.machine.kind == "cuda" else "rank"


def routing_words(plan: Plan) -> Iterator[str]:
    """Yield how uneven a layer's routing is, and whether its experts are placed by loads."""
    if plan.experts and plan.placement is not None:
        yield sentence(f"Experts are placed by their loads: {plan.placement.why}")
        return
    mean = f"{plan.workload.skew.mean:.2f}"
    if mean == "1.00":
        return
    yield f"Routing is uneven: the fullest rank has {mean} × the mean rows, and the others wait."
    if plan.placement is not None:
        yield sentence(f"Experts keep their order: {plan.placement.why}")


def kernel_words(plan: Plan) -> Iterator[str]:
    """Yield which kernel runs the experts, if there was a choice."""
    if plan.kernel is not None:
        yield plan.kernel.why


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """Sentences and sections on a plan's reasons; a kind of plan may leave some empty.

    Args:
        placement: how uneven the routing is, and how experts are placed.
        why: reasons for the choice.
        sure: how sure the choice is.
        pins: flags of the pins and their values.
        terms: parts of time and memory.
        notes: remarks on the alternatives.
        ranges: the choice for other sizes.
    """

    decision: str
    placement: tuple[str, ...]
    why: tuple[str, ...]
    sure: str
    pins: tuple[tuple[str, str], ...]
    terms: tuple[Section, ...]
    notes: tuple[str, ...] = ()
    ranges: tuple[Section, ...] = ()


def sure_words(what: str, probability: float, regret: float) -> str:
    """Return the probability that a choice is the best, and the expected loss if it is not."""
    text = f"How sure: {chance(probability)} that no other {what} is better"
    if regret >= LEAST_REGRET:
        text += f"; on average {format_share(regret)} slower than the best"
    return text


def run_words(budget: Budget | None, run: TrainingRun | None) -> Iterator[str]:
    """Yield time, GPU-hours and cost of a whole training; nothing without a budget."""
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
    """Yield the days of a whole training with its cost or its GPU-hours."""
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


def stale_words(profile: str, changed: Sequence[str]) -> str:
    """Return how the software changed since a profile was measured, and what renews it."""
    return (
        f"profile {profile!r} is stale, the software changed: {', '.join(changed)}; "
        f"measure it again: `moetune profile --name {profile}`"
    )


def earlier_runs_words(profile: str, num_runs: int) -> str:
    """Return that no observed run was predicted with a profile's present numbers."""
    return (
        f"profile {profile} has changed since its {plural(num_runs, 'observed run')}, so that no "
        "plan is calibrated: observe again with a new plan"
    )
