"""PPMoE's Table 2 as the layout solver predicts it, beside what the paper measured.

    python -m benchmarks.ppmoe.table2

From `profiles/v100-x256.toml`, which holds the peaks that the paper calculates with, so that
only ratios mean something. As the paper ran it: Megatron-LM's and DeepSpeed's way with sends,
gradients and experts under tensor parallelism; no overlap; DPMoE with one micro-batch a step
(§3.3.6), the largest that fits; PPMoE with twice as many micro-batches as stages.
"""

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moetune.domain.constraints import Bounds, Constraints, LayoutPins
from moetune.domain.errors import InfeasiblePlanError, InputError
from moetune.domain.layer import ExpertParallel
from moetune.domain.model import find_model
from moetune.domain.model_plan import Part
from moetune.domain.profile import Profile, profile_from_document
from moetune.domain.request import PlanRequest
from moetune.fit.costs import costs_of
from moetune.solve.layout.candidates import Candidate
from moetune.solve.layout.choose import LayoutProblem, search_layouts
from moetune.solve.layout.search import LayoutSearch
from moetune.solve.layout.words import parts_of
from moetune.solve.runtime import TargetRuntime

PAPERS = TargetRuntime(
    splits_sends=True, shards_gradients=True, exchanges_under_tensor=True, is_unfused=True,
    hidden_gradients=0.0,
    shards_in_chunks=False,
)  # fmt: skip
RESULT = Path("docs/results/ppmoe-table2.md")
_PROFILE = Path("profiles/v100-x256.toml")
_MICRO_BATCHES_PER_STAGE = 2
_LARGEST_MICRO_BATCH = 64
_RESERVED_BYTES = int(2.5e9)
_CLOSE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of Table 2.

    Args:
        tokens_per_second: of one GPU, as the paper measured it.
    """

    model: str
    kind: ExpertParallel
    dp: int
    tp: int
    pp: int
    tokens_per_second: float

    @property
    def world_size(self) -> int:
        """GPUs."""
        return self.dp * self.tp * self.pp

    @property
    def name(self) -> str:
        """The paper's name for such a layout."""
        return "PPMoE" if self.kind == "tensor" else "DPMoE"

    @property
    def ep(self) -> int:
        """Ranks that exchange tokens: DeepSpeed's experts are spread over replicas only."""
        experts = find_model(self.model).layer(self.world_size).num_experts
        return 1 if self.kind == "tensor" else math.gcd(self.dp, experts)


_NOTES = (
    (
        "Taken besides the profile, knowing the table: ZeRO-2 for DPMoE (the 143B rows fit in no "
        "other way), activations recomputed where nothing else fits, attention without a fused "
        "kernel and a loss in float32 (the paper's code is Megatron-LM of 2022), experts cut over "
        "the tensor-parallel ranks where DPMoE has them (32 × 8 fits in no other way). With a "
        "fused kernel DPMoE 256 × 1 fits four sequences and comes before 128 × 2. The dense rows "
        "of Table 2 have no experts and are not planned."
    ),
)
ROWS = (
    Row(model="ppmoe-6.7b", kind="all_to_all", dp=32, tp=1, pp=1, tokens_per_second=2147),
    Row(model="ppmoe-6.7b", kind="all_to_all", dp=4, tp=8, pp=1, tokens_per_second=218),
    Row(model="ppmoe-6.7b", kind="tensor", dp=1, tp=8, pp=4, tokens_per_second=2708),
    Row(model="ppmoe-143b", kind="all_to_all", dp=256, tp=1, pp=1, tokens_per_second=93),
    Row(model="ppmoe-143b", kind="all_to_all", dp=128, tp=2, pp=1, tokens_per_second=183),
    Row(model="ppmoe-143b", kind="all_to_all", dp=32, tp=8, pp=1, tokens_per_second=63),
    Row(model="ppmoe-143b", kind="tensor", dp=1, tp=8, pp=16, tokens_per_second=323),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the solver says of a row; `candidate` is None where nothing fits."""

    row: Row
    candidate: Candidate | None
    parts: tuple[Part, ...] = ()
    tokens_per_second: float = 0.0


def predict(row: Row, profile: Profile, *, reserved_bytes: int = _RESERVED_BYTES) -> Found:
    """Return the row at its best micro-batch."""
    sizes = [2**power for power in range(_LARGEST_MICRO_BATCH.bit_length())]
    found = [_at(row, profile, size, reserved_bytes) for size in sizes]
    return max(found, key=lambda one: one.tokens_per_second)


def _at(row: Row, profile: Profile, sequences: int, reserved_bytes: int) -> Found:
    model = find_model(row.model).transformer
    if model is None:
        raise InputError(f"{row.model} is no whole model")
    count = 1 if row.pp == 1 else _MICRO_BATCHES_PER_STAGE * row.pp
    tokens = sequences * count * model.length // (row.tp * row.pp)
    request = PlanRequest(
        model=row.model, world_size=row.world_size, tokens_per_rank=tokens, dtype="float16",
        constraints=Constraints(memory_taken_bytes=reserved_bytes),
    )  # fmt: skip
    question = LayoutProblem(
        inputs=request.inputs_for(profile),
        model=model,
        pins=LayoutPins(
            dp=row.dp, ep=row.ep, tp=row.tp, pp=row.pp, expert_parallel=row.kind,
            micro_batch=sequences, zero=row.kind == "all_to_all",
        ),
        costs=costs_of(profile),
        resamples=(),
        bounds=Bounds(max_degree=1),
        per_node=profile.machine.devices_per_node,
            runs_ahead=profile.machine.kind == "cuda",
        device_memory_bytes=profile.machine.memory_bytes,
        provenance=profile.provenance,
        runtime=PAPERS,
    )  # fmt: skip
    try:
        search, layouts = search_layouts(question)
    except InfeasiblePlanError:
        return Found(row=row, candidate=None)
    best = layouts.best[0]
    return Found(
        row=row,
        candidate=best,
        parts=_parts(search, best),
        tokens_per_second=tokens / best.seconds,
    )


def _parts(search: LayoutSearch, best: Candidate) -> tuple[Part, ...]:
    return parts_of(best, search.prices.stages(best.layout.pp))


def ratio(found: Sequence[Found], model: str, *, measured: bool) -> float:
    """Return PPMoE's tokens a second over those of the best DPMoE."""
    by_name: dict[str, float] = {"PPMoE": 0.0, "DPMoE": 0.0}
    for one in found:
        if one.row.model == model:
            value = one.row.tokens_per_second if measured else one.tokens_per_second
            by_name[one.row.name] = max(by_name[one.row.name], value)
    return by_name["PPMoE"] / by_name["DPMoE"]


def is_in_order(found: Sequence[Found], model: str) -> bool:
    """Return whether the model's rows are predicted in the order they were measured in."""
    rows = [one for one in found if one.row.model == model]
    measured = sorted(rows, key=lambda one: one.row.tokens_per_second)
    return measured == sorted(rows, key=lambda one: one.tokens_per_second)


def _report(found: Sequence[Found]) -> Iterator[str]:
    yield "# PPMoE's Table 2 (modelled)"
    yield ""
    yield (
        "From `profiles/v100-x256.toml`: peaks that the paper calculates with, so that absolute "
        "figures are three to ten times too high, and only ratios mean something. "
        "`python -m benchmarks.ppmoe.table2` writes this file. Tokens a second and GPU; "
        "“of best” is relative to the model's best row."
    )
    yield ""
    yield (
        "| model | layout | dp | tp | pp | paper | of best | ours | of best | micro-batch | why |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|"
    for model, rows in itertools.groupby(found, key=lambda one: one.row.model):
        mine = list(rows)
        best = max(one.tokens_per_second for one in mine)
        best_measured = max(one.row.tokens_per_second for one in mine)
        for one in mine:
            row = one.row
            yield (
                f"| {model} | {row.name} | {row.dp} | {row.tp} | {row.pp} "
                f"| {row.tokens_per_second:,.0f} | {row.tokens_per_second / best_measured:.2f} "
                f"| {one.tokens_per_second:,.0f} | {one.tokens_per_second / best:.2f} "
                f"| {_micro_batch(one)} | {_largest_parts(one)} |"
            )
    yield ""
    yield "| model | in the paper's order | PPMoE ÷ best DPMoE, paper | ours | off by |"
    yield "|---|---|---:|---:|---:|"
    for model in _models():
        paper, ours = (ratio(found, model, measured=way) for way in (True, False))
        order = "yes" if is_in_order(found, model) else "no"
        off = ours / paper - 1
        met = "" if abs(off) <= _CLOSE else " (missed)"
        yield f"| {model} | {order} | {paper:.2f} | {ours:.2f} | {100 * off:+.0f} %{met} |"
    yield ""
    yield from _shares(found)


def _micro_batch(one: Found) -> str:
    if one.candidate is None:
        return "does not fit"
    setting = one.candidate.setting
    again = ", recomputed" if setting.recompute else ""
    return f"{setting.num_micro_batches} × {setting.sequences}{again}"


def _largest_parts(one: Found) -> str:
    largest = sorted(one.parts, key=lambda part: part.share, reverse=True)[:3]
    return ", ".join(f"{part.name} {100 * part.share:.0f} %" for part in largest)


_PAPERS_SHARES: Mapping[str, Mapping[str, float]] = {
    "DPMoE (Table 1)": {"first all_to_all": 33.7, "second all_to_all": 31.8, "gate": 2.1},
    "PPMoE (Table 3)": {
        "MoE all_reduce": 20.7, "FFN all_reduce": 18.8, "experts": 7.0, "gate": 7.8,
    },
}  # fmt: skip
"""Per cent of the forward pass."""


def _shares(found: Sequence[Found]) -> Iterator[str]:
    """Tables 1 and 3, of the small model."""
    small = {"DPMoE (Table 1)": found[0], "PPMoE (Table 3)": found[2]}
    yield "Parts of the forward pass, ppmoe-6.7b, in per cent (the gate is not in the profile):"
    yield ""
    yield "| layout | part | paper | ours |"
    yield "|---|---|---:|---:|"
    for name, shares in _PAPERS_SHARES.items():
        forward = {part.name: part.forward_seconds for part in small[name].parts}
        whole = sum(forward.values())
        for part, paper in shares.items():
            ours = 100 * forward.get(part, 0.0) / whole  # type: ignore[call-overload] # its names
            yield f"| {name} | {part} | {paper:.1f} | {ours:.1f} |"
    yield ""


def _sensitivity(profile: Profile) -> Iterator[str]:
    yield (
        "What a device keeps for itself (context, communicators, fragments) decides which "
        f"micro-batch fits; above {_RESERVED_BYTES / 1e9:.1f} GB are assumed:"
    )
    yield ""
    yield "| reserved | " + " | ".join(f"{model}: order, ratio" for model in _models()) + " |"
    yield "|---:|" + "---|" * len(_models())
    for reserved in (0.0, 1e9, 2e9, 3e9, 4e9):
        found = [predict(row, profile, reserved_bytes=int(reserved)) for row in ROWS]
        cells = (
            f"{'as measured' if is_in_order(found, model) else 'other'}, "
            f"{ratio(found, model, measured=False):.2f}"
            for model in _models()
        )
        yield f"| {reserved / 1e9:.0f} GB | " + " | ".join(cells) + " |"


def _models() -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.model for row in ROWS))


def main() -> None:
    profile = profile_from_document(tomllib.loads(_PROFILE.read_text(encoding="utf-8")))
    found = [predict(row, profile) for row in ROWS]
    text = "\n".join([*_report(found), *_sensitivity(profile), "", *_NOTES, ""])
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
