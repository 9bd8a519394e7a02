"""Costs whose every number a test can work out by hand, and a simulation that shares no code."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moetune.domain.arrays import Sizes
from moetune.domain.constraints import Bounds
from moetune.domain.cost_keys import AttentionKey, CollectiveKey, CopyKey, CostKey, GemmKey, RowsKey
from moetune.domain.costs import CopyMode, Costs, Doubt, Estimate, LinearCost, Number, Refit, Trust
from moetune.domain.errors import ProfileError
from moetune.domain.interference import Interference, OverlapSpeeds, SpeedTable
from moetune.domain.layer import LayerKey, LayerShape, Workload
from moetune.domain.plan import Plan
from moetune.domain.profile import Provenance
from moetune.domain.request import PlanInputs
from moetune.domain.samples import CollectiveOp
from moetune.domain.step_errors import NO_STEP_ERRORS, StepErrors
from moetune.fit.interference import speeds_of
from moetune.report.doubts import PROFILE
from moetune.report.reasons import in_words
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.plan import LayerProblem
from moetune.solve.layer.times import StepTime, step_time

GEMM = LinearCost(alpha_seconds=5e-5, beta_seconds=4e-14)
ALL_TO_ALL = LinearCost(alpha_seconds=2e-4, beta_seconds=3e-10)
ALL_REDUCE = LinearCost(alpha_seconds=1e-4, beta_seconds=5e-10)


def best_moe_step(*, workload: Workload, costs: Costs, bounds: Bounds) -> StepTime:
    """Return the layer's fastest step within the bounds, with strategy "none"."""
    layer = layer_costs(workload=workload, costs=costs)
    tokens = workload.tokens_per_rank
    degree = DegreeChooser(costs=layer, bounds=bounds).degree(tokens)
    assert degree is not None
    return step_time(costs=layer, tokens=tokens, degree=degree, order=bounds.chosen_order)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCosts:
    """Lines for GEMMs, all-to-alls and all-reduces, and seconds per element for the rest.

    Args:
        alone_factor: of a transfer that is alone in flight.
        power: of the bytes; 1 for a line.
        has_points: as a profile with samples has, instead of lines.
        copy_cost: of one copy over bytes, either way; None with no `copy_mode`.
        doubts: about every collective.
        errors: of whole steps; without any a step is the sum of its operations.
    """

    gemm_cost: LinearCost = GEMM
    transfer_cost: LinearCost = ALL_TO_ALL
    sum_cost: LinearCost = ALL_REDUCE
    interference: Interference = field(default_factory=Interference)
    rows_seconds: Mapping[str, float] = field(default_factory=dict)
    alone_factor: float = 1.0
    power: float = 1.0
    trust: Trust = "measured"
    has_points: bool = False
    group_size: int | None = None
    copy_cost: LinearCost | None = None
    copy_mode: CopyMode | None = None
    doubts: tuple[Doubt, ...] = ()
    errors: StepErrors = NO_STEP_ERRORS

    @property
    def speeds(self) -> SpeedTable:
        return speeds_of(self.interference)

    def overlap_speeds(self, *, exchange_bytes: Sizes, exchange_seconds: Sizes) -> OverlapSpeeds:
        assert np.all(np.asarray(exchange_bytes) >= 0)
        assert np.all(np.asarray(exchange_seconds) >= 0)
        return OverlapSpeeds(self.speeds["comp", "comm"], self.speeds["comm", "comp"])

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:  # noqa: ARG002 - of all
        """Return the same for every layer."""
        return self.errors

    def is_measured(self, dtype: str) -> bool:
        assert dtype
        return self.has_points

    def _line(self, op: CollectiveOp) -> LinearCost:
        return self.sum_cost if op == "all_reduce" else self.transfer_cost

    def knows(self, key: CostKey) -> bool:
        match key:
            case RowsKey():
                return key.op in self.rows_seconds
            case AttentionKey():
                return "attention" in self.rows_seconds
            case _:
                return True

    def seconds(self, key: CostKey, size: Number) -> Estimate[Number]:
        trust: Trust = "measured"
        doubts: tuple[Doubt, ...] = ()
        seconds = 0.0 * size
        match key:
            case GemmKey():
                seconds = self.gemm_cost.seconds(math.prod(key.shape) * size)
            case RowsKey():
                seconds = self.rows_seconds[key.op] * size
            case AttentionKey():
                elements = size * key.length**2 * key.num_heads * key.head_dim
                seconds = (1 + key.backward) * elements * self.rows_seconds["attention"]
            case CollectiveKey():
                if self.group_size not in (None, key.group_size):
                    raise ProfileError(f"no {key.op} measured for {key.group_size} ranks")
                factor = self.alone_factor if key.in_flight == 1 else 1.0
                seconds = factor * self._line(key.op).seconds(size**self.power)
                if not np.ndim(size):
                    trust, doubts = self.trust, self.doubts
            case CopyKey():
                assert self.copy_cost is not None, f"not measured: {key.direction}"
                assert key.pinned == (self.copy_mode != "pageable")
                seconds = self.copy_cost.seconds(size)
        return Estimate(seconds=seconds, trust=trust, doubts=doubts)

    def together(self, refits: Sequence[Refit]) -> Costs:
        """Return arrays of what each of the refits says."""
        return _Together(refits)


class _Together:
    """Several costs as one, each asked by itself."""

    def __init__(self, refits: Sequence[Costs]) -> None:
        self._refits = refits
        self.copy_mode = refits[0].copy_mode

    @property
    def speeds(self) -> SpeedTable:
        tables = [refit.speeds for refit in self._refits]
        return {pair: np.array([table[pair] for table in tables]) for pair in tables[0]}

    def overlap_speeds(self, *, exchange_bytes: Sizes, exchange_seconds: Sizes) -> OverlapSpeeds:
        seconds = np.broadcast_to(exchange_seconds, len(self._refits)).tolist()
        speeds = [
            refit.overlap_speeds(exchange_bytes=exchange_bytes, exchange_seconds=its)
            for refit, its in zip(self._refits, seconds, strict=True)
        ]
        return OverlapSpeeds(*map(np.array, zip(*speeds, strict=True)))

    def is_measured(self, dtype: str) -> bool:
        return self._refits[0].is_measured(dtype)

    def knows(self, key: CostKey) -> bool:
        return self._refits[0].knows(key)

    def seconds(self, key: CostKey, size: Number) -> Estimate[Number]:
        assert isinstance(size, np.ndarray), "several refits have no single time"
        times = [refit.seconds(key, size).seconds for refit in self._refits]
        return Estimate(seconds=np.array(times), trust="measured")

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:
        return self._refits[0].step_errors(key, tokens=tokens)


def plan_inputs(
    *,
    layer: LayerShape | None = None,
    world_size: int = 8,
    tokens_per_rank: int = 4096,
    dtype: str = "bfloat16",
    memory_limit_bytes: int | None = None,
    constraints: Mapping[str, str] | None = None,
) -> PlanInputs:
    """Return inputs of a middle-sized layer."""
    return PlanInputs(
        model=None,
        layer=layer or LayerShape(d_model=1024, d_hidden=4096, num_experts=16, top_k=2),
        world_size=world_size,
        tokens_per_rank=tokens_per_rank,
        dtype=dtype,
        memory_limit_bytes=memory_limit_bytes,
        profile="by-hand",
        profile_fingerprint="0123",
        constraints=constraints or {},
    )


def solution(
    inputs: PlanInputs | None = None,
    costs: Costs | None = None,
    bounds: Bounds | None = None,
    *,
    resamples: Sequence[Refit] = (),
    device_memory_bytes: int = 2**40,
    provenance: Provenance = "measured",
) -> Plan:
    """Return the plan of a layer: the middle-sized one, with lines for costs."""
    problem = LayerProblem(
        inputs=inputs or plan_inputs(), costs=costs or LinearCosts(), resamples=resamples,
        bounds=bounds or Bounds(), device_memory_bytes=device_memory_bytes, provenance=provenance,
        launch=PROFILE, kernels=None,
    )  # fmt: skip
    return in_words(problem.solved(problem.ranked()))


def event_by_event(
    *,
    dispatch: list[float],
    compute: list[float],
    combine: list[float],
    link_order: list[tuple[str, int]],
    comm_speed: float,
    comp_speed: float,
) -> float:
    """Return the makespan of one link and one device, written apart from `moetune.solve`."""
    link_at, device_at, now = 0, 0, 0.0
    dispatched: set[int] = set()
    computed: set[int] = set()
    left = {("D", i): seconds for i, seconds in enumerate(dispatch)}
    left |= {("C", i): seconds for i, seconds in enumerate(combine)}
    left |= {("E", i): seconds for i, seconds in enumerate(compute)}
    while link_at < len(link_order):
        kind, chunk = link_order[link_at]
        link_runs = kind == "D" or chunk in computed
        device_runs = device_at < len(compute) and device_at in dispatched
        link_speed = comm_speed if device_runs else 1.0
        device_speed = comp_speed if link_runs else 1.0
        to_link = left[kind, chunk] / link_speed if link_runs else float("inf")
        to_device = left["E", device_at] / device_speed if device_runs else float("inf")
        step = min(to_link, to_device)
        now += step
        if link_runs:
            left[kind, chunk] -= step * link_speed
        if device_runs:
            left["E", device_at] -= step * device_speed
        if device_runs and to_device == step:
            computed.add(device_at)
            device_at += 1
        if link_runs and to_link == step:
            if kind == "D":
                dispatched.add(chunk)
            link_at += 1
    return now


def link_order(num_chunks: int, order: str) -> list[tuple[str, int]]:
    """Return which chunk's dispatch (D) or combine (C) the link serves when."""
    if order == "dispatch_first":
        return [("D", i) for i in range(num_chunks)] + [("C", i) for i in range(num_chunks)]
    served = [("D", 0)]
    for i in range(1, num_chunks):
        served += [("D", i), ("C", i - 1)]
    return [*served, ("C", num_chunks - 1)]
