"""Run every variant as jobs of its own, in random turns, on two ranks of the network lab."""

import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from benchmarks.chunks.case import NUM_RANKS, Case
from benchmarks.chunks.planned import plan_in_lab
from benchmarks.chunks.ranks import Work
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.peers import peer_env
from moetune.domain.document import canonical_json, encode
from moetune.domain.model_plan import TransformerPlan
from moetune.domain.plan import Plan

PLANNED = "moetune planned"
VARIANTS = (
    PLANNED, "DDP", "moetune whole", "fully_shard cached", "moetune cached", "fully_shard",
    "moetune", "fully_shard offload", "moetune offload", "DeepSpeed ZeRO-3",
    "DeepSpeed ZeRO-3 offload",
)  # fmt: skip
_PEER = "DeepSpeed"
_TIMEOUT_SECONDS = 600.0
_TURNS = 2
_SEED = 1
_SAME_LOSS = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one variant took.

    Args:
        seconds: raw step times, in the order of the turns.
        peak_bytes: most resident memory of rank 0's process.
        moved: transfers of one step; empty for the others' variants.
        fewest_gathers: that any policy needs for the step's order and this cache.
        predicted_seconds: by the plan; 0 for all but the planned variant.
    """

    variant: str
    seconds: tuple[float, ...]
    peak_bytes: int
    moved: Mapping[str, int]
    fewest_gathers: int
    peak_device_bytes: int
    predicted_seconds: float = 0.0

    @property
    def median_seconds(self) -> float:
        """The measured step."""
        return median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """All variants of one case."""

    case: Case
    rate_mbit: float
    outcomes: tuple[Outcome, ...]

    def outcome(self, variant: str) -> Outcome | None:
        """Return one variant's; None where it was not measured."""
        return next((one for one in self.outcomes if one.variant == variant), None)


def run_case(
    case: Case,
    variants: Sequence[str],
    *,
    rate_mbit: float,
    rounds: int,
    peer: Path | None,
    budget: str,
    folder: Path,
    echo: TextIO,
) -> CaseResult:
    """Return what every variant took.

    Args:
        peer: DeepSpeed's folder.
        budget: longest time of the profile for the planned variant.
        folder: where its database goes.
        echo: where progress goes.

    Raises:
        MoetuneError: the lab or a rank failed.
        AssertionError: the variants do not train alike.
    """
    jobs = [number for _ in range(_TURNS) for number in range(len(variants))]
    random.Random(_SEED).shuffle(jobs)  # noqa: S311 - an order, not a secret
    lines: list[list[dict[str, Any]]] = [[] for _ in variants]
    with Lab(num_ranks=NUM_RANKS, rate_mbit=rate_mbit) as lab:
        plan = None
        if PLANNED in variants:
            plan = plan_in_lab(lab, case, budget=budget, folder=folder, echo=echo)
        for turn, number in enumerate(jobs):
            print(f"{case.name}: {turn + 1}/{len(jobs)} {variants[number]}", file=echo, flush=True)
            work = _work(case, variants[number], plan)
            lines[number].append(_run_job(lab, work, rounds, peer))
    losses = [found["losses"][-1] for told in lines for found in told]
    if not all(math.isclose(loss, losses[0], rel_tol=_SAME_LOSS) for loss in losses):
        raise AssertionError(f"the variants do not train alike: losses {losses}")
    return CaseResult(
        case=case,
        rate_mbit=rate_mbit,
        outcomes=tuple(
            Outcome(
                variant=variant,
                seconds=tuple(chain.from_iterable(found["seconds"] for found in told)),
                peak_bytes=max(found["peak_bytes"] for found in told),
                moved=told[0].get("moved", {}),
                fewest_gathers=told[0].get("fewest_gathers", 0),
                peak_device_bytes=told[0].get("peak_device_bytes", 0),
                predicted_seconds=_predicted(plan) if variant == PLANNED else 0.0,
            )
            for variant, told in zip(variants, lines, strict=True)
        ),
    )


def usable(variants: Sequence[str], *, peer: Path | None) -> tuple[str, ...]:
    """Return the variants that can run: DeepSpeed's need its folder."""
    return tuple(one for one in variants if peer is not None or not one.startswith(_PEER))


def _work(case: Case, variant: str, plan: Plan | None) -> Work:
    chunk_bytes, places, scatter, offload = case.chunk_bytes, case.places, True, False
    if variant == PLANNED and plan is not None and plan.chunks is not None:
        chosen = plan.chunks
        chunk_bytes, places = chosen.chunk_bytes, chosen.cache_bytes // chosen.chunk_bytes
        scatter, offload = chosen.scatter, chosen.offload
    return Work(
        transformer=case.transformer,
        sequences=case.sequences,
        variant=variant,
        chunk_bytes=chunk_bytes,
        places=places,
        scatter=scatter,
        offload=offload,
        recompute=variant == PLANNED and _whole(plan).recompute,
    )


def _whole(plan: Plan | None) -> TransformerPlan:
    assert plan is not None and plan.transformer is not None  # noqa: PT018, S101 - a whole model's
    return plan.transformer


def _predicted(plan: Plan | None) -> float:
    return _whole(plan).step_seconds


def _run_job(lab: Lab, work: Work, rounds: int, peer: Path | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.chunks.ranks", "--work", canonical_json(work)]
    outputs = lab.run(
        [*command, "--rounds", str(rounds)],
        timeout_seconds=_TIMEOUT_SECONDS,
        env=peer_env(peer) if peer is not None and work.variant.startswith(_PEER) else None,
    )
    found: dict[str, Any] = json.loads(outputs[0].stdout)
    return found


def write_results(path: Path, results: Sequence[CaseResult]) -> None:
    """Write the results as JSON."""
    text = json.dumps([encode(one) for one in results], indent=1)
    path.write_text(text + "\n", encoding="utf-8")
