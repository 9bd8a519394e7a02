"""Published training runs against the planner: `python -m benchmarks.public_runs FOLDER`.

FOLDER has `layouts.csv` and `megatron_bridge.csv`. Writes docs/results/public-runs.md.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from benchmarks.public_runs.rows import PublicRun, Skipped, read_runs
from benchmarks.public_runs.score import (
    Scored,
    errors_left_out,
    is_sign_right,
    kendall,
    pairs_of_one_change,
    regret,
)
from moetune.domain.errors import MoetuneError
from moetune.domain.targets import find_target
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.solve.training.machine import Device
from moetune.solve.training.memory import MemoryModel
from moetune.solve.training.stages import DecoderStages
from moetune.solve.training.step import StepPrices
from moetune.workflows.files import bundled_profiles, load_profile_file

RESULT = Path(__file__).parents[2] / "docs/results/public-runs.md"


@cache
def _profile(name: str) -> Profile:
    return load_profile_file(bundled_profiles()[name])


def score(run: PublicRun) -> Scored:
    """Return the run with its prediction."""
    profile = _profile(run.profile)
    device = Device(costs=costs_of(profile, allow_modelled=True), machine=profile.machine)
    stages = DecoderStages(run.job.decoder)
    step = StepPrices(
        job=run.job, device=device, stages=stages, target=find_target("megatron")
    ).step(run.layout)
    peak = MemoryModel(job=run.job, stages=stages).peak(run.layout).peak_bytes
    return Scored(run=run, seconds=step.seconds, peak_gib=peak / 2**30)


def main() -> None:
    """Score all rows and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    scored, skipped = [], []
    for run in read_runs(given.folder):
        if isinstance(run, Skipped):
            skipped.append(run)
            continue
        try:
            scored.append(score(run))
        except MoetuneError as error:
            skipped.append(Skipped(name=run.name, reason=str(error)))
    text = "\n".join(lines(scored, skipped)) + "\n"
    given.output.write_text(text)
    print(text)


def lines(scored: Sequence[Scored], skipped: Sequence[Skipped]) -> Iterator[str]:
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
        yield f"- Error of a step: {statistics.median(sizes):.1%} in the median, {sizes[-1]:.0%} at worst."
    pairs = [pair for rows in sets.values() for pair in pairs_of_one_change(rows)]
    right = sum(is_sign_right(one, other) for one, other, _ in pairs)
    yield f"- Pairs that differ in one thing: {right} of {len(pairs)} in the right order."
    yield ""
    yield "| set | rows | Kendall's τ | regret |"
    yield "|---|---:|---:|---:|"
    for name, rows in sets.items():
        if len(rows) > 1:
            tau = kendall(rows)
            yield f"| {name} | {len(rows)} | {'' if tau is None else f'{tau:.2f}'} | {regret(rows):.1%} |"
    yield ""
    yield "| run | layout | measured s | predicted s | measured ÷ predicted | error | memory GiB | predicted |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for row in scored:
        error = errors.get(row.run.name)
        lay = row.run.layout
        words = f"tp{lay.tp} cp{lay.cp} pp{lay.pp}x{lay.vpp} ep{lay.ep} mbs{lay.micro_batch} {lay.dispatcher} {lay.overlap} {','.join(lay.recompute)}"
        yield (
            f"| {row.run.name} {row.run.job.decoder.name} | {words} | {row.run.seconds:.2f} | "
            f"{row.seconds:.2f} | {row.run.seconds / row.seconds:.2f} | "
            f"{'' if error is None else f'{error:+.0%}'} | {row.run.memory_gib or ''} | {row.peak_gib:.1f} |"
        )
    yield ""
    yield "## Not priced"
    yield ""
    for one in skipped:
        reason = " ".join(one.reason.split())
        yield f"- {one.name}: {reason}"


if __name__ == "__main__":
    main()
