"""Ranges of predicted steps on cells that nothing was set by: links, activations and experts.

    python -m benchmarks.netlab.unseen      # as root, about 20 minutes on two quiet cores

Every cell has a profile of its own, as a user would measure it, and then every degree is predicted
with its 90 % range and measured.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.experiment import (
    DTYPE,
    NUM_RANKS,
    measure_profile,
    measure_steps,
    steps_command,
)
from benchmarks.netlab.lab import Lab, check_supported
from moetune.domain.constraints import Bounds, Constraints
from moetune.domain.layer import Activation, LayerShape
from moetune.domain.plan import Plan
from moetune.domain.prediction_error import prediction_error
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.workflows.files import plan_to_json, write_text
from moetune.workflows.plan import make_plan

_RESULT = Path(__file__).parents[2] / "docs/results/unseen-cells.md"
_DEGREES = (1, 2, 4, 8, 16)
_ROUNDS = 5
_CELLS: tuple[tuple[float, Activation, int, int, int], ...] = (
    (150, "gelu", 2, 1, 1024), (150, "silu", 4, 2, 512), (150, "relu", 8, 1, 2048),
    (300, "gelu", 4, 1, 2048), (300, "relu", 2, 2, 1024), (300, "silu", 8, 2, 512),
    (600, "gelu", 2, 1, 2048), (600, "relu", 4, 2, 1024), (600, "silu", 2, 1, 512),
    (800, "gelu", 8, 1, 2048), (800, "relu", 2, 1, 512), (800, "silu", 4, 1, 1024),
)  # fmt: skip
"""Mbit/s, activation, experts, choices of a token, tokens of a rank. The record that ranges are set
by has 200, 500 and 1000 Mbit/s and loopback, relu, 2 experts and one choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One layer on one link.

    Args:
        steps: by degree, the pinned plan and the measured seconds.
        chosen: the plan that is free to choose, and its measured seconds.
        repeated: of steps that the profile measured, too: seconds now over those then.
    """

    name: str
    steps: dict[int, tuple[Plan, float]]
    chosen: tuple[Plan, float]
    repeated: tuple[float, ...]

    @property
    def regret(self) -> float:
        """By how much the chosen plan is slower than the best that was measured, it included."""
        plan_seconds = self.chosen[1]
        return plan_seconds / min(plan_seconds, *(one for _, one in self.steps.values())) - 1


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="45s", help="of each profile")
    parser.add_argument("--cells", type=int, default=len(_CELLS), help="only the first so many")
    given = parser.parse_args()
    check_supported()
    cells = [_measure(*one, budget=given.budget) for one in _CELLS[: given.cells]]
    report = "\n".join(_lines(cells, budget=given.budget)) + "\n"
    print(report)
    write_text(_RESULT, report)


def _measure(
    rate_mbit: float, activation: Activation, num_experts: int, top_k: int, tokens: int, *,
    budget: str,
) -> Cell:  # fmt: skip
    layer = LayerShape(
        d_model=512, d_hidden=2048, num_experts=num_experts, top_k=top_k, activation=activation
    )
    with (
        Lab(num_ranks=NUM_RANKS, rate_mbit=rate_mbit) as lab,
        tempfile.TemporaryDirectory() as name,
    ):
        profile = measure_profile(
            lab, layer=layer, tokens=tokens, budget=budget, folder=Path(name), echo=sys.stderr
        )
        chosen = _plan(profile, layer, tokens)
        write_text(Path(name) / f"{tokens}.json", plan_to_json(chosen))
        variants = [f"ours:{degree}" for degree in _DEGREES] + [f"planned:{name}"]
        command = steps_command(layer=layer, tokens=[tokens], variants=variants, rounds=_ROUNDS)
        lines = measure_steps(lab, command, peer=None, echo=sys.stderr)
    choices = f"{num_experts} experts, top {top_k}"
    measured = {
        degree: statistics.median(lines[tokens, f"ours:{degree}"].seconds) for degree in _DEGREES
    }
    return Cell(
        name=f"{rate_mbit:g} Mbit/s, {activation}, {choices}, {tokens} tokens",
        steps={
            degree: (_plan(profile, layer, tokens, degree), seconds)
            for degree, seconds in measured.items()
        },
        chosen=(chosen, statistics.median(lines[tokens, "planned"].seconds)),
        repeated=tuple(
            measured[one.degree] / one.measured_seconds
            for one in profile.steps
            if one.workload.tokens_per_rank == tokens
        ),
    )


def _plan(profile: Profile, layer: LayerShape, tokens: int, degree: int | None = None) -> Plan:
    bounds = Bounds(forward_degree=degree, backward_degree=degree)
    request = PlanRequest(
        layer=layer, world_size=NUM_RANKS, tokens_per_rank=tokens, dtype=DTYPE,
        constraints=Constraints(bounds=bounds),
    )  # fmt: skip
    return make_plan(request, profile=profile)


def _lines(cells: Sequence[Cell], *, budget: str) -> Iterator[str]:
    steps = [step for cell in cells for step in cell.steps.values()]
    errors = [
        abs(prediction_error(plan.predicted.step_seconds, seconds)) for plan, seconds in steps
    ]
    inside = [_is_inside(plan, seconds) for plan, seconds in steps]
    regrets = [cell.regret for cell in cells]
    yield from ("# Cells that nothing was set by", "", describe_machine(peer=False, load=0.0), "")
    yield (
        f"{len(cells)} layers of 512 × 2048 in the network lab, each with a profile of {budget} of "
        f"its own; medians of {_ROUNDS} steps that took turns."
    )
    yield ""
    share, width = sum(inside) / len(inside), statistics.median(_width(plan) for plan, _ in steps)
    yield f"- Inside the 90 % range: {sum(inside)} of {len(inside)} steps ({share:.0%})."
    yield f"- Median width of the range: {width:.0%}."
    repeated = [one for cell in cells for one in cell.repeated]
    low, high = (float(one) - 1 for one in np.quantile(repeated, (0.05, 0.95)))
    yield (
        f"- The same step, measured in the profile and again minutes later ({len(repeated)} of "
        f"them): nine of ten differ by {low:+.0%} to {high:+.0%}. No range that is narrower than "
        f"{high - low:.0%} can hold nine of ten."
    )
    yield f"- Error: {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most."
    yield (
        "- Plans, measured themselves, behind the best measured degree: "
        f"{statistics.median(regrets):.1%} in the median, {max(regrets):.1%} at most."
    )
    yield from ("", "Error of the prediction by degree; **bold** is outside the range.", "")
    yield f"| cell | {' | '.join(map(str, _DEGREES))} | width | plan | behind the best |"
    yield f"|---|{'---:|' * (len(_DEGREES) + 3)}"
    for cell in cells:
        errors_by_degree = " | ".join(_error(*cell.steps[degree]) for degree in _DEGREES)
        width = statistics.median(_width(plan) for plan, _ in cell.steps.values())
        chosen = cell.chosen[0].pipeline
        yield (
            f"| {cell.name} | {errors_by_degree} | {width:.0%} | "
            f"{chosen.forward_degree}, {chosen.backward_degree} | {cell.regret:.1%} |"
        )


def _error(plan: Plan, seconds: float) -> str:
    text = f"{prediction_error(plan.predicted.step_seconds, seconds):+.1%}"
    return text if _is_inside(plan, seconds) else f"**{text}**"


def _is_inside(plan: Plan, seconds: float) -> bool:
    return plan.predicted.p05_step_seconds <= seconds <= plan.predicted.p95_step_seconds


def _width(plan: Plan) -> float:
    predicted = plan.predicted
    return (predicted.p95_step_seconds - predicted.p05_step_seconds) / predicted.step_seconds


if __name__ == "__main__":
    main()
