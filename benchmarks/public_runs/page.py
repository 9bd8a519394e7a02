"""The page of public runs: scores of the sets, every row, and what was not priced."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

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
from moetune.domain.prediction_error import prediction_error

_NOT_ALLOCATED = ("fragmentation", "libraries")


def lines(
    scored: Sequence[Scored], skipped: Sequence[Skipped], failed: Sequence[Scored]
) -> Iterator[str]:
    """Yield the page's lines."""
    errors = errors_left_out(scored)
    sets: dict[str, list[Scored]] = defaultdict(list)
    for row in scored:
        sets[row.run.set_name].append(row)
    yield "# Published training runs, planned"
    yield ""
    yield (
        "Runs that others measured and published, priced by `moetune plan` with a reference "
        "profile of their machine: nothing here was measured by moetune. An error is what is left "
        "after one factor for each machine and release, fitted on the other rows."
    )
    yield ""
    yield f"- {len(scored)} rows priced, {len(skipped)} not."
    sizes = sorted(abs(one) for one in errors.values())
    if sizes:
        middle = statistics.median(sizes)
        yield f"- Error of a step: {middle:.1%} in the median, {sizes[-1]:.0%} at worst."
    pairs = [pair for rows in sets.values() for pair in pairs_of_one_change(rows)]
    right = sum(is_sign_right(one, other) for one, other, _ in pairs)
    yield f"- Pairs that differ in one thing: {right} of {len(pairs)} in the right order."
    if len({row.run.job.decoder.name for row in scored}) > 1:
        found = record_errors(scored)
        yield (
            f"- Measured over predicted seconds, without a factor, each set counted once: "
            f"{found.p05_ratio:.2f} to {found.p95_ratio:.2f} (5 % and 95 %); between layouts of a "
            f"set ±{found.own_spread:.2f} (logarithm). Ranges made without a run's model hold "
            f"{share_inside(scored):.0%} of the runs."
        )
    yield from _sets(sets)
    yield from _rows(scored, errors)
    yield from _memory(scored)
    yield from _room([one for one in scored if one.run.allocated_bytes], failed)
    yield from ("", "## Not priced", "")
    for one in skipped:
        yield f"- {one.name}: {' '.join(one.reason.split())}"


def _sets(sets: dict[str, list[Scored]]) -> Iterator[str]:
    yield from ("", "| set | rows | Kendall's τ | regret |", "|---|---:|---:|---:|")
    for name, rows in sets.items():
        if len(rows) > 1:
            tau = kendall(rows)
            shown = "" if tau is None else f"{tau:.2f}"
            yield f"| {name} | {len(rows)} | {shown} | {regret(rows):.1%} |"


def _rows(scored: Sequence[Scored], errors: dict[str, float]) -> Iterator[str]:
    yield ""
    yield "| run | layout | measured s | predicted s | ratio | error | memory predicted, GiB |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for row in scored:
        run, error = row.run, errors.get(row.run.name)
        left = "" if error is None else f"{error:+.0%}"
        yield (
            f"| {run.name} {run.job.decoder.name} | {_layout(row)} | {run.seconds:.2f} | "
            f"{row.seconds:.2f} | {run.seconds / row.seconds:.2f} | {left} | "
            f"{row.memory.peak_bytes / 2**30:.1f} |"
        )


def _memory(scored: Sequence[Scored]) -> Iterator[str]:
    """Yield the rows with memory, by part."""
    parts = [name for name in scored[0].memory.parts if name not in _NOT_ALLOCATED]
    yield from ("", "## Memory", "")
    yield (
        "Peak of the allocator (`max_memory_allocated`) in GB of 10⁹ bytes, as Megatron-Bridge's "
        "log has it, and the predicted tensors by part: the libraries and what the allocator loses "
        "are not in it. What the rows do not say is from their recipes "
        "(`benchmarks/public_runs/memory_runs.py`)."
    )
    yield ""
    yield f"| run | optimizer | measured | predicted | error | {' | '.join(parts)} |"
    yield f"|---|---|{'---:|' * (len(parts) + 3)}"
    for row in scored:
        measured = row.run.allocated_bytes
        if measured is None:
            continue
        found = row.memory.allocated_bytes
        sizes = " | ".join(f"{row.memory.parts[name] / 1e9:.1f}" for name in parts)
        recompute = ",".join(row.run.layout.recompute) or "no recomputation"
        yield (
            f"| {row.run.name} {row.run.job.decoder.name}, {recompute} | {row.run.job.optimizer} | "
            f"{measured / 1e9:.1f} | {found / 1e9:.1f} | "
            f"{prediction_error(found, measured):+.1%} | {sizes} |"
        )


def _room(ran: Sequence[Scored], failed: Sequence[Scored]) -> Iterator[str]:
    """Yield whether runs are predicted to fit, with the libraries and the allocator's loss."""
    right = sum(one.fits for one in ran) + sum(not one.fits for one in failed)
    yield ""
    yield (
        f"Predicted to fit or not as they did: {right} of {len(ran) + len(failed)}, of which "
        f"{len(failed)} ran out of memory:"
    )
    yield ""
    yield "| out of memory | predicted GiB | usable GiB | predicted |"
    yield "|---|---:|---:|---|"
    for row in failed:
        recompute = ",".join(row.run.layout.recompute) or "no recomputation"
        yield (
            f"| {row.run.job.decoder.name}, {recompute} | {row.memory.peak_bytes / 2**30:.1f} | "
            f"{row.usable_bytes / 2**30:.1f} | {'fits' if row.fits else 'does not fit'} |"
        )


def _layout(row: Scored) -> str:
    one = row.run.layout
    sizes = f"tp {one.tp} cp {one.cp} pp {one.pp} vpp {one.vpp} ep {one.ep} mbs {one.micro_batch}"
    return f"{sizes} {one.dispatcher} {one.overlap} {','.join(one.recompute)}".strip()
