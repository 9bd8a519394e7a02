"""Variants of sharded training as a table."""

from collections.abc import Iterator, Sequence

from benchmarks.chunks.case import Case
from benchmarks.chunks.experiment import PLANNED, CaseResult, Outcome
from moetune.domain.prediction_error import prediction_error
from moetune.domain.units import format_bytes

_GOALS = (
    ("moetune cached", "fully_shard cached", 1.0),
    ("moetune", "fully_shard", 1.0),
    ("moetune offload", "fully_shard offload", 1.3),
    ("moetune offload", "DeepSpeed ZeRO-3 offload", 1.0),
)
_NEAR_OPTIMUM = 1.02


def report(results: Sequence[CaseResult], machine: str) -> str:
    """Return the page: what was to be reached, and every variant of every case."""
    lines = ["# Model states in chunks, beside fully_shard and DeepSpeed", "", machine, ""]
    lines += [_INTRODUCTION, "", *_summary(results)]
    for result in results:
        lines += ["", *_case(result)]
    return "\n".join([*lines, ""])


_INTRODUCTION = (
    "`python -m benchmarks.chunks`: two ranks of the network lab, one core and one thread each, "
    "train one model in float32 with AdamW on gloo; every variant is a job of its own, twice in "
    "random order. A step is the maximum over the ranks, a figure the median. `fully_shard` "
    "shards every block and the root, with (`cached`: without) resharding after the forward pass; "
    "its offload and DeepSpeed's keep states on the host, which on this machine is the memory of "
    "the device, too. *Whole* keeps all states on every rank, *cached* shards them and keeps all "
    "values while a step needs them, plain `moetune` has a cache of a few chunks. The last losses "
    "of all variants are equal. *Gathers* are chunks made whole in a step, *fewest* what the best "
    "of all policies needs (an independent linear programme). DeepSpeed 0.19.8 fails on the model "
    "with experts: it cannot shard modules that return an object without `__dict__`."
)


def _summary(results: Sequence[CaseResult]) -> Iterator[str]:
    yield "| model | ours | theirs | times as fast | goal | gathers over the fewest |"
    yield "|---|---|---|---:|---:|---:|"
    for result in results:
        for ours, theirs, goal in _GOALS:
            mine, other = result.outcome(ours), result.outcome(theirs)
            if mine is None or other is None:
                continue
            ratio = other.median_seconds / mine.median_seconds
            missed = "" if ratio >= goal else " (missed)"
            yield (
                f"| {result.case.name} | {ours} | {theirs} | {ratio:.2f} | {goal:.1f}{missed} "
                f"| {_over_fewest(mine)} |"
            )


def _over_fewest(one: Outcome) -> str:
    over = one.moved["gathers"] / one.fewest_gathers
    return f"{over:.3f}{'' if over <= _NEAR_OPTIMUM else ' (missed)'}"


def _planned(result: CaseResult) -> Iterator[str]:
    """Say what the plan within the limit is, what it promised and what it took."""
    one = result.outcome(PLANNED)
    if one is None:
        return
    measured = one.median_seconds
    yield ""
    yield (
        f"Planned for {format_bytes(result.case.limit_bytes)} a rank from the lab's own profile: "
        f"{1e3 * one.predicted_seconds:.0f} ms predicted, {1e3 * measured:.0f} ms measured "
        f"({100 * prediction_error(one.predicted_seconds, measured):+.0f} %)."
    )


def _case(result: CaseResult) -> Iterator[str]:
    case, moe = result.case, result.case.transformer.moe
    yield f"## {case.name}"
    yield ""
    yield (
        f"{case.transformer.num_layers} blocks, d_model {moe.d_model}, d_hidden {moe.d_hidden}, "
        f"{_experts(case)}, vocabulary "
        f"{case.transformer.vocab_size}; {case.sequences} sequences of {case.transformer.length} "
        f"tokens a rank; {result.rate_mbit:g} Mbit/s; chunks of {format_bytes(case.chunk_bytes)}, "
        f"small caches of {case.places}."
    )
    yield ""
    yield (
        "| variant | step | shortest | longest | process | chunks on the device | gathers | fewest "
        "| communicated |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for one in result.outcomes:
        yield (
            f"| {one.variant} | {1e3 * one.median_seconds:.0f} ms | {1e3 * min(one.seconds):.0f} "
            f"| {1e3 * max(one.seconds):.0f} | {format_bytes(one.peak_bytes)} | {_moved(one)} |"
        )
    yield from _planned(result)


def _experts(case: Case) -> str:
    if case.transformer.is_dense:
        return "no experts"
    return (
        f"{case.transformer.moe.num_experts} experts in every {case.transformer.moe_every}. block"
    )


def _moved(one: Outcome) -> str:
    if not one.moved:
        return " | | | "
    communicated = one.moved["gathered_bytes"] + one.moved["reduced_bytes"]
    return (
        f"{format_bytes(one.peak_device_bytes)} | {one.moved['gathers']} | {one.fewest_gathers} "
        f"| {format_bytes(communicated)}"
    )
