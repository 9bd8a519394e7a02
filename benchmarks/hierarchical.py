"""The hierarchical exchange beside the flat one: two nodes of two ranks behind one link each.

    sudo python -m benchmarks.hierarchical --out docs/results/hierarchical.md

For each number of tokens: one layer's steps in several chunks, with both exchanges, measured in the
network lab beside what its own profile predicts. The two ranks of a node share one core, so that
the second step's copies take time that GPUs would not miss.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.netlab.experiment import DTYPE, measure_profile, measure_steps, steps_command
from benchmarks.netlab.lab import Lab
from moetune.domain.constraints import Bounds, Constraints, Dispatcher
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Plan
from moetune.domain.prediction_error import prediction_error
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.domain.units import format_seconds
from moetune.workflows.files import write_text
from moetune.workflows.plan import make_plan

LAYER = LayerShape(d_model=256, d_hidden=512, num_experts=8, top_k=2)
NUM_RANKS, RANKS_PER_NODE = 4, 2
RATE_MBIT = 200.0
TOKENS = (16, 64, 1024)
DEGREES = (1, 4)
_VARIANTS: dict[Dispatcher, str] = {"flat": "ours", "hierarchical": "hierarchical"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of tokens, chunks and way to exchange; steps in seconds."""

    tokens: int
    degree: int
    dispatcher: Dispatcher
    predicted_seconds: float
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.seconds)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", default="60s", help="of the profile")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(num_ranks=NUM_RANKS, rate_mbit=RATE_MBIT, ranks_per_node=RANKS_PER_NODE) as lab,
    ):
        profile = measure_profile(
            lab, layer=LAYER, tokens=max(TOKENS), budget=given.budget, folder=Path(folder),
            echo=sys.stderr,
        )  # fmt: skip
        rows = tuple(_rows(lab, profile, rounds=given.rounds))
    choices = [plan_of(profile, tokens) for tokens in TOKENS]
    write_text(given.out, page(rows, choices, budget=given.budget, rounds=given.rounds))
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


def plan_of(
    profile: Profile,
    tokens: int,
    *,
    degree: int | None = None,
    dispatcher: Dispatcher | None = None,
) -> Plan:
    """Return the layer's plan, with what is given pinned."""
    bounds = Bounds(
        forward_degree=degree, backward_degree=degree, strategy="none", dispatcher=dispatcher
    )
    request = PlanRequest(
        layer=LAYER, world_size=NUM_RANKS, tokens_per_rank=tokens, dtype=DTYPE,
        constraints=Constraints(bounds=bounds),
    )  # fmt: skip
    return make_plan(request, profile=profile)


def _rows(lab: Lab, profile: Profile, *, rounds: int) -> Iterator[Row]:
    ways = [(degree, dispatcher) for degree in DEGREES for dispatcher in _VARIANTS]
    names = {way: f"{_VARIANTS[way[1]]}:{way[0]}" for way in ways}
    command = steps_command(
        layer=LAYER, tokens=TOKENS, variants=list(names.values()), rounds=rounds
    )
    measured = measure_steps(lab, command, peer=None, echo=sys.stderr)
    for tokens in TOKENS:
        for (degree, dispatcher), name in names.items():
            plan = plan_of(profile, tokens, degree=degree, dispatcher=dispatcher)
            yield Row(
                tokens=tokens, degree=degree, dispatcher=dispatcher,
                predicted_seconds=plan.predicted.step_seconds,
                seconds=measured[tokens, name].seconds,
            )  # fmt: skip


def page(rows: Sequence[Row], choices: Sequence[Plan], *, budget: str, rounds: int) -> str:
    """Return the page of results in Markdown."""
    head = f"""# Hierarchical exchange

Two nodes of two ranks; a link of {RATE_MBIT:.0f} Mbit/s a node, and one core for both of its ranks
(`python -m benchmarks.hierarchical`). Layer: d_model {LAYER.d_model}, d_hidden {LAYER.d_hidden},
{LAYER.num_experts} experts, top-{LAYER.top_k}, {DTYPE}; forward and backward; medians of {rounds}
rounds, in which all ways take turns. Predicted from a profile of {budget}.

| tokens a rank | chunks | exchange | predicted | measured | predicted − measured |
|---:|---:|---|---:|---:|---:|"""
    lines = [head]
    for row in rows:
        error = prediction_error(row.predicted_seconds, row.median_seconds)
        lines.append(
            f"| {row.tokens} | {row.degree} | {row.dispatcher} "
            f"| {format_seconds(row.predicted_seconds)} | {format_seconds(row.median_seconds)} "
            f"| {error:+.0%} |"
        )
    lines += ["", "Without pins the plan takes:", "", "| tokens a rank | exchange | chunks |"]
    lines.append("|---:|---|---|")
    for plan in choices:
        pipeline = plan.pipeline
        lines.append(
            f"| {plan.tokens_per_rank} | {pipeline.dispatcher} "
            f"| {pipeline.forward_degree} and {pipeline.backward_degree} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
