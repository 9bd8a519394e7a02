"""Quickstarts in a row, each in a new process with an empty store: did the plan hold?

python -m benchmarks.quickstarts --runs 20 --output docs/results/quickstarts.md
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.netlab.__main__ import describe_machine

_LOSS = 0.02
"""The plan loses where one chunk is quicker by more than this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one quickstart planned and measured; seconds of a step.

    Args:
        planned_seconds: predicted for even routing.
        imbalance: rows of the busiest rank over the mean.
        predicted_seconds, low_seconds, high_seconds: for the routing that the steps had.
        single_seconds: with one chunk, in turns with the plan; the plan's where it is one chunk.
    """

    degree: int
    planned_seconds: float
    imbalance: float
    predicted_seconds: float
    low_seconds: float
    high_seconds: float
    measured_seconds: float
    single_seconds: float

    @property
    def is_inside(self) -> bool:
        """Whether the step lies in the plan's range."""
        return self.low_seconds <= self.measured_seconds <= self.high_seconds

    @property
    def loss(self) -> float:
        """By which share the plan is slower than one chunk; negative where it is quicker."""
        return self.measured_seconds / self.single_seconds - 1


def _run_here() -> Run:
    from examples.quickstart import measure_plan_train, median_seconds, predict_routed
    from moetune.cli.render import Screen

    plan, results = measure_plan_train(Screen())
    routed = predict_routed(plan, results[0])
    seconds = [median_seconds(result) for result in results]
    return Run(
        degree=plan.pipeline.forward_degree,
        planned_seconds=plan.predicted.step_seconds,
        imbalance=results[0].steps.imbalance,
        predicted_seconds=routed.predicted.step_seconds,
        low_seconds=routed.range_seconds[0],
        high_seconds=routed.range_seconds[1],
        measured_seconds=seconds[0],
        single_seconds=seconds[-1],
    )


def _run_apart() -> Run:
    """Run one quickstart in a new process; its last line is the run as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.quickstarts", "--here"],
            env={**os.environ, "XDG_DATA_HOME": folder}, stdout=subprocess.PIPE, text=True,
            check=True,
        )  # fmt: skip
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def _page(runs: Sequence[Run], *, load: float) -> str:
    rows = "".join(f"| {number} | {_row(run)} |\n" for number, run in enumerate(runs, start=1))
    inside = sum(run.is_inside for run in runs)
    lost = sum(run.loss > _LOSS for run in runs)
    return (
        f"# Quickstarts in a row\n\n{describe_machine(peer=False, load=load)}\n\n"
        f"`make quickstart` {len(runs)} times in a row, each in a "
        "new process that measured the machine anew for a minute. A step is the forward and "
        "backward pass of one MoE layer on two ranks, the median of ten in turns.\n\n"
        f"The step was inside the predicted range in **{inside} of {len(runs)}** runs. The plan "
        f"was slower than one chunk by more than {_LOSS:.0%} in **{lost}**.\n\n"
        "A plan is for even routing. The step is predicted again for the routing that the trained "
        "model's tokens had, which the layer records; the range is of that prediction.\n\n"
        "| run | chunks | planned, ms | busiest rank / mean | predicted, ms | range, ms "
        "| measured, ms | inside | one chunk, ms |\n"
        "|--:|--:|--:|--:|--:|:-:|--:|:-:|--:|\n"
        f"{rows}\nWritten by `python -m benchmarks.quickstarts`.\n"
    )


def _row(run: Run) -> str:
    cells = (
        str(run.degree), f"{run.planned_seconds * 1e3:.1f}", f"{run.imbalance:.2f}",
        f"{run.predicted_seconds * 1e3:.1f}",
        f"{run.low_seconds * 1e3:.1f} to {run.high_seconds * 1e3:.1f}",
        f"{run.measured_seconds * 1e3:.1f}", "yes" if run.is_inside else "no",
        f"{run.single_seconds * 1e3:.1f}" if run.degree > 1 else "the plan",
    )  # fmt: skip
    return " | ".join(cells)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quickstarts")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--output", type=Path, help="the page; printed where it is missing")
    parser.add_argument("--here", action="store_true", help="one run in this process, as JSON")
    return parser.parse_args()


def _main() -> None:
    arguments = _arguments()
    if arguments.here:
        print(json.dumps(asdict(_run_here())))
        return
    runs, load = list[Run](), os.getloadavg()[0]
    for number in range(1, arguments.runs + 1):
        runs.append(_run_apart())
        print(f"{number}: {_row(runs[-1])}", file=sys.stderr, flush=True)
    page = _page(runs, load=load)
    if arguments.output is None:
        print(page)
    else:
        arguments.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    _main()
