"""Profile a lab of two nodes, ask the solver for every layout, and measure them all."""

import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from benchmarks.layouts.ranks import Variant, Work
from benchmarks.layouts.shared_core import on_shared_core
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.profiled import profile_of
from moetune.domain.constraints import Bounds, Constraints, LayoutPins, TransformerSizes
from moetune.domain.document import canonical_json, encode
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.plan import Decision
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.fit.costs import costs_of
from moetune.solve.layout.candidates import Candidate
from moetune.solve.layout.choose import LayoutProblem, search_layouts
from moetune.solve.layout.words import parts_of

NUM_RANKS, RANKS_PER_NODE = 4, 2
_TIMEOUT_SECONDS = 1200.0
_DTYPE = "float32"
_TURNS = 2
_SEED = 1
_SAME_LOSS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its batch.

    Args:
        sequences_per_rank: of one step; the global batch has as many on each rank.
    """

    transformer: Transformer
    sequences_per_rank: int

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of one step on each rank."""
        return self.sequences_per_rank * self.transformer.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One layout, predicted and measured.

    Args:
        parts: predicted seconds of the step by part.
        seconds: raw step times, in the order of the rounds.
        imbalance: the busiest rank's rows over the mean rank's, of the worst layer.
    """

    layout: Layout
    num_micro_batches: int
    decision: Decision
    predicted_seconds: float
    parts: Mapping[str, float]
    seconds: tuple[float, ...]
    imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """All layouts of one case, the solver's first choice first."""

    case: Case
    rate_mbit: float
    outcomes: tuple[Outcome, ...]


def run_case(
    case: Case, *, rate_mbit: float, rounds: int, budget: str, folder: Path, echo: TextIO
) -> CaseResult:
    """Return every layout of one case.

    Args:
        budget: longest time of the profile, as `moetune profile --budget` takes it.
        folder: where the database goes.
        echo: where progress goes.

    Raises:
        MoetuneError: the lab, the profile or a rank failed.
    """
    with Lab(num_ranks=NUM_RANKS, rate_mbit=rate_mbit, ranks_per_node=RANKS_PER_NODE) as lab:
        profile = profile_of(
            lab, case.transformer, tokens=NUM_RANKS * case.tokens_per_rank, dtype=_DTYPE,
            budget=budget, folder=folder, echo=echo,
        )  # fmt: skip
        predicted = predict(case, profile)
        measured = measure(lab, case, [variant for variant, _, _ in predicted], rounds, echo)
    return CaseResult(
        case=case,
        rate_mbit=rate_mbit,
        outcomes=tuple(
            Outcome(
                layout=variant.layout,
                num_micro_batches=variant.num_micro_batches,
                decision=variant.decision,
                predicted_seconds=candidate.seconds,
                parts=parts,
                seconds=seconds,
                imbalance=imbalance,
            )
            for (variant, candidate, parts), (seconds, imbalance) in zip(
                predicted, measured, strict=True
            )
        ),
    )


Predicted = tuple[Variant, Candidate, Mapping[str, float]]


def predict(case: Case, profile: Profile) -> list[Predicted]:
    """Return every layout at the solver's best, its own first choice first.

    Optimizer states are not sharded: the runtime that is measured keeps them whole.
    """
    request = PlanRequest(
        layer=case.transformer.moe,
        constraints=Constraints(sizes=TransformerSizes.of(case.transformer)),
        world_size=NUM_RANKS,
        tokens_per_rank=case.tokens_per_rank,
        dtype=_DTYPE,
    )
    search, found = search_layouts(
        LayoutProblem(
            inputs=request.inputs_for(profile),
            model=case.transformer,
            pins=LayoutPins(zero=False),
            costs=costs_of(profile),
            resamples=(),
            bounds=Bounds(),
            per_node=profile.machine.devices_per_node,
            runs_ahead=profile.machine.kind == "cuda",
            device_memory_bytes=profile.machine.memory_bytes,
            provenance=profile.provenance,
        )
    )
    if found.unpriced:
        raise found.unpriced[0][1]
    best = [
        on_shared_core(
            one,
            stages=search.prices.stages(one.layout.pp),
            ranks_per_node=profile.machine.devices_per_node,
        )
        for one in found.best
    ]
    return [
        (
            _variant(one),
            one,
            {
                part.name: part.seconds
                for part in parts_of(one, search.prices.stages(one.layout.pp))
            },
        )
        for one in sorted(best, key=lambda one: one.order)
    ]


def _variant(candidate: Candidate) -> Variant:
    forward, backward = candidate.priced.moe.step.degrees
    return Variant(
        layout=candidate.layout,
        num_micro_batches=candidate.setting.num_micro_batches,
        decision=Decision(forward_degree=forward, backward_degree=backward),
    )


def measure(
    lab: Lab, case: Case, variants: Sequence[Variant], rounds: int, echo: TextIO
) -> list[tuple[tuple[float, ...], float]]:
    """Return each variant's raw step times, and its imbalance.

    Each is a job of its own, and the jobs come in random turns. In one job for all, the threads
    of 40 idle groups made a step up to 15 % longer.

    Raises:
        AssertionError: the layouts are not one model.
    """
    jobs = [number for _ in range(_TURNS) for number in range(len(variants))]
    random.Random(_SEED).shuffle(jobs)  # noqa: S311 - an order, not a secret
    lines: list[list[dict[str, Any]]] = [[] for _ in variants]
    for turn, number in enumerate(jobs):
        print(f"{turn + 1}/{len(jobs)} jobs", file=echo, flush=True)
        lines[number].append(_run_job(lab, case, variants[number], rounds, echo))
    losses = [line["loss"] for found in lines for line in found]
    if not all(math.isclose(loss, losses[0], rel_tol=_SAME_LOSS) for loss in losses):
        raise AssertionError(f"the layouts are not one model: losses {losses}")
    return [
        (tuple(chain.from_iterable(line["seconds"] for line in found)), found[0]["imbalance"])
        for found in lines
    ]


def _run_job(lab: Lab, case: Case, variant: Variant, rounds: int, echo: TextIO) -> dict[str, Any]:
    work = Work(
        transformer=case.transformer,
        num_sequences=NUM_RANKS * case.sequences_per_rank,
        variant=variant,
    )
    command = [
        *(sys.executable, "-m", "benchmarks.layouts.ranks"),
        *("--work", canonical_json(work), "--rounds", str(rounds)),
    ]
    outputs = lab.run(command, timeout_seconds=_TIMEOUT_SECONDS, echo=echo)
    found: dict[str, Any] = json.loads(outputs[0].stdout)
    return found


def write_results(path: Path, results: Sequence[CaseResult]) -> None:
    """Write the results as JSON."""
    text = json.dumps([encode(one) for one in results], indent=1)
    path.write_text(text + "\n", encoding="utf-8")
