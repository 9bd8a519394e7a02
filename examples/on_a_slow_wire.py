"""What `make quickstart LAB=1` adds: chunks on two ranks whose wire is slow, as between nodes."""

import io
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.netlab.experiment import (
    DTYPE,
    NUM_RANKS,
    PROFILE,
    Line,
    measure_profile,
    measure_steps,
    steps_command,
)
from benchmarks.netlab.lab import Lab
from moetune.app.files import write_text
from moetune.app.plan import make_plan
from moetune.cli.render import Screen
from moetune.domain.document import encode
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Plan
from moetune.domain.question import Question
from moetune.domain.records import prediction_error
from moetune.report.section import Cell, Table

RATE_MBIT = 200.0
_LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=2, top_k=1, activation="relu")
_TOKENS = 1024
_BUDGET = "30s"
_ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSteps:
    """A layer's step in the lab, in one chunk and with the plan: medians over the rounds.

    Args:
        one_chunk_seconds, planned_seconds: measured.
    """

    plan: Plan
    one_chunk_seconds: float
    planned_seconds: float

    @property
    def predicted_speedup(self) -> float:
        """How many times as fast as one chunk the plan was predicted to be."""
        predicted = self.plan.predicted
        return predicted.sequential_step_seconds / predicted.step_seconds

    @property
    def speedup(self) -> float:
        """How many times as fast as one chunk the plan was."""
        return self.one_chunk_seconds / self.planned_seconds


def show_slow_wire(screen: Screen) -> None:
    """Measure a profile in the lab, plan with it, run both, and print what was gained.

    Raises:
        MoetuneError: the machine cannot build the lab, or a rank failed.
    """
    steps = _measure()
    predicted, degrees = steps.plan.predicted, steps.plan.pipeline
    rows = (
        _row("one chunk", "1/1", predicted.sequential_step_seconds, steps.one_chunk_seconds),
        _row(
            "plan",
            f"{degrees.forward_degree}/{degrees.backward_degree}",
            predicted.step_seconds,
            steps.planned_seconds,
        ),
    )
    header = ("", "chunks", "predicted step", "measured", "error")
    screen.table(Table(name="wire", header=header, rows=rows))
    screen.say()
    screen.say(
        f"The plan is {steps.speedup:.2f} × as fast as one chunk; {steps.predicted_speedup:.2f} × "
        "was predicted."
    )


def _measure() -> LabSteps:
    with (
        Lab(num_ranks=NUM_RANKS, rate_mbit=RATE_MBIT) as lab,
        tempfile.TemporaryDirectory(prefix=f"{PROFILE}-") as at,
    ):
        # What a lab's profile advises, to resume it, cannot be done once the lab is gone.
        folder, unheard = Path(at), io.StringIO()
        profile = measure_profile(
            lab, layer=_LAYER, tokens=_TOKENS, budget=_BUDGET, folder=folder, echo=unheard
        )
        request = Question(**encode(_LAYER), world_size=NUM_RANKS, tokens=_TOKENS, dtype=DTYPE)
        plan = make_plan(request, profile=profile)
        write_text(folder / f"{_TOKENS}.json", plan.text)
        one_chunk, planned = "ours:1", f"planned:{folder}"
        command = steps_command(
            layer=_LAYER, tokens=[_TOKENS], variants=[one_chunk, planned], rounds=_ROUNDS
        )
        lines = measure_steps(lab, command, peer=None, echo=unheard)
    return LabSteps(
        plan=plan,
        one_chunk_seconds=_median(lines[_TOKENS, one_chunk]),
        planned_seconds=_median(lines[_TOKENS, "planned"]),
    )


def _median(line: Line) -> float:
    return statistics.median(line.seconds)


def _row(
    name: str, chunks: str, predicted_seconds: float, measured_seconds: float
) -> tuple[Cell, ...]:
    return (
        Cell.words(name),
        Cell.words(chunks),
        Cell.seconds(predicted_seconds),
        Cell.seconds(measured_seconds),
        Cell.share(prediction_error(predicted_seconds, measured_seconds), digits=0, sign=True),
    )
