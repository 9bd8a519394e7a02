"""A plan in words, with figures: why a choice won, and why others lost."""

from dataclasses import replace
from statistics import fmean

from moetune.domain.constraints import Strategy
from moetune.domain.interference import SpeedTable
from moetune.domain.kernels import KernelChoice
from moetune.domain.placement import ModelPlacement, PlacementChoice
from moetune.domain.plan import Plan
from moetune.domain.units import format_bytes, format_chunks, format_seconds, format_share
from moetune.report.doubts import plan_warnings
from moetune.solve.layer.choose import NOISE, Ranking
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.placed import WORTH_PLACING
from moetune.solve.layer.plan import SolvedLayer
from moetune.solve.layer.strategies import Declined, RankedLayer
from moetune.solve.layer.times import StepTime
from moetune.solve.model.placement import PlacedLayouts, is_worth_placing

STRATEGY_WORDS: dict[Strategy, str] = {
    "none": "all activations are kept",
    "S1": "what the experts received and their pre-activations wait in host memory",
    "S2": "tokens are sent again, pre-activations wait in host memory",
    "S3": "what the experts received waits in host memory, pre-activations are computed again",
    "S4": "tokens are sent again, pre-activations are computed again",
}
"""Restoration of activations for the backward pass, by strategy (MPipeMoE Table II)."""
_AS_LONG = "as long within the measurement's noise"
_ONE_RANK = (
    "One rank sends nothing, so there is no transfer to hide, and more chunks would only repeat "
    "the start-up of the experts."
)


def in_words(solved: SolvedLayer) -> Plan:
    """Return a solved layer's plan with its reasons and its warnings."""
    plan, ranked, terms = solved.plan, solved.ranked, solved.plan.terms
    lost = [explain_loss(rival=rival, best=ranked.step) for rival in solved.nearest]
    lost += [explain_strategy_loss(ranked, loser) for loser in ranked.losers]
    alternatives = zip(plan.alternatives, lost, strict=True)
    by_name = {row.strategy: row for row in ranked.contenders}
    strategies = (
        row if row.is_chosen
        else replace(row, lost_because=explain_strategy_loss(ranked, by_name[row.strategy]))
        for row in (terms.strategies if terms else ())
    )  # fmt: skip
    choice, kernel = plan.placement, plan.kernel
    return replace(
        plan,
        decision=replace(plan.decision, why=_why(ranked, next(iter(solved.nearest), None))),
        alternatives=tuple(replace(row, lost_because=why) for row, why in alternatives),
        terms=terms and replace(terms, strategies=tuple(strategies)),
        placement=choice and replace(choice, why=_placed_words(choice)),
        kernel=kernel and replace(kernel, why=_kernel_words(kernel, solved)),
        warnings=tuple(plan_warnings(solved)),
    )


def _why(ranked: RankedLayer, runner_up: StepTime | None) -> str:
    """Return why the best strategy and degree won: memory, doubt, or the time of a step."""
    ranking, step = ranked.best, ranked.best.step
    limit = format_bytes(ranking.budget.limit_bytes)
    without = next((loser for loser in ranked.losers if loser.strategy == "none"), None)
    if without is not None and step.is_reused and not without.fits:
        return (
            f"Memory binds: keeping everything peaks at "
            f"{format_bytes(without.memory.device_bytes)}, the limit is {limit}. Strategy "
            f"{step.strategy} ({STRATEGY_WORDS[step.strategy]}) peaks at "
            f"{format_bytes(ranking.memory.device_bytes)} and is the fastest one that fits. Of "
            f"its times {step.binding} is the longest: {_busy_words(step)}."
        )
    if ranking.memory_forced:
        wanted = ranking.wanted
        peak = ranking.budget.peak(strategy="none", degree=wanted.degree)
        return (
            f"Memory binds: in {_chunks(wanted)} a step would peak at "
            f"{format_bytes(peak.device_bytes)}, the limit is {limit}. "
            f"A step in {_chunks(step)} is the fastest that fits."
        )
    if (declined := ranked.declined) is not None:
        return (
            f"One chunk is the safe answer: {_chunks(declined.step)} promise "
            f"{format_seconds(declined.step.seconds)} instead of {format_seconds(step.seconds)}, "
            f"but {_declined_words(declined)}."
        )
    if ranking.chooser.costs.world_size == 1 and ranking.degree == 1:
        return _ONE_RANK
    return explain_choice(
        step=step,
        sequential=ranking.sequential,
        runner_up=runner_up,
        speeds=ranking.chooser.costs.costs.speeds,
    )


def explain_choice(
    *, step: StepTime, sequential: StepTime, runner_up: StepTime | None, speeds: SpeedTable
) -> str:
    """Return why the degree of `step` is best."""
    if step.degree > 1:
        return (
            f"In one chunk the step would take {format_seconds(sequential.seconds)}; "
            f"{_chunks(step)} {_gain(step, sequential)}. {_critical_path(step)}"
        )
    if runner_up is None:
        return "One chunk is the only choice that the bounds leave."
    slower = ""
    if any(speed.item() != 1 for speed in speeds.values()):
        comm = format_share(speeds["comm", "comp"].item(), digits=0)
        comp = format_share(speeds["comp", "comm"].item(), digits=0)
        slower = (
            f" While they overlap, transfers run at {comm} of their speed and experts at {comp}."
        )
    if runner_up.seconds < step.seconds:
        saved = 1 - runner_up.seconds / step.seconds
        return (
            f"Overlapping is not worth it here: {_chunks(runner_up)} promise "
            f"{format_seconds(runner_up.seconds)} instead of {format_seconds(step.seconds)}, and "
            f"{format_share(saved)} of a step is less than such predictions miss.{slower}"
        )
    return (
        f"Overlapping cannot pay here: {_chunks(runner_up)} would take "
        f"{format_seconds(runner_up.seconds)} instead of {format_seconds(step.seconds)} "
        f"({explain_loss(rival=runner_up, best=step)}).{slower}"
    )


def explain_loss(*, rival: StepTime, best: StepTime) -> str:
    """Return by how much the other choice is slower, with its extra work and missing overlap."""
    slower = _slower(rival, best)
    if slower < -TIE:
        return f"{format_share(slower)}, within what predictions miss"
    if slower <= TIE:
        return "as fast, in more or fewer chunks"
    work, hidden = (
        0.0 if abs(seconds) <= TIE * best.seconds else seconds
        for seconds in (
            rival.work_seconds - best.work_seconds,
            rival.hidden_seconds - best.hidden_seconds,
        )
    )
    if work <= 0:
        cost = f"its chunks add up to {format_seconds(-work)} less, but it " if work else ""
        return f"+{100 * slower:.1f} %: {cost}hides {format_seconds(-hidden)} less"
    cost = f"its chunks add up to {format_seconds(work)} more"
    if hidden > 0:
        return f"+{100 * slower:.1f} %: {cost} and hide only {format_seconds(hidden)} more"
    less = f"it hides {format_seconds(-hidden)} less" if hidden else "it hides nothing more"
    return f"+{100 * slower:.1f} %: {cost}, and {less}"


def explain_strategy_loss(ranked: RankedLayer, loser: Ranking) -> str:
    """Return why another strategy lost: it does not fit, or its extra work."""
    rival, best = loser.step, ranked.step
    peak_bytes, limit_bytes = loser.memory.device_bytes, ranked.best.budget.limit_bytes
    if peak_bytes > limit_bytes:
        return (
            f"does not fit: it peaks at {format_bytes(peak_bytes)}, "
            f"{format_bytes(peak_bytes - limit_bytes)} more than the limit"
        )
    slower = _slower(rival, best)
    if slower < -TIE:
        is_pinned = ranked.best.chooser.bounds.strategy is not None
        lost = "but the strategy is pinned" if is_pinned else "within what predictions miss"
        return f"{format_share(slower)}, {lost}"
    if slower <= TIE:
        return "as fast"
    names = ("sends", "computes", "copies")
    more = zip(names, rival.all_seconds, best.all_seconds, strict=True)
    more_work = [
        f"{name} {format_seconds(mine - its)} more"
        for name, mine, its in more
        if mine - its > TIE * best.seconds
    ]
    reason = f"it {' and '.join(more_work)}" if more_work else "it hides less"
    return f"+{100 * slower:.1f} %: {reason}"


def _slower(rival: StepTime, best: StepTime) -> float:
    return rival.seconds / best.seconds - 1 if best.seconds else 0.0


def _chunks(step: StepTime) -> str:
    return format_chunks(step.degree, step.degree)


def _critical_path(step: StepTime) -> str:
    if step.is_reused:
        return f"{step.binding.capitalize()} binds: {_busy_words(step)}."
    link, device = step.critical_seconds
    if device == 0:
        return "Communication binds: all experts hide behind the transfers."
    return (
        f"{step.binding.capitalize()} binds: {format_seconds(link)} of transfers and "
        f"{format_seconds(device)} of experts are on the critical path."
    )


def _busy_words(step: StepTime) -> str:
    """Return the seconds of each resource: "transfers are 82.4 ms in all, experts 41.5 ms"."""
    link, device, copies = step.all_seconds
    transfers, experts = format_seconds(link), format_seconds(device)
    copied = f", copies {format_seconds(copies)}" if copies else ""
    return f"transfers are {transfers} in all, experts {experts}{copied}"


def _gain(step: StepTime, sequential: StepTime) -> str:
    """Return the time that chunks hide, or lose by overlapping, and what smaller chunks cost."""
    hidden = step.hidden_seconds
    work = step.work_seconds - sequential.work_seconds
    if hidden > TIE * step.seconds:
        hide, but = f"hide {format_seconds(hidden)} of it", "and"
    elif hidden < -TIE * step.seconds:
        hide, but = f"hide none of it and lose {format_seconds(-hidden)} by overlapping", "but"
    else:
        hide, but = "hide none of it", "but"
    if work < 0:
        return f"{hide}, {but} smaller chunks save {format_seconds(-work)}"
    return f"{hide} at a cost of {format_seconds(work)} for smaller chunks" if work else hide


def _declined_words(declined: Declined) -> str:
    """Return why several chunks are declined."""
    if declined.least_seconds is not None:
        return (
            "most of that is smaller products that are quicker, within the profile's error: "
            f"one chunk may take {format_seconds(declined.least_seconds)}, too"
        )
    return (
        "that rests on times that were not measured; as far as these may be wrong, more is lost by "
        f"cutting ({format_share(declined.mean_loss)} on average) than gained"
    )


def _kernel_words(kernel: KernelChoice, solved: SolvedLayer) -> str:
    """Return why the experts have their kernel."""
    if solved.problem.inputs.pinned.expert_kernel is not None:
        return f"{kernel.name} was asked for."
    words = []
    for row in kernel.others:
        share = row.step_seconds / solved.ranked.step.seconds - 1
        is_noise, longer = abs(share) <= NOISE, f"{format_share(share)} longer"
        words.append(f"{row.name} takes {_AS_LONG if is_noise else longer}")
    return f"Of the kernels measured for the experts, {kernel.name} is taken: {', '.join(words)}."


def _placed_words(choice: PlacementChoice) -> str:
    """Return why experts are placed by their loads, or keep their order."""
    before, after = f"{choice.natural_skew:.2f}", f"{choice.placed_skew:.2f}"
    if choice.gain is None:
        return f"in their order they do not fit: the fullest rank has {before} × the mean rows"
    if choice.placed_skew == choice.natural_skew:
        return (
            f"no placement was found with fewer than {before} × the mean rows on the fullest rank"
        )
    gain = format_share(choice.gain)
    if choice.gain > WORTH_PLACING:
        return (
            f"the fullest rank has {after} × the mean rows instead of {before}, saving {gain} of "
            "the step"
        )
    least = format_share(WORTH_PLACING, digits=0)
    return (
        f"the best placement has {after} × the mean rows on the fullest rank instead of {before}, "
        f"and saves {gain} of the step: less than {least} is within the predictions' error"
    )


def placement_reason(placed: PlacedLayouts, *, target: str, zero: int | None) -> str:
    """Return why a model's experts are placed by their loads, or keep their order."""
    choice = placed.placement
    rows = f"× the mean rows, the mean of {len(choice.layers)} layers"
    fullest = f"the fullest ranks have {_mean(choice, 'natural_skew')} {rows}"
    if placed.untried == "pinned":
        return f"as pinned; {fullest}"
    if placed.untried == "zero":
        return f"with ZeRO stage {zero} their shards are in the order of the ranks; {fullest}"
    if placed.untried == "memory":
        return "no layout that places them fits"
    words = _saving_words(choice)
    if placed.untried != "target":
        return words
    is_placed = any(layer.placed_skew < layer.natural_skew for layer in choice.layers)
    would = "placed ones would save less than the predictions' error"
    if is_placed and is_worth_placing(choice):
        would = f"--target moetune does: {words}"
    return f"{target} places none, and {would}"


def _saving_words(choice: ModelPlacement) -> str:
    before, after = _mean(choice, "natural_skew"), _mean(choice, "placed_skew")
    if choice.gain is None:
        return f"in their order they do not fit: the fullest ranks have {before} × the mean rows"
    gain = format_share(choice.gain)
    if is_worth_placing(choice):
        return (
            f"the fullest ranks have {after} × the mean rows, the mean of {len(choice.layers)} "
            f"layers, instead of {before}, saving {gain} of the step"
        )
    least = format_share(WORTH_PLACING, digits=0)
    return (
        f"placed ones save {gain} of the step: less than {least} is within the predictions' error"
    )


def _mean(choice: ModelPlacement, name: str) -> str:
    """Return a skew of the layers on their mean: "1.25"."""
    return f"{fmean(getattr(layer, name) for layer in choice.layers):.2f}"
