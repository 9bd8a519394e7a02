"""The page of public runs: a summary, tables by source and kind, every row, what is left out."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.public_runs.rows import Skipped
from benchmarks.public_runs.score import (
    Scored,
    errors_left_out,
    is_sign_right,
    kendall,
    pairs_of_one_change,
    record_errors,
    regret,
    share_inside,
)
from moetune.domain.records import prediction_error
from moetune.solve.model.memory import ERROR_SHARE

_NEAR, _FAR = 0.10, 0.25
"""Relative errors: of memory that is right, and of steps that are far off."""
_RUNTIMES: Mapping[str, frozenset[str]] = {
    "Megatron and Bridge": frozenset({"megatron", "bridge"}),
    "torchtitan": frozenset({"torchtitan"}),
}
_EXPLAINED = Path(__file__).parent / "explained.md"


def lines(scored: Sequence[Scored], skipped: Sequence[Skipped]) -> Iterator[str]:
    """Yield the page's lines."""
    timed = [row for row in scored if row.seconds is not None]
    errors = errors_left_out(timed)
    yield "# Published training runs, planned"
    yield ""
    yield (
        "Runs that others measured and published, priced as `moetune plan` prices a layout, with a "
        "reference profile of their machine: nothing here was measured by moetune. A factor is one "
        "for each machine and release of a source, the median of its other rows. Each row's "
        "settings are its own, its recipe's, or the default of its system."
    )
    yield from _summary(scored, skipped, timed, errors)
    if _EXPLAINED.exists():
        yield from ("", *_EXPLAINED.read_text(encoding="utf-8").splitlines())
    yield from _groups("By source", "source", scored, errors, lambda row: [row.run.source])
    yield from _groups("By kind", "kind", scored, errors, _kinds)
    yield from _sets(timed)
    yield from _memory([row for row in scored if row.run.measured is not None])
    yield from _out_of_memory(scored)
    yield from _steps(timed, errors)
    yield from _skipped(skipped)


def _summary(
    scored: Sequence[Scored],
    skipped: Sequence[Skipped],
    timed: Sequence[Scored],
    errors: Mapping[str, float],
) -> Iterator[str]:
    yield ""
    yield f"- {len(scored)} runs priced, {len(skipped)} not."
    ran, out = _ran(scored), [row for row in scored if row.run.ran_out]
    refused = sum(not row.fits for row in ran)
    yield (
        f"- Fits: {refused} of {len(ran)} runs that ran ({refused / len(ran):.1%}) are said not to "
        f"fit; {sum(not row.fits for row in out)} of {len(out)} that ran out of memory are caught."
    )
    yield (
        f"- Plans leave room for {ERROR_SHARE:.0%} more than predicted where they can: "
        f"{sum(row.is_roomy for row in out)} of {len(out)} that ran out are within, and "
        f"{sum(not row.is_roomy for row in ran)} of {len(ran)} that ran left less."
    )
    memory = _memory_errors(scored)
    if memory:
        near = sum(abs(error) <= _NEAR for error in memory)
        yield (
            f"- Memory: {near} of {len(memory)} rows within {_NEAR:.0%}; "
            f"{_median(memory):.1%} off in the median. Peaks of tensors are up to "
            f"{_largest_of_nine_in_ten(scored):.2f} times predicted in nine of ten rows."
        )
    before = _step_errors(timed)
    if before:
        after = list(errors.values())
        far = sum(abs(error) > _FAR for error in before)
        yield (
            f"- Steps: {_median(before):.1%} off in the median without a factor, "
            f"{_median(after):.1%} with one; {far} of {len(before)} ({far / len(before):.0%}) are "
            f"more than {_FAR:.0%} off without one."
        )
    pairs = pairs_of_one_change(timed)
    right = sum(is_sign_right(row, other) for row, other, _ in pairs)
    yield f"- Pairs that differ in one thing: {right} of {len(pairs)} in the right order."
    for words, names in _RUNTIMES.items():
        rows = [row for row in timed if row.run.target in names]
        if len({row.run.job.decoder.name for row in rows}) > 1:
            record = record_errors(rows)
            yield (
                f"- {words}, measured over predicted seconds without a factor, each set counted "
                f"once: {record.p05_ratio:.2f} to {record.p95_ratio:.2f} (5 % and 95 %); between "
                f"layouts of a set ±{record.set_spread:.2f} (logarithm). Ranges made without a "
                f"run's model hold {share_inside(rows):.0%} of the {len(rows)} runs."
            )


def _largest_of_nine_in_ten(scored: Sequence[Scored]) -> float:
    """Return which ratio of measured to predicted tensors nine in ten rows stay below."""
    tensors = (row for row in scored if row.run.measured and row.run.measured.scope == "allocated")
    ratios = [1 / (1 + row.memory_error) for row in tensors]
    return statistics.quantiles(ratios, n=10, method="inclusive")[-1]


def _groups(
    title: str,
    name: str,
    scored: Sequence[Scored],
    errors: Mapping[str, float],
    groups_of: Callable[[Scored], list[str]],
) -> Iterator[str]:
    """Yield a table of scores by group."""
    groups: dict[str, list[Scored]] = defaultdict(list)
    for row in scored:
        for group in groups_of(row):
            groups[group].append(row)
    yield from ("", f"## {title}", "")
    yield (
        f"| {name} | rows | fit, of those that ran | caught, of those that ran out | memory within "
        f"{_NEAR:.0%} | memory off | measured / predicted s | step off | with a factor | pairs |"
    )
    yield f"|---|{'---:|' * 9}"
    for group in sorted(groups):
        yield f"| {group} | {' | '.join(_scores(groups[group], errors))} |"


def _scores(rows: Sequence[Scored], errors: Mapping[str, float]) -> Iterator[str]:
    ran, out = _ran(rows), [row for row in rows if row.run.ran_out]
    memory, timed = _memory_errors(rows), [row for row in rows if row.seconds is not None]
    steps = _step_errors(timed)
    after = [errors[row.run.name] for row in timed if row.run.name in errors]
    pairs = pairs_of_one_change(timed)
    right = sum(is_sign_right(row, other) for row, other, _ in pairs)
    yield str(len(rows))
    yield f"{sum(row.fits for row in ran)} of {len(ran)}" if ran else ""
    yield f"{sum(not row.fits for row in out)} of {len(out)}" if out else ""
    near = sum(abs(error) <= _NEAR for error in memory)
    yield f"{near} of {len(memory)}" if memory else ""
    yield f"{statistics.median(memory):+.0%}" if memory else ""
    yield f"{math.exp(statistics.median(row.log_ratio for row in timed)):.2f}" if timed else ""
    yield f"{_median(steps):.0%}" if steps else ""
    yield f"{_median(after):.0%}" if after else ""
    yield f"{right} of {len(pairs)}" if pairs else ""


def _kinds(row: Scored) -> list[str]:
    """Return the kinds that a run belongs to, one of each dimension."""
    run, layout = row.run, row.run.layout
    is_moe = run.job.decoder.num_moe_layers > 0
    kinds = [
        "model: MoE" if is_moe else "model: dense",
        f"runtime: {run.target}",
        f"precision: {run.job.dtype}",
        f"CUDA graphs: {layout.cuda_graphs}",
        f"recompute: {_recompute_kind(row)}",
    ]
    if is_moe:
        kinds += [f"dispatcher: {layout.dispatcher}", f"overlap: {layout.overlap}"]
    return kinds


def _recompute_kind(row: Scored) -> str:
    modules = row.run.layout.recompute
    if not modules:
        return "none"
    return "full" if "full" in modules else "modules"


def _ran(rows: Sequence[Scored]) -> list[Scored]:
    return [row for row in rows if not row.run.ran_out]


def _memory_errors(rows: Sequence[Scored]) -> list[float]:
    return [row.memory_error for row in rows if row.run.measured is not None]


def _step_errors(timed: Sequence[Scored]) -> list[float]:
    """Return predicted over measured seconds, less 1."""
    return [math.exp(-row.log_ratio) - 1 for row in timed]


def _median(errors: Sequence[float]) -> float:
    return statistics.median(abs(error) for error in errors)


def _sets(timed: Sequence[Scored]) -> Iterator[str]:
    sets: dict[str, list[Scored]] = defaultdict(list)
    for row in timed:
        sets[row.run.set_name].append(row)
    yield from ("", "## Sets of one job", "")
    yield from ("| set | rows | Kendall's τ | regret |", "|---|---:|---:|---:|")
    for name, rows in sets.items():
        if len(rows) > 1:
            tau = kendall(rows)
            shown = "" if tau is None else f"{tau:.2f}"
            yield f"| {name} | {len(rows)} | {shown} | {regret(rows):.1%} |"


def _memory(rows: Sequence[Scored]) -> Iterator[str]:
    """Yield the rows with memory, by part."""
    if not rows:
        return
    parts = list(rows[0].memory.parts)
    yield from ("", "## Memory by part, GB of 10⁹ bytes", "")
    yield (
        "Printed peaks are of the tensors (`max_memory_allocated`), of what the allocator reserved "
        "(fragmentation included) or of the device (`nvidia-smi`: libraries included)."
    )
    yield ""
    yield f"| run | layout | of | measured | predicted | error | {' | '.join(parts)} |"
    yield f"|---|---|---|{'---:|' * (len(parts) + 3)}"
    for row in rows:
        measured, memory = row.run.measured, row.measured_rank
        assert measured is not None  # noqa: S101 - the caller chose such rows
        sizes = " | ".join(f"{memory.parts[name] / 1e9:.1f}" for name in parts)
        predicted = row.predicted_bytes
        assert predicted is not None  # noqa: S101 - as above
        yield (
            f"| {row.run.name} {row.run.job.decoder.name} | {_layout(row)} | {measured.scope} | "
            f"{measured.bytes / 1e9:.1f} | {predicted / 1e9:.1f} | "
            f"{prediction_error(predicted, measured.bytes):+.0%} | {sizes} |"
        )


def _out_of_memory(scored: Sequence[Scored]) -> Iterator[str]:
    """Yield the runs that are said to do what they did not: to fit, or not to fit."""
    yield from ("", "## Said to fit, and ran out; said not to fit, and ran", "")
    yield "| run | layout | happened | predicted GiB | usable GiB |"
    yield "|---|---|---|---:|---:|"
    for row in scored:
        if row.fits == row.run.ran_out:
            happened = "ran out" if row.run.ran_out else "ran"
            yield (
                f"| {row.run.name} {row.run.job.decoder.name} | {_layout(row)} | {happened} | "
                f"{row.memory.peak_bytes / 2**30:.1f} | {row.usable_bytes / 2**30:.1f} |"
            )


def _steps(timed: Sequence[Scored], errors: Mapping[str, float]) -> Iterator[str]:
    yield from ("", "## Steps", "")
    yield "| run | layout | measured s | predicted s | ratio | error with a factor |"
    yield "|---|---|---:|---:|---:|---:|"
    for row in timed:
        run, error = row.run, errors.get(row.run.name)
        left = "" if error is None else f"{error:+.0%}"
        yield (
            f"| {run.name} {run.job.decoder.name} | {_layout(row)} | {run.seconds:.2f} | "
            f"{row.predicted_seconds:.2f} | {run.seconds / row.predicted_seconds:.2f} | {left} |"
        )


def _skipped(skipped: Sequence[Skipped]) -> Iterator[str]:
    yield from ("", "## Not priced", "")
    by_reason: dict[str, list[str]] = defaultdict(list)
    for run in skipped:
        by_reason[" ".join(run.reason.split())].append(run.name)
    for reason, names in by_reason.items():
        yield f"- {reason}: {', '.join(names)}"


def _layout(row: Scored) -> str:
    layout, job = row.run.layout, row.run.job
    sizes = {
        "dp": layout.dp, "tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "vpp": layout.vpp,
        "ep": layout.ep, "etp": layout.etp,
    }  # fmt: skip
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    words.append(f"mbs {layout.micro_batch} x {job.length}")
    words += [job.dtype] if job.dtype != "bfloat16" else []
    if job.decoder.num_moe_layers:
        words.append(layout.dispatcher)
    words += [f"overlap {layout.overlap}"] if layout.overlap != "none" else []
    words += [f"graphs {layout.cuda_graphs}"] if layout.cuda_graphs != "none" else []
    words += [f"recompute {','.join(layout.recompute)}"] if layout.recompute else []
    return " ".join(words)
