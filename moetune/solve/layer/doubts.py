"""Plans that rest on what was not measured: one chunk where that is safe, and warnings."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moetune.domain.costs import Costs, Doubt
from moetune.domain.layer import LayerShape
from moetune.domain.request import PlanInputs
from moetune.domain.units import format_bytes
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.ranking import Ranking
from moetune.solve.layer.refits import of_each, stacked_refits
from moetune.solve.layer.times import StepTime, step_time

PROFILE = "moetune profile"
NUM_NAMED = 5
"""Most operations that a plan's warnings name one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """Several chunks that were not taken, as they may lose more than they promise.

    Args:
        regret: mean relative loss against one chunk, over refits.
        regret_of_one: that of one chunk against them.
    """

    step: StepTime
    regret: float
    regret_of_one: float


def decline_chunks(ranking: Ranking, resamples: Sequence[Costs]) -> Declined | None:
    """Return the ranking's several chunks where one chunk is the safe answer, else None.

    Nominal costs decide where they are measured. A time that was not may be wrong by far, and
    the more so the further one of the two choices is from what was measured; so here the choice
    with the smaller expected loss over the refits is taken, which are as wide as that error.

    Args:
        resamples: without any nothing is declined.
    """
    best, one_chunk = ranking.step, ranking.sequential
    if not ranking.has_one_chunk or max(best.degrees) == 1 or ranking.strategy != "none":
        return None
    if not resamples or not (best.doubts or one_chunk.doubts):
        return None
    refits = stacked_refits(ranking.costs, resamples, tokens=ranking.tokens)
    several, single = (
        of_each(_seconds(refits.stack, ranking, step), refits.num) for step in (best, one_chunk)
    )
    ratios = [one / other for one, other in zip(several, single, strict=True)]
    regret = sum(max(ratio - 1, 0.0) for ratio in ratios) / len(ratios)
    regret_of_one = sum(max(1 / ratio - 1, 0.0) for ratio in ratios) / len(ratios)
    if regret < regret_of_one:
        return None
    return Declined(step=best, regret=regret, regret_of_one=regret_of_one)


def doubt_warnings(doubts: Iterable[Doubt], *, command: str) -> Iterator[str]:
    """Yield a warning for each operation that was not measured, and how to measure them.

    Args:
        command: that measures them; "" where the profile is not of this machine.
    """
    sizes: dict[Doubt, list[float]] = {}
    for doubt in doubts:
        sizes.setdefault(doubt._replace(size=0.0), []).append(doubt.size)
    if not sizes:
        return
    named = list(sizes.items())
    if not command:  # rules say more about a machine than one form of a GEMM for another
        named.sort(key=lambda item: "modelled" not in item[0].stand_in)
    for operation, found in named[:NUM_NAMED]:
        yield _explain(operation, found)
    rest = len(named) - NUM_NAMED
    more = f"{rest} more operation{'' if rest == 1 else 's'}; " if rest > 0 else ""
    if not command:
        yield from [f"not measured: {more.removesuffix('; ')}"] if more else []
        return
    yield f"{more}the plan's range allows for that; measure what is missing:  {command}"


def profile_command(inputs: PlanInputs, launch: str) -> str:
    """Return the command that adds a plan's own sizes to its profile.

    Args:
        launch: its beginning, which starts the plan's ranks.
    """
    flags = [f"--name {inputs.profile} --resume"]
    if inputs.model is not None:
        flags.append(f"--model {inputs.model}")
    else:
        flags += _sizes(inputs.layer)
    flags += [f"--tokens {inputs.tokens_per_rank}", f"--dtype {inputs.dtype}"]
    return f"{launch} {' '.join(flags)}"


def _sizes(layer: LayerShape) -> Iterator[str]:
    yield f"--d-model {layer.d_model} --d-hidden {layer.d_hidden}"
    yield f"--num-experts {layer.num_experts} --top-k {layer.top_k}"
    yield f"--activation {layer.activation}"


def _seconds(costs: LayerCosts, ranking: Ranking, step: StepTime) -> float:
    forward_degree, backward_degree = step.degrees
    return step_time(
        costs=costs,
        tokens=ranking.tokens,
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        order=ranking.order,
    ).seconds


def _explain(doubt: Doubt, sizes: Sequence[float]) -> str:
    if doubt.stand_in:
        return f"not measured: {doubt.operation}; {doubt.stand_in} stands in"
    wanted = _span(min(sizes), max(sizes), doubt.unit)
    known = _span(doubt.low or 0.0, doubt.high or 0.0, doubt.unit)
    return f"not measured: {doubt.operation} at {wanted}; extrapolated from {known}"


def _span(low: float, high: float, unit: str) -> str:
    first, last = (_size(one, unit) for one in (low, high))
    return first if first == last else f"{first} to {last}"


def _size(size: float, unit: str) -> str:
    return format_bytes(size) if unit == "bytes" else f"{size:,.0f} {unit}"
