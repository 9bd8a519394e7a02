"""The operations of an MoE layer on one rank, each priced alone: GEMMs, rows, collectives.

T tokens per rank, k experts per token, M d_model, H d_hidden, E experts, r chunks.
`solve.layer.costs` makes chunks and phases of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from moetune.domain.arrays import array_of, longer
from moetune.domain.cost_keys import CollectiveKey, GemmKey, RowsKey
from moetune.domain.costs import Costs, Estimate, seconds_if_known
from moetune.domain.gemm_forms import GemmForm, uneven_form
from moetune.domain.layer import PHASES, ExpertParallel, LayerKey, LayerShape, Phase
from moetune.domain.samples import HOST_CHUNKS, LAUNCHES, CollectiveOp
from moetune.solve.layer.totals import total
from moetune.solve.layer.uneven import unevenness

COUNT_BYTES = 8
"""Of a number of tokens, which ranks exchange as int64."""
PHASE_GEMMS: Mapping[Phase, tuple[GemmForm, ...]] = MappingProxyType(
    {"forward": ("forward",), "backward": ("grad_input", "grad_weight")}
)
"""The forms of GEMM that each phase computes for each weight."""
ROW_MOVES = ("gather", "scatter_add")
"""Outside the pipeline: rows are brought into the order of experts, and back."""
NOTHING = Estimate(seconds=0.0, trust="measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperations:
    """A layer on so many ranks, and what its operations take there.

    Args:
        world_size: P, the ranks that share the experts.
        num_nodes: that the ranks are spread over evenly; 0 for consecutive ranks.
        chunk_parts: pieces of a forward and of a backward chunk, as `LayerCosts.in_chunks` counts
            them.
        expert_shares: of the fullest rank's rows, of each of its experts; empty for even ones.
    """

    layer: LayerShape
    world_size: int
    dtype: str
    costs: Costs
    num_nodes: int = 0
    chunk_parts: tuple[float, float] = (1.0, 1.0)
    expert_shares: tuple[float, ...] = ()

    @property
    def local_experts(self) -> int:
        """Experts of a rank."""
        return self.layer.num_experts // self.world_size

    def key_of(self, kind: ExpertParallel, *, sequence_parallel: bool = False) -> LayerKey:
        """Return the key where the ranks share the experts in that way."""
        return LayerKey(
            layer=self.layer,
            num_ranks=self.world_size,
            dtype=self.dtype,
            expert_parallel=kind,
            sequence_parallel=sequence_parallel,
        )

    def gate(self, phase: Phase, *, tokens: float) -> Estimate:
        """Return scores, softmax and choice of the experts; 0 where not measured."""
        experts = self.layer.num_experts
        choice = self.rows_op("gate", tokens, experts)
        if choice is None:
            return NOTHING
        if phase == "backward":
            choice = self.rows_op("gate_backward", tokens, experts)
        gemms = (
            self.costs.seconds(GemmKey(self.dtype, product, 1, self.layer.d_model, experts), tokens)
            for product in PHASE_GEMMS[phase]
        )
        return total(choice, *gemms)

    def gemm(
        self, product: GemmForm, *, rows: float, is_second: bool = False, parts: float = 1.0
    ) -> Estimate:
        """Return one GEMM of all local experts, `rows` rows in all.

        Args:
            is_second: with W₂ instead of W₁ (or, for swiglu, W₃).
            parts: into which the rows are cut, each with a GEMM of its own.

        Raises:
            ProfileError: nothing is known about the dtype.
        """
        each = rows / self.local_experts / parts
        found = self._gemm_of(product, rows=each, is_second=is_second)
        if len(self.expert_shares) > 1:
            share = unevenness(product, self.expert_shares, rows=each * self.local_experts)
            uneven = self._gemm_of(uneven_form(product), rows=each, is_second=is_second)
            found = total(found.scaled(1 - share), uneven.scaled(share))
        return found if parts == 1 else found.scaled(parts)

    def _gemm_of(self, form: GemmForm, *, rows: float, is_second: bool) -> Estimate:
        """Return the GEMM of all local experts in an even or an uneven form.

        Args:
            rows: of one expert, on average.
        """
        sizes = self.layer.d_model, self.layer.d_hidden
        d_in, d_out = sizes[::-1] if is_second else sizes
        return self.costs.seconds(GemmKey(self.dtype, form, self.local_experts, d_in, d_out), rows)

    def gemms(self, phase: Phase, rows: float) -> Iterator[Estimate]:
        """Yield all GEMMs of the local experts; backward two for each of the forward pass."""
        for product in PHASE_GEMMS[phase]:
            yield from self.products(product, rows, parts=self.parts(phase))

    def products(self, product: GemmForm, rows: float, *, parts: float = 1.0) -> Iterator[Estimate]:
        """Yield the GEMMs of one form, with each of an expert's matrices."""
        yield from (self.gemm(product, rows=rows, parts=parts),) * (self.layer.num_gemms - 1)
        yield self.gemm(product, rows=rows, is_second=True, parts=parts)

    def parts(self, phase: Phase) -> float:
        """Return into how many pieces the GEMMs of a phase's chunk are cut."""
        return self.chunk_parts[PHASES.index(phase)]

    def activation(self, phase: Phase, rows: float) -> Estimate:
        """Return the activation; backward it is evaluated again, and then its gradient."""
        name, width = self.layer.activation, self.layer.d_hidden
        backward = self.rows_op(f"{name}_backward", rows, width) if phase == "backward" else None
        return total(self.rows_op(name, rows, width), backward)

    def rows_op(self, op: str, rows: float, width: int) -> Estimate | None:
        """Return a memory-bound operation; None where it was not measured."""
        return seconds_if_known(self.costs, RowsKey(op, self.dtype), rows * width)

    def launches(self, phase: Phase) -> tuple[Estimate, Estimate] | None:
        """Return the host's time for what a phase launches once, and for each chunk.

        Returns:
            None where it was not measured: on a CPU it is part of the operations' own times.
        """
        few, many = (self._launched(phase, chunks) for chunks in HOST_CHUNKS)
        if few is None or many is None:
            return None
        each = (many.seconds - few.seconds) / (HOST_CHUNKS[1] - HOST_CHUNKS[0])
        once = longer(few.seconds - each * HOST_CHUNKS[0], 0.0)
        return few._replace(seconds=once), few._replace(seconds=each)

    def _launched(self, phase: Phase, chunks: int) -> Estimate | None:
        forward, step = (self.rows_op(op, chunks, 1) for op in LAUNCHES)
        if forward is None or step is None:
            return None
        backward = longer(step.seconds - forward.seconds, 0.0)
        return forward if phase == "forward" else step._replace(seconds=backward)

    def collective(self, op: CollectiveOp, num_bytes: float, *, in_flight: int = 1) -> Estimate:
        """Return one collective of the ranks; 0 on one rank.

        Args:
            num_bytes: or an array of them.

        Raises:
            ProfileError: such a group was not measured.
        """
        if self.world_size == 1:
            return NOTHING
        key = CollectiveKey(op, self.world_size, self.num_nodes, in_flight)
        return self.costs.seconds(key, num_bytes)

    def collectives(self, op: CollectiveOp, num_bytes: float, in_flight: float) -> Estimate:
        """Return `collective` of an array of sizes, each with its own number in flight."""
        sizes, numbers = np.broadcast_arrays(num_bytes, in_flight)
        seconds = np.empty(sizes.shape)
        for number in set(numbers.ravel().tolist()):
            same = numbers == number
            found = self.collective(op, array_of(sizes[same]), in_flight=number)
            seconds[same] = found.seconds
        return Estimate(seconds=array_of(seconds), trust="measured")
