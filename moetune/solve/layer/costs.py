"""Costs of one chunk of an MoE layer: what every way to share its experts has in common.

T tokens per rank, k experts per token, M d_model, H d_hidden, E experts, r chunks. A chunk has
T·k/r rows on each rank, a real number: costs are interpolated, and a chunk is a share of them.

`LayerCosts` is the interface that the solver reads, with the experts' GEMMs and activation, the
gate, and collectives of the layer's ranks. `solve.layer.parallelism` has its implementations.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import Floats, array_of, floats_of, is_many
from moetune.domain.constraints import Dispatcher, Order
from moetune.domain.costs import (
    Costs,
    Estimate,
    Interference,
    LinearCost,
    OverlapSpeeds,
)
from moetune.domain.layer import PHASES, ExpertParallel, LayerKey, LayerShape, Phase
from moetune.domain.quantization import Quantization, measured_dtype
from moetune.domain.samples import CollectiveOp, GemmForm
from moetune.domain.step_errors import StepErrors
from moetune.solve.layer.timeline import Task
from moetune.solve.layer.totals import total

COUNT_BYTES = 8
"""Of a number of tokens, which ranks exchange as int64."""
PHASE_GEMMS: Mapping[Phase, tuple[GemmForm, ...]] = MappingProxyType(
    {"forward": ("forward",), "backward": ("grad_input", "grad_weight")}
)
"""The forms of GEMM that each phase computes for each weight."""
_PRODUCTS: tuple[GemmForm, GemmForm, GemmForm] = ("forward", "grad_input", "grad_weight")
NOTHING = Estimate(seconds=0.0, trust="measured")


_Key = float | bytes
Kept = TypeVar("Kept")


def _key(number: float) -> _Key:
    """Return the key of a number, or of the array in its place."""
    return floats_of(number).tobytes() if is_many(number) else number


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts(ABC):
    """The costs of one layer on so many ranks, whatever the number of tokens.

    Times are in seconds; `rows` are those of one chunk on one rank. Chunks are computed once:
    strategies, phases and ranges ask for the same ones.

    Args:
        world_size: P, the ranks that share the experts.
        num_nodes: that the ranks are spread over evenly; 0 for consecutive ranks.
        errors: of whole steps, where they are not those of the costs.
        dispatcher: of all-to-alls.
        quantization: of the experts' products and of the wire; None for neither.
        skew: rows of the fullest rank over the mean; the others wait for it.
        places: experts of a rank, replicas among them; 0 for an equal part of the experts.
        summed_experts: whose gradients a rank sends, and receives, for the sums over replicas.
        chunk_parts: pieces of a forward and of a backward chunk, as `in_chunks` counts them.
    """

    layer: LayerShape
    world_size: int
    dtype: str
    costs: Costs
    num_nodes: int = 0
    errors: StepErrors | None = None
    dispatcher: Dispatcher = "flat"
    quantization: Quantization | None = None
    skew: float = 1.0
    places: int = 0
    summed_experts: float = 0.0
    chunk_parts: tuple[float, float] = (1.0, 1.0)
    _transfers: dict[tuple[_Key, _Key], Estimate] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _computes: dict[tuple[Phase, _Key], Estimate] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _halves: dict[tuple[Phase, _Key, bool], tuple[Estimate, Estimate]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _speeds: dict[tuple[_Key, _Key], OverlapSpeeds] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _step_errors: dict[int, StepErrors] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _kept: dict[Hashable, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    @abstractmethod
    def num_transfers(self) -> int:
        """Collectives of one chunk in one phase."""

    @property
    @abstractmethod
    def bytes_per_row(self) -> float:
        """Input bytes of one collective for each row of the chunk."""

    @property
    @abstractmethod
    def sorts_rows(self) -> bool:
        """Whether rows arrive by sender and have to be sorted by expert, and back again."""

    def in_chunks(self, forward_degree: int, backward_degree: int) -> "LayerCosts":
        """Return the costs where the phases have so many chunks each.

        The layer orders rows by the pieces that the cuts of both phases make, f + b − gcd(f, b) of
        them, and by expert within a piece. Where the degrees differ, an expert's GEMM is one for
        each piece of a chunk. A rank's only expert has one GEMM a chunk, and lines know no sizes at
        which a GEMM is slower.
        """
        degrees = forward_degree, backward_degree
        is_line = self.costs.gemm_line(dtype=self.dtype) is not None
        pieces = sum(degrees) - math.gcd(*degrees)
        parts = pieces / forward_degree, pieces / backward_degree
        if self.local_experts == 1 or is_line:
            parts = 1.0, 1.0
        if parts == self.chunk_parts:
            return self
        return self.kept(("parts", parts), lambda: replace(self, chunk_parts=parts))

    def kept(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return what these costs had made for the key before, or make it now."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast("Kept", self._kept[key])

    def rows(self, tokens: float, *, degree: int = 1) -> float:
        """Return the rows of a chunk on the fullest rank, for so many tokens of each rank."""
        return tokens * self.layer.top_k * self.skew / degree

    def transfer(self, *, rows: float, degree: int) -> Estimate:
        """Return one of a chunk's collectives; 0 on one rank.

        Args:
            rows: or an array of them.
            degree: of the phase, or an array of theirs.
        """
        key = _key(rows), _key(degree)
        found = self._transfers.get(key)
        if found is None:
            found = self._transfers[key] = self._transfer(rows, degree)
        return found

    def compute(self, *, phase: Phase, rows: float) -> Estimate:
        """Return one chunk's experts: GEMMs, activation, and the movement of their rows.

        Args:
            rows: or an array of them.
        """
        key = phase, _key(rows)
        found = self._computes.get(key)
        if found is None:
            found = self._computes[key] = self._compute(phase, rows)
        return found

    @abstractmethod
    def _transfer(self, rows: float, degree: int) -> Estimate:
        """Compute `transfer`."""

    @abstractmethod
    def _compute(self, phase: Phase, rows: float) -> Estimate:
        """Compute `compute`."""

    @abstractmethod
    def gathering(self, *, tokens: float) -> Estimate:
        """Return the all-gather of tokens before a phase's first chunk; 0 without shards."""

    @abstractmethod
    def phase_overhead(self, phase: Phase, *, tokens: float) -> Estimate:
        """Return a phase's time outside its pipeline, as `overhead`; 0 where not measured."""

    def replica_sums(self) -> Estimate:
        """Return the sums of replicas' gradients behind a backward phase; 0 without replicas."""
        return NOTHING

    @abstractmethod
    def makespan(
        self, *, degree: int, rows: float, transfer_seconds: float, compute_seconds: float,
        order: Order,
    ) -> float:  # fmt: skip
        """Return the time of a phase in `degree` chunks of so many rows, in closed form.

        Args:
            transfer_seconds: one collective of one chunk, undisturbed.
            compute_seconds: one chunk's experts, undisturbed.
        """

    @abstractmethod
    def tasks(
        self,
        *,
        transfer_seconds: Sequence[float],
        compute_seconds: Sequence[float],
        gather_seconds: float,
        order: Order,
    ) -> list[Task]:
        """Return the simulator's tasks of a phase, which `makespan` solves in closed form.

        Args:
            transfer_seconds, compute_seconds: one entry for each chunk.
        """

    @abstractmethod
    def lines(self, phase: Phase) -> tuple[LinearCost, LinearCost] | None:
        """Return the α–β lines of a chunk's collective and of its experts.

        Returns:
            (collective over bytes, all GEMMs over the MACs of one); None where a chunk has more
            operations than these, or they were measured as curves.
        """

    @abstractmethod
    def best_degree(
        self, lines: tuple[LinearCost, LinearCost], *, rows: float, max_degree: int
    ) -> int:
        """Return the closed form's degree for a phase.

        Args:
            lines: of that phase.
            rows: of the whole phase on one rank.
        """

    @property
    @abstractmethod
    def key(self) -> LayerKey:
        """The layers that these costs are of."""

    def step_errors(self, *, tokens: int) -> StepErrors:
        """Return by how much whole steps differ from the sum of their operations."""
        found = self._step_errors.get(tokens)
        if found is None:
            found = self.errors or self.costs.step_errors(self.key, tokens=tokens)
            self._step_errors[tokens] = found
        return found

    def in_step(self, estimate: Estimate, *, rows: float, degree: int) -> Estimate:
        """Return the time that an operation of a phase's chunk takes within a whole step.

        Args:
            estimate: of the operation by itself.
            degree: of the phase.
        """
        return estimate.scaled(self.step_factor(rows=rows, degree=degree))

    def step_factor(self, *, rows: float, degree: int) -> float:
        """Return what operations of a phase's chunk take within a step, over their own time.

        Args:
            rows, degree: or arrays of them.
        """
        if is_many(rows):
            whole = np.rint(floats_of(rows * degree) / self.rows(1)).astype(int)
            sizes, at = np.unique(whole, return_inverse=True)
            degrees, of_degree = np.unique(degree, return_inverse=True)
            factors = self.step_factors(sizes.tolist(), degrees.tolist())
            return array_of(factors[at, of_degree])
        tokens = round(rows * degree / self.rows(1))
        return self.step_errors(tokens=tokens).factor(degree)

    def step_factors(self, tokens: Sequence[int], degrees: Sequence[int]) -> Floats:
        """Return what operations take within steps, over their own time.

        Args:
            tokens: of each step; the errors of all of them have as many octaves.

        Returns:
            Shape (tokens, degrees).
        """
        errors = [self.step_errors(tokens=one) for one in tokens]
        means = np.array([one.mean for one in errors])
        low, high, share = np.array([errors[0].place(degree) for degree in degrees]).T
        low, high = low.astype(int), high.astype(int)
        factors: Floats = np.exp((1 - share) * means[:, low] + share * means[:, high])
        return factors

    def interference(self, *, rows: float, degree: int) -> Interference:
        """Return how the resource classes disturb each other in a phase of such chunks."""
        seconds = self.transfer(rows=rows, degree=degree).seconds
        return self.costs.interference.overlapped(self.speeds(rows=rows, transfer_seconds=seconds))

    def speeds(self, *, rows: float, transfer_seconds: float) -> OverlapSpeeds:
        """Return the speeds of the experts and of the collectives of such chunks, overlapped."""
        key = _key(rows), _key(transfer_seconds)
        found = self._speeds.get(key)
        if found is None:
            found = self._speeds[key] = self.costs.overlap_speeds(
                exchange_bytes=rows * self.bytes_per_row, exchange_seconds=transfer_seconds
            )
        return found

    def overhead(self, *, tokens: float) -> Estimate:
        """Return the time outside both pipelines: gate, permutation and small collectives."""
        return total(*(self.phase_overhead(phase, tokens=tokens) for phase in PHASES))

    @property
    def local_experts(self) -> int:
        """Experts of a rank."""
        return self.places or self.layer.num_experts // self.world_size

    @property
    def macs_per_row(self) -> int:
        """Multiply-accumulates of one row in one GEMM: M·H."""
        return self.layer.d_model * self.layer.d_hidden

    def key_of(self, kind: ExpertParallel, *, sequence_parallel: bool = False) -> LayerKey:
        """Return the key where the ranks share the experts in that way."""
        return LayerKey(
            layer=self.layer,
            num_ranks=self.world_size,
            dtype=self.dtype,
            expert_parallel=kind,
            sequence_parallel=sequence_parallel,
            quantization=str(self.quantization or ""),
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
            self.costs.gemm(
                dtype=self.dtype,
                product=product,
                num_experts=1,
                rows=tokens,
                d_in=self.layer.d_model,
                d_out=experts,
            )
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
        sizes = self.layer.d_model, self.layer.d_hidden
        d_in, d_out = sizes[::-1] if is_second else sizes
        local_experts = self.local_experts
        found = self.costs.gemm(
            dtype=self.product_dtype(product),
            product=product,
            num_experts=local_experts,
            rows=rows / local_experts / parts,
            d_in=d_in,
            d_out=d_out,
        )
        return found if parts == 1 else found.scaled(parts)

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

    def halves(self, phase: Phase, rows: float, *, recompute: bool) -> tuple[Estimate, Estimate]:
        """Return the experts' work up to T_M's last use, and after it.

        Forward the GEMMs with W₁ (and W₃) and the activation come before, that with W₂ after.
        Backward the GEMMs with W₂ and the activation's gradient come before.

        Args:
            rows: or an array of them.
            recompute: backward, T_M is computed again, and that comes before.
        """
        again = recompute and phase == "backward"
        key = phase, _key(rows), again
        found = self._halves.get(key)
        if found is None:
            found = self._halves[key] = self._two_halves(phase, rows, recompute=again)
        return found

    def _two_halves(
        self, phase: Phase, rows: float, *, recompute: bool
    ) -> tuple[Estimate, Estimate]:
        def gemms(*forms: GemmForm, is_second: bool) -> list[Estimate]:
            count = 1 if is_second else self.layer.num_gemms - 1
            return count * [
                self.gemm(form, rows=rows, is_second=is_second, parts=parts) for form in forms
            ]

        parts = self.parts(phase)
        activation, sorting = self.activation(phase, rows), self.sorting(rows)
        if phase == "forward":
            return (
                total(sorting, *gemms("forward", is_second=False), activation),
                total(*gemms("forward", is_second=True), sorting),
            )
        again = gemms("forward", is_second=False) if recompute else []
        gradients: tuple[GemmForm, GemmForm] = ("grad_input", "grad_weight")
        return (
            total(sorting, *again, *gemms(*gradients, is_second=True), activation),
            total(*gemms(*gradients, is_second=False), sorting),
        )

    def product_dtype(self, product: GemmForm) -> str:
        """Return the element type of an expert's product: its format, or the dtype of the step."""
        recipe = self.quantization
        if recipe is None:
            return self.dtype
        form = dict(zip(_PRODUCTS, recipe.products, strict=True))[product]
        return self.dtype if form is None else measured_dtype(form, emulate=recipe.emulate)

    def gemm_line(self, phase: Phase) -> LinearCost | None:
        """Return the line of all GEMMs of a chunk over the MACs of one of them.

        The local experts are one GEMM: t_e = g·α + g·β·T·k·M·H/r, with g = 2 forward (3 for
        swiglu) and twice that backward (PipeMoE Eq. 14).

        Returns:
            None where experts compute more than GEMMs, or GEMMs were measured as curves.
        """
        gemm = self.costs.gemm_line(dtype=self.dtype)
        if gemm is None or self.quantization is not None or self.activation(phase, 1.0).seconds:
            return None
        num_gemms = self.layer.num_gemms * (1 if phase == "forward" else 2)
        return LinearCost(
            alpha_seconds=num_gemms * gemm.alpha_seconds,
            beta_seconds=num_gemms * gemm.beta_seconds,
        )

    def activation(self, phase: Phase, rows: float) -> Estimate:
        """Return the activation; backward it is evaluated again, and then its gradient."""
        name, width = self.layer.activation, self.layer.d_hidden
        backward = self.rows_op(f"{name}_backward", rows, width) if phase == "backward" else None
        return total(self.rows_op(name, rows, width), backward)

    def sorting(self, rows: float) -> Estimate:
        """Return the time to sort a chunk's rows by expert; sorting them back takes the same."""
        if not self.sorts_rows:
            return NOTHING
        return total(self.rows_op("gather", rows, self.layer.d_model))

    def rows_op(self, op: str, rows: float, width: int) -> Estimate | None:
        """Return a memory-bound operation; None where it was not measured."""
        return self.costs.rows_op(op=op, dtype=self.dtype, rows=rows, width=width)

    def collective(self, op: CollectiveOp, num_bytes: float, *, in_flight: int = 1) -> Estimate:
        """Return one collective of the ranks; 0 on one rank.

        Args:
            num_bytes, in_flight: or arrays of them.

        Raises:
            ProfileError: such a group was not measured.
        """
        if self.world_size == 1:
            return NOTHING
        if is_many(in_flight):
            return self._collectives(op, np.asarray(num_bytes), np.asarray(in_flight))
        return self.costs.collective(
            op=op,
            group_size=self.world_size,
            num_bytes=num_bytes,
            in_flight=in_flight,
            num_nodes=self.num_nodes,
        )

    def _collectives(
        self, op: CollectiveOp, num_bytes: Floats, in_flight: NDArray[np.int64]
    ) -> Estimate:
        seconds = np.empty(num_bytes.shape)
        for several in np.unique(in_flight).tolist():
            alike = in_flight == several
            found = self.collective(op, array_of(num_bytes[alike]), in_flight=several)
            seconds[alike] = found.seconds
        return Estimate(seconds=array_of(seconds), trust="measured")

    def collective_line(self, op: CollectiveOp) -> LinearCost | None:
        """Return the line of one collective of the ranks; None where it was measured as a curve."""
        return self.costs.collective_line(
            op=op, group_size=self.world_size, num_nodes=self.num_nodes
        )
