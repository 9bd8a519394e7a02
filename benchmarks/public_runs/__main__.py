"""Published training runs against the planner: `python -m benchmarks.public_runs FOLDER`.

FOLDER has `layouts.csv` and `megatron_bridge.csv`. Writes docs/results/public-runs.md.
"""

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.public_runs.page import lines
from benchmarks.public_runs.rows import PublicRun, Skipped, read_failed, read_runs
from benchmarks.public_runs.score import Scored
from moetune.domain.errors import MoetuneError
from moetune.domain.profile import Profile
from moetune.domain.routing import BALANCED
from moetune.domain.targets import find_target
from moetune.solve.training.memory import MemoryModel
from moetune.solve.training.stages import DecoderStages
from moetune.solve.training.step import StepPrices
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.training_prices import device_prices

_BALANCED = frozenset({"deepseek-v3", "kimi-k2"})
"""Models whose recipes lay their stages out by hand, as evenly as their blocks allow."""
RESULT = Path(__file__).parents[2] / "docs/results/public-runs.md"


@cache
def _profile(name: str) -> Profile:
    return load_profile_file(bundled_profiles()[name])


def score(run: PublicRun) -> Scored:
    """Return the run with its prediction."""
    profile = _profile(run.profile)
    device = device_prices(profile)
    stages = DecoderStages(run.job.decoder)
    prices = StepPrices(job=run.job, device=device, stages=stages, target=find_target("megatron"))
    layout = run.layout
    if run.job.decoder.name in _BALANCED and layout.pp > 1:
        layout = prices.balanced(layout)
    step = prices.step(layout)
    # The log is that of the first ranks, which get the mean of the rows over all blocks.
    memory = MemoryModel(
        job=replace(run.job, routing=BALANCED),
        stages=stages,
        logit_bytes=find_target("bridge").logit_bytes,
    ).peak(layout)
    usable = profile.machine.plannable_bytes
    return Scored(run=run, seconds=step.seconds, memory=memory, usable_bytes=usable)


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
    text = "\n".join(lines(scored, skipped, [score(run) for run in read_failed()])) + "\n"
    given.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
