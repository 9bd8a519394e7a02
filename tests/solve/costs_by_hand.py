"""Costs whose every number a test can work out by hand, and a simulation that shares no code."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from moetune.domain.constraints import Bounds
from moetune.domain.costs import (
    NO_BURST,
    Burst,
    CopyMode,
    Costs,
    Doubt,
    Estimate,
    LinearCost,
    Trust,
)
from moetune.domain.errors import ProfileError
from moetune.domain.gemm_forms import GemmForm
from moetune.domain.interference import Interference, OverlapSpeeds
from moetune.domain.layer import LayerKey, LayerShape, Workload
from moetune.domain.request import PlanInputs
from moetune.domain.samples import CollectiveOp, Direction
from moetune.domain.step_errors import NO_STEP_ERRORS, StepErrors
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.times import StepTime

GEMM = LinearCost(alpha_seconds=5e-5, beta_seconds=4e-14)
ALL_TO_ALL = LinearCost(alpha_seconds=2e-4, beta_seconds=3e-10)
ALL_REDUCE = LinearCost(alpha_seconds=1e-4, beta_seconds=5e-10)


def best_moe_step(*, workload: Workload, costs: Costs, bounds: Bounds) -> StepTime:
    """Return the layer's fastest step within the bounds, with strategy "none"."""
    layer = layer_costs(workload=workload, costs=costs)
    tokens = workload.tokens_per_rank
    forward, backward = DegreeChooser(costs=layer, bounds=bounds).best(tokens)
    return StepTime(forward=forward, backward=backward, overhead=layer.overhead(tokens=tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCosts:
    """Lines for GEMMs, all-to-alls and all-reduces, and seconds per element for the rest.

    Args:
        alone_factor: of a transfer that is alone in flight.
        power: of the bytes; 1 for a line.
        is_measured: hide the lines, as a profile with samples does.
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
    is_measured: bool = False
    group_size: int | None = None
    copy_cost: LinearCost | None = None
    copy_mode: CopyMode | None = None
    doubts: tuple[Doubt, ...] = ()
    errors: StepErrors = NO_STEP_ERRORS
    pause_gain_seconds: float = 0.0
    pause_gain_share: float = NO_BURST.share

    def overlap_speeds(self, *, exchange_bytes: float, exchange_seconds: float) -> OverlapSpeeds:
        assert exchange_bytes >= 0
        assert exchange_seconds >= 0
        return OverlapSpeeds(comp=self.interference.comp.comm, comm=self.interference.comm.comp)

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:  # noqa: ARG002 - of all
        """Return the same for every layer."""
        return self.errors

    @property
    def as_measured(self) -> Self:
        return self

    def burst(self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0) -> Burst:
        assert op
        assert group_size
        assert num_nodes >= 0
        return Burst(seconds=self.pause_gain_seconds, share=self.pause_gain_share)

    def gemm_line(self, *, dtype: str) -> LinearCost | None:
        assert dtype
        return None if self.is_measured else self.gemm_cost

    def collective_line(
        self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0
    ) -> LinearCost | None:
        assert group_size
        assert num_nodes >= 0
        return None if self.is_measured else self._line(op)

    def _line(self, op: CollectiveOp) -> LinearCost:
        return self.sum_cost if op == "all_reduce" else self.transfer_cost

    def gemm(
        self, *, dtype: str, product: GemmForm, num_experts: int, rows: float, d_in: int, d_out: int
    ) -> Estimate:
        assert dtype
        assert product
        seconds = self.gemm_cost.seconds(num_experts * rows * d_in * d_out)
        return Estimate(seconds=seconds, trust="measured")

    def rows_op(self, *, op: str, dtype: str, rows: float, width: int) -> Estimate | None:
        assert dtype
        if op not in self.rows_seconds:
            return None
        return Estimate(seconds=self.rows_seconds[op] * rows * width, trust="measured")

    def attention(
        self, *, dtype: str, num_sequences: float, length: int, num_heads: int, head_dim: int,
        backward: bool,
    ) -> Estimate | None:  # fmt: skip
        assert dtype
        if "attention" not in self.rows_seconds:
            return None
        elements = num_sequences * length * length * num_heads * head_dim
        factor = 2 if backward else 1
        return Estimate(
            seconds=factor * elements * self.rows_seconds["attention"], trust="measured"
        )

    def collective(
        self,
        *,
        op: CollectiveOp,
        group_size: int,
        num_bytes: float,
        in_flight: int = 1,
        num_nodes: int = 0,
    ) -> Estimate:
        assert num_nodes >= 0
        if self.group_size not in (None, group_size):
            raise ProfileError(f"no {op} measured for {group_size} ranks")
        factor = self.alone_factor if in_flight == 1 else 1.0
        seconds = factor * self._line(op).seconds(num_bytes**self.power)
        return Estimate(seconds=seconds, trust=self.trust, doubts=self.doubts)

    def copy(self, *, direction: Direction, pinned: bool, num_bytes: float) -> Estimate:
        assert self.copy_cost is not None, f"not measured: {direction}"
        assert pinned == (self.copy_mode != "pageable")
        return Estimate(seconds=self.copy_cost.seconds(num_bytes), trust="measured")


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
    left = {("D", i): one for i, one in enumerate(dispatch)}
    left |= {("C", i): one for i, one in enumerate(combine)}
    left |= {("E", i): one for i, one in enumerate(compute)}
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
