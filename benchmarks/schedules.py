"""Schedules of pipelines, played: `python -m benchmarks.schedules`.

Writes docs/results/schedules.md: closed forms against the simulation over a grid, and what the
schedules take of a step of DeepSeek-V3. All of it simulated; nothing is measured.
"""

import argparse
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moetune.domain.pipeline import SCHEDULES, Schedule
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.huggingface.registry import named_model
from moetune.solve.training.pipeline import StagePipeline, StageSeconds, least_seconds, play
from moetune.solve.training.schedule import most_live
from moetune.solve.training.stages import DecoderStages
from moetune.solve.training.step import StepPrices
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.training_prices import device_prices

RESULT = Path(__file__).parents[1] / "docs/results/schedules.md"
_STAGES: dict[Schedule, tuple[int, ...]] = {
    "1f1b": (1,), "interleaved": (2, 4), "zero_bubble": (1, 2, 4), "zero_bubble_v": (2,),
    "dualpipe_v": (2,),
}  # fmt: skip
_PASSES = {
    "1 : 1 : 1": (1.0, 1.0, 1.0),
    "1 : 1.3 : 0.7": (1.0, 1.3, 0.7),
    "1 : 2 : 0.6": (1, 2, 0.6),
}
_CLOSE = 0.05
_CUTS = ("equal", "the last stage 1.5 times as long", "random, 10 % either way")
_LAYOUT = FoldedLayout(
    dp=64, tp=2, pp=8, ep=32, dispatcher="deepep", recompute=("full",), zero=2
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pipeline of the grid."""

    passes: str
    cut: str
    pipeline: StagePipeline


def cases(schedule: Schedule) -> Iterator[Case]:
    """Yield the grid's pipelines of a schedule."""
    rng = random.Random(0)  # noqa: S311 - no secret
    for pp, vpp, rounds in itertools.product((2, 4, 8, 16), _STAGES[schedule], (2, 4, 16)):
        for (name, passes), cut, send in itertools.product(_PASSES.items(), _CUTS, (0.0, 0.05)):
            lengths = {
                _CUTS[0]: [1.0] * (pp * vpp),
                _CUTS[1]: [1.0] * (pp * vpp - 1) + [1.5],
                _CUTS[2]: [rng.uniform(0.9, 1.1) for _ in range(pp * vpp)],
            }[cut]
            stages = tuple(
                StageSeconds(
                    forward=one * passes[0], grad_input=one * passes[1], grad_weight=one * passes[2]
                )
                for one in lengths
            )
            yield Case(
                passes=name, cut=cut,
                pipeline=StagePipeline(
                    schedule=schedule, pp=pp, stages=stages, num_micro_batches=rounds * pp,
                    send_seconds=send * vpp, hides_sends=schedule != "1f1b",
                ),
            )  # fmt: skip


def closed_form(pipeline: StagePipeline) -> float:
    """Return the usual formula: the busiest rank's work, the filling, and the exposed sends."""
    num, pp, vpp = pipeline.num_micro_batches, pipeline.pp, pipeline.vpp
    busy = [seconds / num for seconds in pipeline.busy]
    total = sum(busy)
    filling = (total - max(busy)) / vpp
    hops = 2 * (pp - 1) + (2 * (num - 1) if not pipeline.hides_sends else 0)
    if pipeline.schedule not in ("1f1b", "interleaved"):
        mean = [sum(getattr(one, name) for one in pipeline.stages) / len(pipeline.stages)
                for name in ("forward", "grad_input", "grad_weight")]  # fmt: skip
        idle = mean[0] + mean[1] - mean[2] * (2 if pipeline.schedule == "zero_bubble_v" else 1)
        filling = (pp - 1) * max(idle, 0.0)
    return num * max(busy) + filling + hops * pipeline.send_seconds


def grid() -> Iterator[str]:
    """Yield the table of closed forms against the simulation."""
    yield "| schedule | stages | pipelines | the formula | worst | the bound, worst |"
    yield "|---|---|---:|---:|---:|---:|"
    for schedule, cut in itertools.product(SCHEDULES, _CUTS):
        formula, bound = [], []
        for case in cases(schedule):
            if case.cut == cut:
                seconds = play(case.pipeline).seconds
                formula.append(closed_form(case.pipeline) / seconds - 1)
                bound.append(least_seconds(case.pipeline) / seconds - 1)
        within = sum(abs(one) <= _CLOSE for one in formula) / len(formula)
        worst = max(formula, key=abs)
        yield (
            f"| `{schedule}` | {cut} | {len(formula)} | {within:.0%} within 5 % | {worst:+.0%} "
            f"| {min(bound):+.0%} |"
        )


def steps() -> Iterator[str]:
    """Yield the table of DeepSeek-V3's step under each schedule."""
    profile = load_profile_file(bundled_profiles()["h100-x8"])
    device = device_prices(profile)
    yield "| schedule | stages of a rank | cut | micro-batches | step s | idle | kept |"
    yield "|---|---:|---|---:|---:|---:|---:|"
    for batch in (2048, 8192):
        job = TrainingJob(
            decoder=named_model("deepseek-v3").decoder, world_size=1024, global_batch=batch,
            length=4096,
        )  # fmt: skip
        stages = DecoderStages(job.decoder)
        prices = StepPrices(
            job=job, device=device, stages=stages, target=find_target("torchtitan")
        )  # fmt: skip
        tried: tuple[tuple[Schedule, int], ...] = (
            ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1),
            ("zero_bubble", 2), ("zero_bubble_v", 2), ("dualpipe_v", 2),
        )  # fmt: skip
        for schedule, vpp in tried:
            plain = replace(_LAYOUT, schedule=schedule, vpp=vpp)
            for name, layout in (("equal", plain), ("balanced", prices.balanced(plain))):
                if name == "balanced" and layout == plain:
                    continue
                pipeline = prices.pipeline(layout)
                run = play(pipeline)
                idle = sum(run.bubbles) / run.seconds / len(run.bubbles)
                kept = max(most_live(schedule, layout.pp, vpp, pipeline.num_micro_batches))
                yield (
                    f"| `{schedule}` | {vpp} | {name} | {pipeline.num_micro_batches} "
                    f"| {prices.step(layout).seconds:.2f} | {idle:.1%} | {kept:.2f} |"
                )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    head = _HEAD.format(passes=", ".join(_PASSES))
    text = "\n".join([head, *grid(), _MIDDLE, *steps(), ""])
    given.output.write_text(text)
    print(text)


_HEAD = """\
# Schedules of pipelines, simulated

Every number here is simulated: passes in the order of the schedule, each once its input is there.
Nothing was measured. `python -m benchmarks.schedules` writes this page.

## Closed forms

The grid: 2 to 16 ranks, 1, 2 or 4 stages of each as the schedule has them, 2, 4 and 16 rounds of
micro-batches, forward pass to gradients of inputs to those of weights as
{passes}, and sends of 0 and 5 % of a rank's forward pass.
*The formula* is the usual one: m times the busiest rank, what the others take once divided by the
stages of a rank, and sends; for zero-bubble and DualPipe-V the papers' bubbles. *The bound* is
what no order of the passes beats; the search uses it to leave out what cannot win.
"""
_MIDDLE = """
## DeepSeek-V3 on 1,024 H100

tp 2, pp 8, ep 32, DeepEP, everything recomputed, for torchtitan, with the reference profile
`h100-x8`. *Idle* is the mean share of the pipeline's time in which a rank does not compute; what is
kept is in a rank's blocks' worth of micro-batches. The head and the block of multi-token prediction
are on the last stage.
"""


if __name__ == "__main__":
    main()
