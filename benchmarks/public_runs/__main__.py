"""Published training runs against the planner: `python -m benchmarks.public_runs FOLDER`.

FOLDER has `layouts.csv`, `megatron_bridge.csv`, `runs.csv` and `operations.csv`. Writes
docs/results/public-runs.md and docs/results/calibration.md.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.public_runs import calibration, operations
from benchmarks.public_runs.page import lines
from benchmarks.public_runs.rows import PublicRun, Skipped, read_failed, read_runs
from benchmarks.public_runs.runs import read_more
from benchmarks.public_runs.score import Scored
from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.profile import Profile
from moetune.domain.routing import BALANCED
from moetune.domain.targets import find_target
from moetune.fit.costs import costs_of
from moetune.solve.model.memory import MemoryModel
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.profiled import device_prices
from moetune.solve.model.rank_memory import LIBRARY_BYTES
from moetune.solve.model.step import StepPrices

_BALANCED = frozenset({"deepseek-v3", "kimi-k2"})
"""Models whose recipes lay their stages out by hand, as evenly as their blocks allow."""
RESULT = Path(__file__).parents[2] / "docs/results/public-runs.md"
CALIBRATION = RESULT.with_name("calibration.md")


@cache
def _profile(name: str) -> Profile:
    bundled = bundled_profiles()
    if name not in bundled:
        raise InputError(f"there is no reference profile {name}", "add it to profiles/")
    return load_profile_file(bundled[name])


def score(run: PublicRun) -> Scored:
    """Return the run with its prediction.

    Raises:
        MoetuneError: its machine or something of its layout has no price.
    """
    profile = _profile(run.profile)
    target = replace(find_target(run.target), **run.facts)
    stages = DecoderStages(run.job.decoder)
    device = device_prices(profile, costs_of(profile, allow_modelled=True))
    prices = StepPrices(job=run.job, device=device, stages=stages, target=target)
    layout = run.layout
    if run.job.decoder.name in _BALANCED and layout.pp > 1 and layout.stages is None:
        layout = layout.changed(stages=prices.balanced_stages(layout))
    seconds = prices.step(layout).seconds if run.tokens is not None else None
    # The log is that of the first ranks, which get the mean of the rows over all blocks.
    model = MemoryModel(job=replace(run.job, routing=BALANCED), stages=stages, target=target)
    machine = profile.machine
    if run.device_bytes is not None:
        machine = replace(machine, memory_bytes=run.device_bytes)
    return Scored(
        run=run,
        seconds=seconds,
        memory=model.peak(layout),
        last_rank=model.of_rank(layout, layout.pp - 1),
        usable_bytes=round(machine.memory_bytes + LIBRARY_BYTES),
    )


def all_runs(folder: Path) -> Iterator[PublicRun | Skipped]:
    """Yield the runs of every file, priced or not."""
    yield from read_runs(folder)
    yield from read_failed()
    yield from read_more(folder)


def scored_runs(folder: Path) -> tuple[list[Scored], list[Skipped]]:
    """Return the runs that can be priced, and why others cannot."""
    scored, skipped = [], []
    for run in all_runs(folder):
        if isinstance(run, Skipped):
            skipped.append(run)
            continue
        try:
            scored.append(score(run))
        except MoetuneError as error:
            skipped.append(Skipped(name=run.name, reason=str(error)))
    return scored, skipped


def main() -> None:
    """Score all rows and operations, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    scored, skipped = scored_runs(folder)
    page = [*lines(scored, skipped), *operations.section(folder)]
    for file, text in ((RESULT, page), (CALIBRATION, calibration.lines(scored))):
        file.write_text("\n".join(text) + "\n")
        print(f"written to {file}")


if __name__ == "__main__":
    main()
