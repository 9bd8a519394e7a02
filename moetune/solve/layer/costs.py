"""Costs of one chunk of an MoE layer, for both ways in which ranks share the experts.

all to all        tokens travel to the experts and back: two collectives a chunk
tensor parallel   every rank has all tokens, and the outputs are all-reduced (PPMoE §3.3, Eq. 5)

T tokens per rank, k experts per token, M d_model, H d_hidden, E experts, r chunks. A chunk has
T·k/r rows on each rank. This is a real number, because costs are interpolated. If several of a
token's experts are on a rank, a single row travels: `Workload.sent_share` of all pairs. The solver
reads `LayerCosts`, which are built on the single `operations`.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from moetune.domain.arrays import Floats, Sizes
from moetune.domain.costs import Costs
from moetune.domain.interference import OverlapSpeeds, SpeedTable
from moetune.domain.layer import PHASES, Phase, Workload
from moetune.domain.once import once
from moetune.domain.samples import ALONE_CHUNKS
from moetune.domain.step_errors import StepErrors
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.operations import (
    COUNT_BYTES,
    NOTHING,
    PHASE_GEMMS,
    ROW_MOVES,
    LayerOperations,
    Price,
    at_least,
    total,
)


def key_of(numbers: Sizes) -> Hashable:
    """Return a hashable key for a number or an array."""
    numbers = np.asarray(numbers, float)
    return numbers.shape, numbers.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts(LayerOperations, ABC):
    """The costs of one layer on a number of ranks, for any number of tokens.

    Times are arrays, in seconds; `rows` of a chunk on a rank and `degree` are numbers or arrays.
    Chunks are priced once, because strategies, phases and ranges ask for the same chunks.

    Args:
        errors: of whole steps, if they differ from those of the costs.
        skew: rows of the fullest rank over the mean; the other ranks wait for it.
        sent_share: rows that travel, over the (token, expert) pairs.
    """

    errors: StepErrors | None = None
    skew: float = 1.0
    sent_share: float = 1.0

    @property
    def is_tensor(self) -> bool:
        """Whether a tensor-parallel group shares the experts, so that no tokens travel."""
        return self.key.expert_parallel == "tensor"

    @property
    def num_transfers(self) -> int:
        """Collectives of one chunk in one phase: dispatch and combine, or one all-reduce."""
        return 1 if self.is_tensor else 2

    @property
    def bytes_per_row(self) -> float:
        """Input bytes of a collective for each row: M values, or 1/k of a token's M values."""
        return (
            self.row_bytes / self.layer.top_k
            if self.is_tensor
            else self.row_bytes * self.sent_share
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's M values."""
        return self.layer.d_model * dtype_bytes(self.dtype)

    @property
    def sorts_rows(self) -> bool:
        """Whether rows arrive ordered by sender, and are sorted by expert and back."""
        return not self.is_tensor and self.world_size > 1 and self.local_experts > 1

    def rows(self, tokens: Sizes, *, degree: Sizes = 1) -> Floats:
        """Return the rows of a chunk on the fullest rank, with `tokens` on each rank."""
        return np.asarray(tokens, float) * self.layer.top_k * self.skew / degree

    @abstractmethod
    def transfer(self, *, rows: Sizes, degree: Sizes) -> Price:
        """Return the time of one of a chunk's collectives; 0 on a single rank."""

    @once(lambda *, phase, rows: (phase, key_of(rows)))
    def compute(self, *, phase: Phase, rows: Sizes) -> Price:
        """Return the time of a chunk's experts: GEMMs, activation, rows; at least the launches."""
        before, behind = self.operations(phase, rows)
        _, launches = self._least(phase)
        return at_least(total(*before, *behind), launches)

    @once(lambda phase: phase)
    def _least(self, phase: Phase) -> tuple[Price | None, Price | None]:
        return self.launches(phase) or (None, None)

    def moves(self, tokens: float) -> tuple[Price | None, ...]:
        """Return permute and unpermute outside the pipeline; none in tensor parallelism."""
        if self.is_tensor:
            return ()
        rows = tokens * self.layer.top_k * self.sent_share
        return tuple(self.rows_op(op, rows, self.layer.d_model) for op in ROW_MOVES)

    @abstractmethod
    def small_collectives(self, phase: Phase, *, tokens: float) -> Price:
        """Return a gate's small collectives, of token counts or of routing weights' gradients."""

    def phase_overhead(self, phase: Phase, *, tokens: float) -> Price:
        """Return a phase's time outside its pipeline, without launches; 0 for unmeasured parts."""
        gate = self.gate(phase, tokens=tokens)
        small = NOTHING if gate is NOTHING else self.small_collectives(phase, tokens=tokens)
        return total(gate, *self.moves(tokens), small)

    def step_errors(self, *, tokens: int) -> StepErrors:
        """Return the errors of whole steps against the sum of their operations."""
        return self.errors or self.costs.step_errors(self.key, tokens=tokens)

    def step_factor(self, *, rows: Sizes, degree: Sizes) -> Floats:
        """Return the factor on the operations of a phase's chunks within a step."""
        sizes = np.rint(rows * degree / self.rows(1)).astype(int)
        if not sizes.ndim:
            return self.step_errors(tokens=int(sizes)).factor(degree)
        degrees, factors = np.broadcast_to(degree, sizes.shape), np.empty(sizes.shape)
        for tokens in set(sizes.tolist()):
            of_step = sizes == tokens
            factors[of_step] = self.step_errors(tokens=tokens).factor(degrees[of_step])
        return factors

    def speeds(self, *, rows: Sizes, degree: Sizes) -> SpeedTable:
        """Return the speeds of the resource classes in a phase of such chunks."""
        seconds = self.transfer(rows=rows, degree=degree).seconds
        comp, comm = self.overlap_speeds(rows=rows, transfer_seconds=seconds)
        return {**self.costs.speeds, ("comp", "comm"): comp, ("comm", "comp"): comm}

    @once(lambda *, rows, transfer_seconds: (key_of(rows), key_of(transfer_seconds)))
    def overlap_speeds(self, *, rows: Sizes, transfer_seconds: Floats) -> OverlapSpeeds:
        """Return the speeds of experts and collectives of such chunks during overlap."""
        return self.costs.overlap_speeds(
            exchange_bytes=rows * self.bytes_per_row, exchange_seconds=transfer_seconds
        )

    @once(lambda *, tokens: tokens)
    def overhead(self, *, tokens: float) -> Price:
        """Return the time outside both pipelines: gate, permutation and small collectives."""
        phases = (
            at_least(self.phase_overhead(phase, tokens=tokens), self._least(phase)[0])
            for phase in PHASES
        )
        return total(*phases)

    @once(lambda phase, rows, *, recompute: (phase, key_of(rows), recompute))
    def halves(self, phase: Phase, rows: Sizes, *, recompute: bool) -> tuple[Price, Price]:
        """Return the experts' work up to the last use of T_M, and the work after it.

        T_M holds the rows before the second product. Between the halves, strategies that reuse
        memory load or free it. Both halves together take at least the host's launch time.

        Args:
            recompute: whether the backward pass computes T_M again, as part of the first half.
        """
        before, behind = (
            total(*parts) for parts in self.operations(phase, rows, recompute=recompute)
        )
        _, launches = self._least(phase)
        if launches is None:
            return before, behind
        left = launches._replace(seconds=launches.seconds - before.seconds)
        return before, at_least(behind, left)

    def operations(
        self, phase: Phase, rows: Sizes, *, recompute: bool = False
    ) -> tuple[list[Price | None], list[Price | None]]:
        """Return the operations of both `halves`, without the host's launches.

        Forward, the GEMMs with W₁ (and W₃) and the activation come first, the GEMM with W₂ second.
        Backward, the GEMMs with W₂, the activation again and its gradient come first, because the
        layer saves pre-activations.
        """
        forms, sorting = PHASE_GEMMS[phase], self.sorting(rows)
        first = self.gemms(rows, *forms)
        second = self.gemms(rows, *forms, is_second=True)
        if phase == "backward":
            first, second = second, first
        again = recompute and phase == "backward"
        recomputed = self.gemms(rows, "forward") if again else []
        activation = self.activation(phase, rows)
        return [sorting, *recomputed, *first, activation], [*second, sorting]

    def sorting(self, rows: Sizes) -> Price:
        """Return the time to sort a chunk's rows by expert; the way back takes the same time."""
        if not self.sorts_rows:
            return NOTHING
        return total(self.rows_op("gather", rows, self.layer.d_model))


_WEIGHT_BYTES = 4
"""Least bytes of a routing weight, which is in float32 or wider."""


def layer_costs(*, workload: Workload, costs: Costs) -> LayerCosts:
    """Return the costs of the workload's layer on consecutive ranks."""
    is_tensor = workload.expert_parallel == "tensor"
    kind: type[LayerCosts] = TensorParallelCosts if is_tensor else AllToAllCosts
    errors = costs.step_errors(workload.key, tokens=workload.tokens_per_rank)
    return kind(
        key=workload.key, costs=costs, skew=workload.skew.mean, sent_share=workload.sent_share,
        expert_shares=workload.skew.shares, kernel=workload.kernel,
        gemm_factor=errors.gemm_factor, gap_seconds=errors.gap_seconds,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllCosts(LayerCosts):
    """Costs for tokens that travel to the experts: dispatch and combine are all-to-alls."""

    @once(lambda *, rows, degree: (key_of(rows), key_of(degree)))
    def transfer(self, *, rows: Sizes, degree: Sizes) -> Price:
        """Return the time of one chunk's dispatch; its combine takes the same time.

        A phase's chunks are in flight together. A collective in a queue of several takes a
        different time than a collective alone; the profile has both.
        """
        in_flight = np.where(degree <= ALONE_CHUNKS, 1.0, degree)
        return self.collectives("all_to_all", rows * self.bytes_per_row, in_flight)

    def small_collectives(self, phase: Phase, *, tokens: float) -> Price:  # noqa: ARG002
        """Return two small exchanges of token counts in the forward phase, nothing backward."""
        if phase == "backward":
            return NOTHING
        exchange = self.collective("all_to_all", self.layer.num_experts * COUNT_BYTES)
        return total(exchange, exchange)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelCosts(LayerCosts):
    """Costs inside a tensor-parallel group of P ranks: one all-reduce a chunk (PPMoE Eq. 5).

    A chunk of T/r tokens has T·k/r pairs, its `rows`; the experts of one rank compute 1/P of them.
    A chunk's all-reduce starts when its experts end, so it is mostly alone on the link. The gate's
    gradient needs another small all-reduce, of the gradients of T·k routing weights.
    """

    @once(lambda *, rows, degree: key_of(rows))  # noqa: ARG005 - see the class
    def transfer(self, *, rows: Sizes, degree: Sizes) -> Price:  # noqa: ARG002
        """Return the time of one chunk's all-reduce."""
        return self.collective("all_reduce", rows * self.bytes_per_row)

    def operations(
        self, phase: Phase, rows: Sizes, *, recompute: bool = False
    ) -> tuple[list[Price | None], list[Price | None]]:
        """Return the operations with gathers of rows (backward also of x) and the scatter-add."""
        mine = rows / self.world_size
        gather = self.rows_op("gather", mine, self.layer.d_model)
        add = self.rows_op("scatter_add", mine, self.layer.d_model)
        again = gather if phase == "backward" else None
        before, behind = LayerCosts.operations(self, phase, mine, recompute=recompute)
        return before, [*behind, gather, again, add]

    def small_collectives(self, phase: Phase, *, tokens: float) -> Price:
        """Return an all-reduce: of the token count, or backward of routing weights' gradients."""
        width = max(dtype_bytes(self.dtype), _WEIGHT_BYTES)
        small = COUNT_BYTES if phase == "forward" else tokens * self.layer.top_k * width
        return self.collective("all_reduce", small)
