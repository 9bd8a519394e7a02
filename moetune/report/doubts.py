"""Warnings of plans: what was not measured or counted, slow pins, and pageable copies."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.domain.architecture import Decoder
from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE
from moetune.domain.costs import Doubt
from moetune.domain.request import PlanInputs
from moetune.domain.units import format_bytes, format_share

if TYPE_CHECKING:  # models are listed without numpy
    from moetune.solve.layer.choose import Ranking
    from moetune.solve.layer.plan import SolvedLayer

PROFILE = "moetune profile"
WORTH_A_WARNING = 1e-3
NUM_NAMED = 5
"""Most operations that a plan's warnings name one by one."""
_PAGEABLE = (
    "no copies from pinned memory were measured: activations are offloaded to pageable memory, and "
    "nothing is computed meanwhile; `moetune profile` measures pinned copies"
)


def uncounted_words(decoder: Decoder) -> tuple[str, ...]:
    """Return a sentence about towers that are not counted; () where there are none."""
    what = " and ".join(filter(None, (", ".join(decoder.uncounted[:-1]), *decoder.uncounted[-1:])))
    are = "tower is" if len(decoder.uncounted) == 1 else "towers are"
    words = f"The {what} {are} not counted: sizes and times are the language model's."
    return (words,) if decoder.uncounted else ()


def plan_warnings(solved: "SolvedLayer") -> Iterator[str]:
    """Yield a plan's warnings, with the commands that measure what is doubtful."""
    problem, ranked, ranking = solved.problem, solved.ranked, solved.ranked.best
    inputs, provenance, profile = problem.inputs, problem.provenance, problem.inputs.profile
    compared = [ranking.step, ranking.sequential]
    if ranked.declined is not None:
        compared.append(ranked.declined.step)
    command = profile_command(inputs, problem.launch) if provenance == "measured" else ""
    doubts = (doubt for step in compared for doubt in step.doubts)
    named, trust = [*doubt_warnings(doubts, command=command)], ranking.step.trust
    if provenance != "measured":
        yield (
            f"the numbers come from the {provenance} profile {profile!r}, not from your machine: "
            "run `moetune profile` there"
        )
        if problem.resamples and not ranking.chooser.is_measured:
            yield f"the step's range assumes an error of 5 % in each number of {profile!r}"
    if provenance != "modelled" and named:
        yield from named
    elif provenance == "measured" and trust == "modelled":
        yield "some times were not measured and are modelled from similar operations"
    elif provenance == "measured" and trust == "extrapolated":
        yield (
            f"some sizes, or numbers of transfers in flight, lie outside what {profile!r} measured "
            "and are extrapolated: run `moetune profile --preset full`"
        )
    offloads = ranking.strategy in OFFLOADS_INPUT | OFFLOADS_MIDDLE
    if offloads and ranking.chooser.costs.costs.copy_mode == "pageable":
        yield _PAGEABLE
    yield from _pin_warnings(ranking)


def _pin_warnings(ranking: "Ranking") -> Iterator[str]:
    """Yield a warning where a pinned degree makes the step slower by more than 0.1 %."""
    chooser, tokens = ranking.chooser, ranking.table.tokens
    if chooser.bounds.degree is None:
        return
    free = replace(chooser, bounds=chooser.bounds.without_degree(), budget=None)
    table = free.table(tokens)
    best = table.best() or ranking.degree
    slower = ranking.step.seconds / table.step(best).seconds - 1
    if slower > WORTH_A_WARNING:
        yield (
            f"the pinned degree {ranking.degree} makes the step {format_share(slower)} slower than "
            f"{best}"
        )


def doubt_warnings(doubts: Iterable[Doubt], *, command: str) -> Iterator[str]:
    """Yield warnings of operations not measured, then `command` ("" for another machine)."""
    sizes: dict[Doubt, list[float]] = {}
    for doubt in doubts:
        sizes.setdefault(doubt._replace(size=0.0), []).append(doubt.size)
    if not sizes:
        return
    named = list(sizes.items())
    if not command:  # rules say more about a machine than one form of a GEMM for another
        named.sort(key=lambda item: "modelled" not in item[0].stand_in)
    for operation, wanted_sizes in named[:NUM_NAMED]:
        yield _explain(operation, wanted_sizes)
    rest = len(named) - NUM_NAMED
    more = f"{rest} more operation{'' if rest == 1 else 's'}; " if rest > 0 else ""
    if not command:
        yield from [f"not measured: {more.removesuffix('; ')}"] if more else []
        return
    yield f"{more}the plan's range allows for that; measure what is missing:  {command}"


def profile_command(inputs: PlanInputs, launch: str) -> str:
    """Return the command that adds a plan's sizes to its profile."""
    flags = [f"--name {inputs.profile} --resume"]
    if inputs.model is not None:
        flags.append(f"--model {inputs.model}")
    else:
        layer = inputs.layer
        flags += [
            f"--d-model {layer.d_model} --d-hidden {layer.d_hidden}",
            f"--num-experts {layer.num_experts} --top-k {layer.top_k}",
            f"--activation {layer.activation}",
        ]
    flags += [f"--tokens {inputs.tokens_per_rank}", f"--dtype {inputs.dtype}"]
    return f"{launch} {' '.join(flags)}"


def _explain(doubt: Doubt, sizes: Sequence[float]) -> str:
    if doubt.stand_in:
        return f"not measured: {doubt.operation}; {doubt.stand_in} stands in"
    wanted = _span(min(sizes), max(sizes), doubt.unit)
    measured = _span(doubt.low or 0.0, doubt.high or 0.0, doubt.unit)
    return f"not measured: {doubt.operation} at {wanted}; extrapolated from {measured}"


def _span(low: float, high: float, unit: str) -> str:
    first, last = (
        format_bytes(size) if unit == "bytes" else f"{size:,.0f} {unit}" for size in (low, high)
    )
    return first if first == last else f"{first} to {last}"
