"""PPMoE's Table 2 as plans of trainings predict it, beside what the paper measured.

    python -m benchmarks.ppmoe.table2

From `profiles/v100-x256.toml`, which holds the peaks that the paper calculates with, so that
only ratios mean something. As the paper ran it: no overlap; DPMoE with one micro-batch a step
(§3.3.6), the largest that fits; PPMoE with twice as many micro-batches as stages.
"""

import itertools
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moetune.app.training import plan_training
from moetune.app.training_plan import TrainingRequest
from moetune.domain.errors import LayoutTooLargeError
from moetune.domain.model import WHOLE_MODELS
from moetune.domain.profile import Profile, profile_from_document
from moetune.domain.targets import find_target
from moetune.domain.training import TOKEN_DISPATCHERS, LayoutRequest, TrainingJob, ZeroStage
from moetune.domain.training_document import TrainingAnswer
from moetune.huggingface.registry import paper_decoder

RESULT = Path("docs/results/ppmoe-table2.md")
_PROFILE = Path("profiles/v100-x256.toml")
_MICRO_BATCHES_PER_STAGE = 2
_LARGEST_MICRO_BATCH = 64
_PAPERS = replace(find_target("moetune"), tp_dispatchers=TOKEN_DISPATCHERS, zero_with_tp=1)
"""Of the paper's runtime, which cuts attention beside experts that exchange tokens."""
_ZERO: tuple[ZeroStage, ...] = (1, 3)
_CLOSE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of Table 2.

    Args:
        tokens_per_second: of one GPU, as the paper measured it.
    """

    model: str
    dp: int
    tp: int
    pp: int
    tokens_per_second: float

    @property
    def world_size(self) -> int:
        """GPUs."""
        return self.dp * self.tp * self.pp

    @property
    def is_ppmoe(self) -> bool:
        """Whether the ranks of a tensor-parallel group share the experts, and a pipeline runs."""
        return self.pp > 1

    @property
    def name(self) -> str:
        """The paper's name for such a layout."""
        return "PPMoE" if self.is_ppmoe else "DPMoE"

    @property
    def pins(self) -> LayoutRequest:
        """The layout: DeepSpeed's experts are spread over replicas only."""
        experts = WHOLE_MODELS[self.model].shape.moe.num_experts
        common = LayoutRequest(
            tp=self.tp, pp=self.pp, cp=1, vpp=1, overlap="none", schedule="1f1b",
        )  # fmt: skip
        if self.is_ppmoe:
            return replace(common, ep=self.tp, dispatcher="all_gather", zero=1)
        return replace(common, ep=math.gcd(self.dp, experts), dispatcher="all_to_all")


_NOTE = (
    "Target `moetune`: ZeRO-1, or ZeRO-3 where nothing else fits. Modules are recomputed where "
    "memory asks for it, and attention is fused. Ranks of a tensor-parallel group share the "
    "sequence, so that DPMoE sends each token once. The paper's runtime sent it from each of "
    "these ranks, and its rows with tp 8 are slower for that. Its rows of 143B with tp 2 and 8 "
    "shard states by ZeRO. moetune's runtime does not combine that with tensor parallelism. The "
    "dense rows of Table 2 have no experts and are not planned."
)
ROWS = (
    Row(model="ppmoe-6.7b", dp=32, tp=1, pp=1, tokens_per_second=2147),
    Row(model="ppmoe-6.7b", dp=4, tp=8, pp=1, tokens_per_second=218),
    Row(model="ppmoe-6.7b", dp=1, tp=8, pp=4, tokens_per_second=2708),
    Row(model="ppmoe-143b", dp=256, tp=1, pp=1, tokens_per_second=93),
    Row(model="ppmoe-143b", dp=128, tp=2, pp=1, tokens_per_second=183),
    Row(model="ppmoe-143b", dp=32, tp=8, pp=1, tokens_per_second=63),
    Row(model="ppmoe-143b", dp=1, tp=8, pp=16, tokens_per_second=323),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner says of a row; `best` is None where nothing fits."""

    row: Row
    best: TrainingAnswer | None = None
    tokens_per_second: float = 0.0


def predict(row: Row, profile: Profile) -> Prediction:
    """Return the row at its best micro-batch."""
    sizes = [2**power for power in range(_LARGEST_MICRO_BATCH.bit_length())]
    predictions = (_at(row, profile, size, zero) for zero in _ZERO for size in sizes)
    return max(predictions, key=lambda answer: answer.tokens_per_second)


def _at(row: Row, profile: Profile, sequences: int, zero: ZeroStage) -> Prediction:
    shape = WHOLE_MODELS[row.model].shape
    count = _MICRO_BATCHES_PER_STAGE * row.pp if row.is_ppmoe else 1
    job = TrainingJob(
        decoder=paper_decoder(row.model, shape), world_size=row.world_size,
        global_batch=sequences * row.dp * count, length=shape.length, dtype="float16",
    )  # fmt: skip
    pins = replace(row.pins, micro_batch=sequences, zero=row.pins.zero or zero)
    if zero > 1 and row.tp * row.pp > 1:
        return Prediction(row=row)  # the runtime shards parameters of single ranks alone
    request = TrainingRequest(job=job, pins=pins, target=_PAPERS)
    try:
        plan = plan_training(request, profile)
    except LayoutTooLargeError:
        return Prediction(row=row)
    speed = plan.predicted.tokens_per_second_per_device
    return Prediction(row=row, best=plan.best, tokens_per_second=speed)


def ratio(predictions: Sequence[Prediction], model: str, *, measured: bool) -> float:
    """Return PPMoE's tokens a second over those of the best DPMoE."""
    by_name: dict[str, float] = {"PPMoE": 0.0, "DPMoE": 0.0}
    for answer in predictions:
        if answer.row.model == model:
            value = answer.row.tokens_per_second if measured else answer.tokens_per_second
            by_name[answer.row.name] = max(by_name[answer.row.name], value)
    return by_name["PPMoE"] / by_name["DPMoE"] if by_name["DPMoE"] else math.inf


def is_in_order(predictions: Sequence[Prediction], model: str) -> bool:
    """Return whether the model's rows are predicted in the order they were measured in."""
    rows = [answer for answer in predictions if answer.row.model == model]
    measured = sorted(rows, key=lambda answer: answer.row.tokens_per_second)
    return measured == sorted(rows, key=lambda answer: answer.tokens_per_second)


def _report(predictions: Sequence[Prediction]) -> Iterator[str]:
    yield "# PPMoE's Table 2 (modelled)"
    yield ""
    yield (
        "From `profiles/v100-x256.toml`: peaks that the paper calculates with, so that absolute "
        "figures are several times too high, and only ratios mean something. "
        "`python -m benchmarks.ppmoe.table2` writes this file. Tokens a second and GPU; "
        "“of best” is relative to the model's best row."
    )
    yield ""
    yield "| model | layout | dp | tp | pp | paper | of best | ours | of best | how | why |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---|---|"
    for model, rows in itertools.groupby(predictions, key=lambda answer: answer.row.model):
        mine = list(rows)
        best = max(answer.tokens_per_second for answer in mine)
        best_measured = max(answer.row.tokens_per_second for answer in mine)
        for answer in mine:
            row = answer.row
            yield (
                f"| {model} | {row.name} | {row.dp} | {row.tp} | {row.pp} "
                f"| {row.tokens_per_second:,.0f} | {row.tokens_per_second / best_measured:.2f} "
                f"| {answer.tokens_per_second:,.0f} | {answer.tokens_per_second / best:.2f} "
                f"| {_how(answer.best)} | {_largest_parts(answer.best)} |"
            )
    yield ""
    yield "| model | in the paper's order | PPMoE ÷ best DPMoE, paper | ours | off by |"
    yield "|---|---|---:|---:|---:|"
    for model in dict.fromkeys(row.model for row in ROWS):
        paper, ours = (ratio(predictions, model, measured=way) for way in (True, False))
        order = "yes" if is_in_order(predictions, model) else "no"
        off = ours / paper - 1
        met = "" if abs(off) <= _CLOSE else " (missed)"
        yield f"| {model} | {order} | {paper:.2f} | {ours:.2f} | {100 * off:+.0f} %{met} |"


def _how(best: TrainingAnswer | None) -> str:
    if best is None:
        return "does not fit"
    layout = best.layout
    again = f", recomputes {', '.join(layout.recompute)}" if layout.recompute else ""
    return f"micro-batch {layout.micro_batch}, ZeRO-{layout.zero}{again}"


def _largest_parts(best: TrainingAnswer | None) -> str:
    if best is None:
        return ""
    parts = sorted(best.predicted.parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(
        f"{name} {100 * part / best.predicted.step_seconds:.0f} %" for name, part in parts
    )


def main() -> None:
    profile = profile_from_document(tomllib.loads(_PROFILE.read_text(encoding="utf-8")))
    predictions = [predict(row, profile) for row in ROWS]
    text = "\n".join([*_report(predictions), "", _NOTE, ""])
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
