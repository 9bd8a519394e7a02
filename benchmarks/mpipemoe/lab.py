"""Strategies in the network lab: predicted and measured steps, and what each rule chooses."""

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks.netlab.experiment import (
    DTYPE,
    NUM_RANKS,
    Line,
    measure_profile,
    measure_steps,
    steps_command,
)
from benchmarks.netlab.lab import Lab
from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Plan
from moetune.domain.prediction_error import prediction_error
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.fit.costs import costs_of
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.memory import layer_memory, total_bytes
from moetune.solve.layer.paper_times import paper_seconds
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.peak import peak_bytes
from moetune.solve.layer.times import step_time
from moetune.workflows.files import plan_to_json, write_text
from moetune.workflows.plan import make_plan

REUSE = STRATEGIES[1:]
Choice = tuple[Strategy, int]
"""(strategy, degree in both phases)."""
ONE_CHUNK: Choice = ("none", 1)
_ADAM_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is measured at every rate.

    Args:
        model: name of the layer in tables.
        limit_degree: the memory limit is what reuse needs with so many chunks.
        max_tokens_with_peaks: up to which each step's peak of live tensors is measured.
        budget: of one rate's profile.
        peer: DeepSpeed's folder, None to leave it out.
    """

    model: str
    layer: LayerShape
    tokens: tuple[int, ...]
    degrees: tuple[int, ...]
    limit_degree: int
    max_tokens_with_peaks: int
    rounds: int
    budget: str
    peer: Path | None

    def workload(self, tokens: int) -> Workload:
        """Return the workload of so many tokens on a rank."""
        return Workload(layer=self.layer, world_size=NUM_RANKS, tokens_per_rank=tokens, dtype=DTYPE)

    def needed_bytes(self, tokens: int, choice: Choice) -> int:
        """Return what a choice takes by Eq. 1 to 6."""
        strategy, degree = choice
        memory = layer_memory(
            workload=self.workload(tokens), forward_degree=degree, backward_degree=degree,
            strategy=strategy,
        )  # fmt: skip
        return total_bytes(memory)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """One chunk, and every strategy at every degree."""
        return ONE_CHUNK, *itertools.product(STRATEGIES, self.degrees)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One choice; seconds are of one step, the median over the rounds.

    Args:
        needed_bytes: by Eq. 1 to 6.
        peak_bytes: of live tensors on the device, with Adam's states added; 0 where not measured.
    """

    strategy: Strategy
    degree: int
    predicted_seconds: float
    seconds: float
    needed_bytes: int
    peak_bytes: int

    @property
    def error(self) -> float:
        """(predicted − measured) / measured."""
        return prediction_error(self.predicted_seconds, self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a plan chose, predicted and measured."""

    strategy: Strategy
    forward_degree: int
    backward_degree: int
    predicted_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCell:
    """One model, rate and number of tokens.

    Args:
        limit_bytes: that `limited` had to fit into; `free` had all memory.
        peer_seconds, peer_bytes: of DeepSpeed's expert parallelism; 0 where it was left out.
        paper_choice: MPipeMoE's Eq. 10 among the strategies that reuse memory.
    """

    model: str
    rate_mbit: float | None
    tokens: int
    limit_bytes: int
    free: Planned
    limited: Planned
    steps: tuple[Step, ...]
    peer_seconds: float
    peer_bytes: int
    paper_choice: Strategy

    @property
    def feasible(self) -> list[Step]:
        """Measured choices that fit into the limit."""
        return [step for step in self.steps if step.needed_bytes <= self.limit_bytes]

    @property
    def best(self) -> Step:
        """The fastest measured one of them."""
        return min(self.feasible, key=lambda step: step.seconds)

    @property
    def regret(self) -> float:
        """How much slower the plan is than that one."""
        return self.limited.seconds / self.best.seconds - 1

    @property
    def paper_regret(self) -> float:
        """The same of Eq. 10's strategy, at its fastest measured degree that fits."""
        times = [one.seconds for one in self.feasible if one.strategy == self.paper_choice]
        return min(times) / self.best.seconds - 1

    def of(self, strategy: Strategy, degree: int) -> Step:
        """Return one choice."""
        return next(one for one in self.steps if (one.strategy, one.degree) == (strategy, degree))


def run_rate(
    grid: Grid, *, rate_mbit: float | None, folder: Path, echo: TextIO
) -> tuple[tuple[StrategyCell, ...], Profile]:
    """Return the cells of one rate, and the profile that was measured for them.

    Raises:
        MoetuneError: the lab, the profile, a plan or a rank failed.
    """
    with Lab(num_ranks=NUM_RANKS, rate_mbit=rate_mbit) as lab:
        profile = measure_profile(
            lab, layer=grid.layer, tokens=max(grid.tokens), budget=grid.budget, folder=folder,
            echo=echo,
        )  # fmt: skip
        plans = {tokens: _plans(grid, profile, tokens, folder) for tokens in grid.tokens}
        variants = [f"planned:{folder / 'planned'}", f"limited:{folder / 'limited'}"]
        variants += [_variant(choice) for choice in grid.choices]
        variants += ["deepspeed"] if grid.peer else []
        command = steps_command(
            layer=grid.layer, tokens=grid.tokens, variants=variants, rounds=grid.rounds,
            max_tokens_with_peaks=grid.max_tokens_with_peaks,
        )  # fmt: skip
        lines = measure_steps(lab, command, peer=grid.peer, echo=echo)
    cells = tuple(
        _cell(grid, profile, rate_mbit, tokens, plans[tokens], lines) for tokens in grid.tokens
    )
    return cells, profile


def _plans(grid: Grid, profile: Profile, tokens: int, folder: Path) -> tuple[Plan, Plan]:
    """Return the plans without and with the limit, and write them where the ranks read them."""
    limit = grid.needed_bytes(tokens, ("S4", grid.limit_degree))
    plans = []
    for name, limit_bytes in (("planned", None), ("limited", limit)):
        request = PlanRequest(
            layer=grid.layer, world_size=NUM_RANKS, tokens_per_rank=tokens, dtype=DTYPE,
            memory_limit_bytes=limit_bytes,
        )  # fmt: skip
        plan = make_plan(request, profile=profile)
        (folder / name).mkdir(exist_ok=True)
        write_text(folder / name / f"{tokens}.json", plan_to_json(plan))
        plans.append(plan)
    return plans[0], plans[1]


def _variant(choice: Choice) -> str:
    strategy, degree = choice
    return f"reused:{strategy}:{degree}"


def _cell(
    grid: Grid,
    profile: Profile,
    rate_mbit: float | None,
    tokens: int,
    plans: tuple[Plan, Plan],
    lines: Mapping[tuple[int, str], Line],
) -> StrategyCell:
    costs = layer_costs(workload=grid.workload(tokens), costs=costs_of(profile))
    mine = {variant: line for (count, variant), line in lines.items() if count == tokens}
    steps = _Steps(grid=grid, tokens=tokens, costs=costs, lines=mine)
    paper = {one: paper_seconds(costs=costs, strategy=one, tokens=tokens) for one in REUSE}
    has_peer = "deepspeed" in mine
    return StrategyCell(
        model=grid.model,
        rate_mbit=rate_mbit,
        tokens=tokens,
        limit_bytes=grid.needed_bytes(tokens, ("S4", grid.limit_degree)),
        free=steps.planned("planned", plans[0]),
        limited=steps.planned("limited", plans[1]),
        steps=tuple(map(steps.step, grid.choices)),
        peer_seconds=steps.seconds("deepspeed") if has_peer else 0.0,
        peer_bytes=steps.peak_bytes("deepspeed") if has_peer else 0,
        paper_choice=min(paper, key=lambda one: paper[one]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The steps of one cell: measured, by variant, and predicted."""

    grid: Grid
    tokens: int
    costs: LayerCosts
    lines: Mapping[str, Line]

    def step(self, choice: Choice) -> Step:
        """Return one choice."""
        strategy, degree = choice
        time = step_time(
            costs=self.costs, tokens=self.tokens, forward_degree=degree, backward_degree=degree,
            strategy=strategy,
        )  # fmt: skip
        host_bytes = peak_bytes(
            workload=self.grid.workload(self.tokens), forward_degree=degree,
            backward_degree=degree, strategy=strategy,
        ).host_bytes  # fmt: skip
        return Step(
            strategy=strategy,
            degree=degree,
            predicted_seconds=time.seconds,
            seconds=self.seconds(_variant(choice)),
            needed_bytes=self.grid.needed_bytes(self.tokens, choice),
            peak_bytes=self.peak_bytes(_variant(choice), host_bytes=host_bytes),
        )

    def planned(self, variant: str, plan: Plan) -> Planned:
        """Return what the variant's plan chose."""
        return Planned(
            strategy=plan.memory.strategy,
            forward_degree=plan.pipeline.forward_degree,
            backward_degree=plan.pipeline.backward_degree,
            predicted_seconds=plan.predicted.step_seconds,
            seconds=self.seconds(variant),
        )

    def seconds(self, variant: str) -> float:
        """Return the median over the rounds."""
        return statistics.median(self.lines[variant].seconds)

    def peak_bytes(self, variant: str, *, host_bytes: int = 0) -> int:
        """Return the live tensors but those on the host, with Adam's states; 0 unmeasured."""
        live = self.lines[variant].peak_bytes
        adam_bytes = _ADAM_BYTES * _num_parameters(self.grid.workload(self.tokens))
        return live + adam_bytes - host_bytes if live else 0


def _num_parameters(workload: Workload) -> int:
    layer = workload.layer
    one = layer.num_gemms * layer.d_model * layer.d_hidden + layer.d_model + layer.d_hidden
    return one * workload.local_experts + layer.d_model * layer.num_experts
