"""Costs of one chunk of an MoE layer, in the way its ranks share the experts.

all to all        tokens travel to the experts and back: two collectives a chunk
tensor parallel   every rank has all tokens, and the outputs are all-reduced (PPMoE §3.3, Eq. 5)

T tokens per rank, k experts per token, M d_model, H d_hidden, E experts, r chunks. A chunk has
T·k/r rows on each rank, a real number: costs are interpolated, and a chunk is a share of them. Of
several of a token's experts on a rank a single row travels, `Workload.sent_share` of all.
`LayerCosts` is what the solver reads, over the single `operations`.
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
    """Return the key of numbers in a table."""
    numbers = np.asarray(numbers, float)
    return numbers.shape, numbers.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts(LayerOperations, ABC):
    """The costs of one layer on so many ranks, whatever the number of tokens.

    Times are arrays, in seconds; `rows`, of a chunk on a rank, and `degree` are numbers or arrays.
    Chunks are computed once: strategies, phases and ranges ask for the same ones.

    Args:
        errors: of whole steps, where they are not those of the costs.
        skew: rows of the fullest rank over the mean; the others wait for it.
        sent_share: rows that travel, over the (token, expert) pairs.
    """

    errors: StepErrors | None = None
    skew: float = 1.0
    sent_share: float = 1.0

    @property
    def is_tensor(self) -> bool:
        """Whether a tensor-parallel group shares the experts, and no tokens travel to them."""
        return self.key.expert_parallel == "tensor"

    @property
    def num_transfers(self) -> int:
        """Collectives of one chunk in one phase: dispatch and combine, or a sum of outputs."""
        return 1 if self.is_tensor else 2

    @property
    def bytes_per_row(self) -> float:
        """Input bytes of a collective for a row of experts: M values, or 1/k of a token's."""
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
        """Whether rows of several experts arrive by sender, to be sorted by expert and back."""
        return not self.is_tensor and self.world_size > 1 and self.local_experts > 1

    def rows(self, tokens: Sizes, *, degree: Sizes = 1) -> Floats:
        """Return the rows of a chunk on the fullest rank, for so many tokens of each rank."""
        return np.asarray(tokens, float) * self.layer.top_k * self.skew / degree

    @abstractmethod
    def transfer(self, *, rows: Sizes, degree: Sizes) -> Price:
        """Return one of a chunk's collectives; 0 on one rank."""

    @once(lambda *, phase, rows: (phase, key_of(rows)))
    def compute(self, *, phase: Phase, rows: Sizes) -> Price:
        """Return a chunk's experts: GEMMs, activation and rows; at least the host's launches."""
        before, behind = self.operations(phase, rows)
        _, launches = self._least(phase)
        return at_least(total(*before, *behind), launches)

    @once(lambda phase: phase)
    def _least(self, phase: Phase) -> tuple[Price | None, Price | None]:
        return self.launches(phase) or (None, None)

    def moves(self, tokens: float) -> tuple[Price | None, ...]:
        """Return what orders rows outside the pipeline; in tensor parallelism chunks are."""
        if self.is_tensor:
            return ()
        rows = tokens * self.layer.top_k * self.sent_share
        return tuple(self.rows_op(op, rows, self.layer.d_model) for op in ROW_MOVES)

    @abstractmethod
    def small_collectives(self, phase: Phase, *, tokens: float) -> Price:
        """Return the collectives of a gate, which numbers of tokens or weights' gradients take."""

    def phase_overhead(self, phase: Phase, *, tokens: float) -> Price:
        """Return a phase's time outside its pipeline, but for launches; 0 where not measured."""
        gate = self.gate(phase, tokens=tokens)
        small = NOTHING if gate is NOTHING else self.small_collectives(phase, tokens=tokens)
        return total(gate, *self.moves(tokens), small)

    def step_errors(self, *, tokens: int) -> StepErrors:
        """Return by how much whole steps differ from the sum of their operations."""
        return self.errors or self.costs.step_errors(self.key, tokens=tokens)

    def step_factor(self, *, rows: Sizes, degree: Sizes) -> Floats:
        """Return what operations of a phase's chunk take within a step, over their own time."""
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
        """Return the speeds of the experts and of the collectives of such chunks, overlapped."""
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
        """Return the experts' work up to T_M's last use, and after it.

        Strategies that reuse memory load or free T_M, the rows before the second product, in
        between. Both together are at least the time in which the host launches them.

        Args:
            recompute: backward, T_M is computed again, and that comes before.
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
        """Return the operations of both `halves`, but for the host's launches.

        Forward the GEMMs with W₁ (and W₃) and the activation come before, that with W₂ after;
        backward the GEMMs with W₂ and the activation, evaluated again, with its gradient come
        before: the layer saves pre-activations.
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
        """Return the time to sort a chunk's rows by expert; sorting them back takes the same."""
        if not self.sorts_rows:
            return NOTHING
        return total(self.rows_op("gather", rows, self.layer.d_model))


_WEIGHT_BYTES = 4
"""A weight of the gate is no narrower than float32."""


def layer_costs(*, workload: Workload, costs: Costs) -> LayerCosts:
    """Return the costs of the workload's layer, whose ranks are consecutive."""
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
    """Costs where tokens travel to the experts: dispatch and combine are all-to-alls."""

    @once(lambda *, rows, degree: (key_of(rows), key_of(degree)))
    def transfer(self, *, rows: Sizes, degree: Sizes) -> Price:
        """Return one chunk's dispatch, which is also its combine.

        A phase's chunks are in flight together, and a collective in a queue of several is not
        as long as one alone: the profile has both.
        """
        in_flight = np.where(degree <= ALONE_CHUNKS, 1.0, degree)
        return self.collectives("all_to_all", rows * self.bytes_per_row, in_flight)

    def small_collectives(self, phase: Phase, *, tokens: float) -> Price:  # noqa: ARG002
        """Return two small exchanges of counts forward."""
        if phase == "backward":
            return NOTHING
        exchange = self.collective("all_to_all", self.layer.num_experts * COUNT_BYTES)
        return total(exchange, exchange)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelCosts(LayerCosts):
    """Costs inside a tensor-parallel group of P ranks: one all-reduce a chunk (PPMoE Eq. 5).

    A chunk of T/r tokens has T·k/r pairs, its `rows`; the experts of one rank compute 1/P of
    them. An all-reduce is issued when its chunk is computed, so that it mostly finds the link
    alone. The gate's gradient needs one small all-reduce more, of T·k weights' gradients.
    """

    @once(lambda *, rows, degree: key_of(rows))  # noqa: ARG005 - see the class
    def transfer(self, *, rows: Sizes, degree: Sizes) -> Price:  # noqa: ARG002
        """Return one chunk's all-reduce."""
        return self.collective("all_reduce", rows * self.bytes_per_row)

    def operations(
        self, phase: Phase, rows: Sizes, *, recompute: bool = False
    ) -> tuple[list[Price | None], list[Price | None]]:
        """Return also gathers of rows, backward of x's again, and the scatter-add of results."""
        mine = rows / self.world_size
        gather = self.rows_op("gather", mine, self.layer.d_model)
        add = self.rows_op("scatter_add", mine, self.layer.d_model)
        again = gather if phase == "backward" else None
        before, behind = LayerCosts.operations(self, phase, mine, recompute=recompute)
        return before, [*behind, gather, again, add]

    def small_collectives(self, phase: Phase, *, tokens: float) -> Price:
        """Return an all-reduce: of the token count, backward of weights' gradients."""
        width = max(dtype_bytes(self.dtype), _WEIGHT_BYTES)
        small = COUNT_BYTES if phase == "forward" else tokens * self.layer.top_k * width
        return self.collective("all_reduce", small)
