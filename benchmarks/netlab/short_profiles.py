"""Plans from short profiles: error, regret and interval by the seconds that a profile took.

    python -m benchmarks.netlab.short_profiles      # as root, about 20 minutes on two quiet cores

Every profile of a link is measured in the same lab, and then the steps that all of them predict.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.experiment import (
    DTYPE,
    NUM_RANKS,
    Line,
    measure_profile,
    measure_steps,
    steps_command,
)
from benchmarks.netlab.lab import Lab, check_supported
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Plan
from moetune.domain.prediction_error import prediction_error
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.workflows.files import plan_to_json, write_text
from moetune.workflows.plan import make_plan

_RESULT = Path(__file__).parents[2] / "docs/results/short-profiles.md"
_LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=2, top_k=1, activation="relu")
_DEGREES = (1, 2, 4, 8, 16)
_BUDGETS_SECONDS = (10, 30, 60, 150)
_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One plan from one profile, and its measured step.

    Args:
        best_seconds: the fastest of the measured steps, the plan's own among them.
    """

    link: str
    budget_seconds: int
    plan: Plan
    measured_seconds: float
    best_seconds: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return prediction_error(self.plan.predicted.step_seconds, self.measured_seconds)

    @property
    def regret(self) -> float:
        """By how much another decision is faster, relative."""
        return self.measured_seconds / self.best_seconds - 1

    @property
    def width(self) -> float:
        """Of the 90 % interval, relative to the prediction."""
        predicted = self.plan.predicted
        width = predicted.p95_step_seconds - predicted.p05_step_seconds
        return width / predicted.step_seconds

    @property
    def is_inside(self) -> bool:
        """Whether the measured step is in the interval."""
        predicted = self.plan.predicted
        return predicted.p05_step_seconds <= self.measured_seconds <= predicted.p95_step_seconds


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="200,500,none", help="Mbit/s, or none for loopback")
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--budgets", default=",".join(map(str, _BUDGETS_SECONDS)))
    given = parser.parse_args()
    check_supported()
    budgets = [int(one) for one in given.budgets.split(",")]
    tokens = [int(one) for one in given.tokens.split(",")]
    cells = [
        cell
        for rate in given.rates.split(",")
        for cell in _measure(None if rate == "none" else float(rate), tokens, budgets)
    ]
    report = "\n".join(_lines(cells)) + "\n"
    print(report)
    write_text(_RESULT, report)


def _measure(
    rate_mbit: float | None, tokens: Sequence[int], budgets: Sequence[int]
) -> Iterator[Cell]:
    with Lab(num_ranks=NUM_RANKS, rate_mbit=rate_mbit) as lab:
        for budget in budgets:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                profile = measure_profile(
                    lab, layer=_LAYER, tokens=max(tokens), budget=f"{budget}s", folder=folder,
                    echo=sys.stderr,
                )  # fmt: skip
                plans = {count: _plan(profile, count, folder) for count in tokens}
                lines = _steps(lab, tokens, folder)
            for count, plan in plans.items():
                seconds = {
                    variant: statistics.median(line.seconds)
                    for (of, variant), line in lines.items()
                    if of == count
                }
                yield Cell(
                    link="loopback" if rate_mbit is None else f"{rate_mbit:g} Mbit/s",
                    budget_seconds=budget,
                    plan=plan,
                    measured_seconds=seconds["planned"],
                    best_seconds=min(seconds.values()),
                )


def _plan(profile: Profile, tokens: int, folder: Path) -> Plan:
    request = PlanRequest(layer=_LAYER, world_size=NUM_RANKS, tokens_per_rank=tokens, dtype=DTYPE)
    plan = make_plan(request, profile=profile)
    write_text(folder / f"{tokens}.json", plan_to_json(plan))
    return plan


def _steps(lab: Lab, tokens: Sequence[int], folder: Path) -> dict[tuple[int, str], Line]:
    variants = [*(f"ours:{degree}" for degree in _DEGREES), f"planned:{folder}"]
    command = steps_command(layer=_LAYER, tokens=tokens, variants=variants, rounds=_ROUNDS)
    return measure_steps(lab, command, peer=None, echo=sys.stderr)


def _lines(cells: Sequence[Cell]) -> Iterator[str]:
    yield from ("# Plans from short profiles", "", describe_machine(peer=False, load=0.0), "")
    yield (
        "Each row is one profile and plan in the network lab, and the median of "
        f"{_ROUNDS} steps that took turns with degrees {', '.join(map(str, _DEGREES))}."
    )
    yield from ("", "## By the time that the profile took", "")
    yield "| profile | median error | largest | median regret | largest | median width | inside |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    for budget in sorted({cell.budget_seconds for cell in cells}):
        of = [cell for cell in cells if cell.budget_seconds == budget]
        errors, regrets = [abs(cell.error) for cell in of], [cell.regret for cell in of]
        yield (
            f"| {budget} s | {statistics.median(errors):.1%} | {max(errors):.1%} | "
            f"{statistics.median(regrets):.1%} | {max(regrets):.1%} | "
            f"{statistics.median(cell.width for cell in of):.0%} | "
            f"{sum(cell.is_inside for cell in of)} of {len(of)} |"
        )
    yield from ("", "## Every plan", "")
    yield "| link | tokens | profile | degrees | predicted, 90 % | measured | error | regret |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for cell in cells:
        plan, predicted = cell.plan, cell.plan.predicted
        low, high = predicted.p05_step_seconds, predicted.p95_step_seconds
        yield (
            f"| {cell.link} | {plan.inputs.tokens_per_rank} | {cell.budget_seconds} s | "
            f"{plan.pipeline.forward_degree}, {plan.pipeline.backward_degree} | "
            f"{1e3 * predicted.step_seconds:.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f}) | "
            f"{1e3 * cell.measured_seconds:.1f} ms | {cell.error:+.1%} | {cell.regret:+.1%} |"
        )


if __name__ == "__main__":
    main()
