"""Reasons in words, with figures: why a choice won, why others lost, and warnings."""

from collections.abc import Iterable, Iterator

from moetune.domain.constraints import Strategy
from moetune.domain.costs import Trust
from moetune.domain.interference import Interference
from moetune.domain.plan import Binding
from moetune.domain.profile import Provenance
from moetune.domain.units import format_bytes, format_seconds, format_share
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.times import StepTime

STRATEGY_WORDS: dict[Strategy, str] = {
    "none": "all activations are kept",
    "S1": "what the experts received and their pre-activations wait in host memory",
    "S2": "tokens are sent again, pre-activations wait in host memory",
    "S3": "what the experts received waits in host memory, pre-activations are computed again",
    "S4": "tokens are sent again, pre-activations are computed again",
}
"""Restoration of activations for the backward pass, by strategy (MPipeMoE Table II)."""
PAGEABLE = (
    "no copies from pinned memory were measured: activations are offloaded to pageable memory, and "
    "nothing is computed meanwhile; `moetune profile` measures pinned copies"
)
ONE_RANK = (
    "One rank sends nothing, so there is no transfer to hide, and more chunks would only repeat "
    "the start-up of the experts."
)


def binding_resource(step: StepTime) -> Binding:
    """Return the resource with the largest part of the step's critical path.

    Where memory is reused, the busiest one.
    """
    if reuses(step):
        link, device, copies = _all_seconds(step)
        if copies > max(link, device):
            return "copies"
        return "communication" if link > device else "computation"
    link, device = _critical_seconds(step)
    return "communication" if link > device else "computation"


def explain_choice(
    *, step: StepTime, sequential: StepTime, runner_up: StepTime | None, interference: Interference
) -> str:
    """Return why the degrees of `step` are best.

    Args:
        sequential: one chunk each way.
        runner_up: the best other choice; None where there is none.
    """
    if _chunks(step) != _chunks(sequential):
        return (
            f"In one chunk the step would take {format_seconds(sequential.seconds)}; "
            f"{_chunks(step)} {_gain(step, sequential)}. {_critical_path(step)}"
        )
    if runner_up is None:
        return "One chunk each way is the only choice that the bounds leave."
    speeds = ""
    if not interference.is_none:
        comm = format_share(interference.comm.comp, digits=0)
        comp = format_share(interference.comp.comm, digits=0)
        speeds = (
            f" While they overlap, transfers run at {comm} of their speed and experts at {comp}."
        )
    if runner_up.seconds < step.seconds:
        saved = 1 - runner_up.seconds / step.seconds
        return (
            f"Overlapping is not worth it here: {_chunks(runner_up)} promise "
            f"{format_seconds(runner_up.seconds)} instead of {format_seconds(step.seconds)}, and "
            f"{format_share(saved)} of a step is less than such predictions miss.{speeds}"
        )
    return (
        f"Overlapping cannot pay here: {_chunks(runner_up)} would take "
        f"{format_seconds(runner_up.seconds)} instead of {format_seconds(step.seconds)} "
        f"({explain_loss(other=runner_up, best=step)}).{speeds}"
    )


def explain_declined(*, several: StepTime, one_chunk: StepTime, regret: float) -> str:
    """Return why one chunk is safer than several that were not measured.

    Args:
        regret: expected relative loss of several.
    """
    return (
        f"One chunk is the safe answer: {_chunks(several)} promise "
        f"{format_seconds(several.seconds)} instead of {format_seconds(one_chunk.seconds)}, but "
        "that rests on times that were not measured; as far as these may be wrong, more is lost "
        f"by cutting ({format_share(regret)} on average) than gained."
    )


def explain_loss(*, other: StepTime, best: StepTime) -> str:
    """Return by how much the other choice is slower, with its extra work and missing overlap."""
    slower = other.seconds / best.seconds - 1 if best.seconds else 0.0
    if slower < -TIE:
        return f"{format_share(slower)}, within what predictions miss"
    if slower <= TIE:
        return "as fast, with other numbers of chunks"
    work, hidden = (
        0.0 if abs(seconds) <= TIE * best.seconds else seconds
        for seconds in (
            _work_seconds(other) - _work_seconds(best),
            _hidden_seconds(other) - _hidden_seconds(best),
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


def explain_strategy_loss(
    *, other: StepTime, peak_bytes: int, limit_bytes: int, best: StepTime, is_pinned: bool = False
) -> str:
    """Return why another strategy lost: it does not fit, or its extra work.

    Args:
        is_pinned: whether the strategy of `best` was given, so that a faster one was no choice.
    """
    if peak_bytes > limit_bytes:
        return (
            f"does not fit: it peaks at {format_bytes(peak_bytes)}, "
            f"{format_bytes(peak_bytes - limit_bytes)} more than the limit"
        )
    slower = other.seconds / best.seconds - 1 if best.seconds else 0.0
    if slower < -TIE:
        lost = "but the strategy is pinned" if is_pinned else "within what predictions miss"
        return f"{format_share(slower)}, {lost}"
    if slower <= TIE:
        return "as fast"
    names = ("sends", "computes", "copies")
    more = zip(names, _all_seconds(other), _all_seconds(best), strict=True)
    more_work = [
        f"{name} {format_seconds(mine - its)} more"
        for name, mine, its in more
        if mine - its > TIE * best.seconds
    ]
    reason = f"it {' and '.join(more_work)}" if more_work else "it hides less"
    return f"+{100 * slower:.1f} %: {reason}"


def explain_strategy(
    *, best: StepTime, peak_bytes: int, without_bytes: int, limit_bytes: int
) -> str:
    """Return why the strategy of `best` reuses memory.

    Args:
        peak_bytes: of the choice.
        without_bytes: at the peak of the fastest choice without reuse.
    """
    return (
        f"Memory binds: keeping everything peaks at {format_bytes(without_bytes)}, the limit is "
        f"{format_bytes(limit_bytes)}. Strategy {best.strategy} ({STRATEGY_WORDS[best.strategy]}) "
        f"peaks at {format_bytes(peak_bytes)} and is the fastest one that fits. Of its times "
        f"{binding_resource(best)} is the longest: {_busy_words(best)}."
    )


def explain_memory(*, step: StepTime, wanted: StepTime, wanted_bytes: int, limit_bytes: int) -> str:
    """Return why other chunks are taken than the fastest ones.

    Args:
        wanted: the step that would be chosen with more memory.
        wanted_bytes: at its peak.
    """
    return (
        f"Memory binds: with {_chunks(wanted)} a step would peak at {format_bytes(wanted_bytes)}, "
        f"the limit is {format_bytes(limit_bytes)}. {_chunks(step).capitalize()} is the fastest "
        "choice that fits."
    )


def trust_warnings(
    *,
    trust: Trust,
    provenance: Provenance,
    profile: str,
    assumed_spread: bool,
    doubts: Iterable[str] = (),
) -> Iterator[str]:
    """Yield warnings about a doubtful prediction, with the command that helps.

    Args:
        trust: the least trust in any number behind the step.
        assumed_spread: whether the spread comes from an assumed error instead of a measured one.
        doubts: warnings that name what was not measured; of a published profile, what of it is not
            published.
    """
    named = tuple(doubts)
    if provenance != "measured":
        yield (
            f"the numbers come from the {provenance} profile {profile!r}, not from your machine: "
            "run `moetune profile` there"
        )
        if assumed_spread:
            yield f"the step's range assumes an error of 5 % in each number of {profile!r}"
        if provenance == "published":
            yield from named
    elif named:
        yield from named
    elif trust == "modelled":
        yield "some times were not measured and are modelled from similar operations"
    elif trust == "extrapolated":
        yield (
            f"some sizes, or numbers of transfers in flight, lie outside what {profile!r} measured "
            "and are extrapolated: run `moetune profile --preset full`"
        )


def explain_pin(*, phase: str, pinned: int, best: int, slower: float) -> str:
    """Return by how much a pinned degree is slower than the best one; `slower` is relative."""
    longer = format_share(slower)
    return f"the pinned {phase} degree {pinned} makes the phase {longer} slower than {best}"


def count_chunks(degree: int) -> str:
    """Return "1 chunk", "2 chunks"."""
    return f"{degree} chunk{'' if degree == 1 else 's'}"


def _chunks(step: StepTime) -> str:
    return f"{count_chunks(step.forward.degree)} forward and {step.backward.degree} backward"


def _critical_path(step: StepTime) -> str:
    if reuses(step):
        return f"{binding_resource(step).capitalize()} binds: {_busy_words(step)}."
    link, device = _critical_seconds(step)
    if device == 0:
        return "Communication binds: all experts hide behind the transfers."
    return (
        f"{binding_resource(step).capitalize()} binds: {format_seconds(link)} of transfers and "
        f"{format_seconds(device)} of experts are on the critical path."
    )


def _busy_words(step: StepTime) -> str:
    """Return the seconds of each resource: "transfers are 82.4 ms in all, experts 41.5 ms"."""
    link, device, copies = _all_seconds(step)
    transfers, experts = format_seconds(link), format_seconds(device)
    copied = f", copies {format_seconds(copies)}" if copies else ""
    return f"transfers are {transfers} in all, experts {experts}{copied}"


def _gain(step: StepTime, sequential: StepTime) -> str:
    """Return the time that the chunks hide, and that smaller chunks cost or save.

    Where transfers and experts slow each other down by more than they overlap, overlapping
    itself loses time, and smaller chunks win, if at all, by less work.
    """
    hidden = _hidden_seconds(step)
    work = _work_seconds(step) - _work_seconds(sequential)
    if hidden > TIE * step.seconds:
        hide, but = f"hide {format_seconds(hidden)} of it", "and"
    elif hidden < -TIE * step.seconds:
        hide, but = f"hide none of it and lose {format_seconds(-hidden)} by overlapping", "but"
    else:
        hide, but = "hide none of it", "but"
    if work < 0:
        return f"{hide}, {but} smaller chunks save {format_seconds(-work)}"
    return f"{hide} at a cost of {format_seconds(work)} for smaller chunks" if work else hide


def reuses(step: StepTime) -> bool:
    """Return whether the step reuses memory, which one chunk each way never does."""
    return step.strategy != "none" and max(step.degrees) > 1


def _all_seconds(step: StepTime) -> tuple[float, float, float]:
    """Return all transfers, experts and copies of the step, undisturbed."""
    phases = (step.forward, step.backward)
    return (
        sum(phase.link_seconds for phase in phases),
        sum(phase.device_seconds for phase in phases),
        sum(phase.copy_seconds for phase in phases),
    )


def _work_seconds(step: StepTime) -> float:
    return step.forward.work_seconds + step.backward.work_seconds


def _hidden_seconds(step: StepTime) -> float:
    return _work_seconds(step) - step.forward.seconds - step.backward.seconds


def _critical_seconds(step: StepTime) -> tuple[float, float]:
    phases = (step.forward, step.backward)
    link = sum(phase.critical_link_seconds for phase in phases)
    return link, sum(phase.critical_device_seconds for phase in phases)
