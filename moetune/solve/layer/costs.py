"""What one chunk of a layer costs: its all-to-all, its experts, and what lies around them.

T tokens per rank, k experts per token, M d_model, H d_hidden, E experts, r chunks. A chunk has
T·k/r rows on each rank, a real number: costs are asked for shares.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from moetune.domain.constraints import Order
from moetune.domain.costs import Costs, Estimate, Interference, LinearCost, SideBySide, least_trust
from moetune.domain.layer import PHASES, LayerShape, Phase
from moetune.domain.samples import ALONE_CHUNKS, CollectiveOp, Product
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.degree import best_degree, makespan

COUNT_BYTES = 8
PHASE_PRODUCTS: Mapping[Phase, tuple[Product, ...]] = MappingProxyType(
    {"forward": ("forward",), "backward": ("grad_input", "grad_weight")}
)
NOTHING = Estimate(seconds=0.0, trust="measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """The costs of one layer on so many ranks, whatever the number of tokens.

    Here tokens travel to the experts and back.

    Args:
        num_nodes: that the ranks are spread over evenly; 0 for consecutive ranks.
    """

    layer: LayerShape
    world_size: int
    dtype: str
    costs: Costs
    num_nodes: int = 0

    @property
    def num_transfers(self) -> int:
        """Transfers of one chunk: dispatch and combine."""
        return 2

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row on the link."""
        return self.layer.d_model * dtype_bytes(self.dtype)

    @property
    def macs_per_row(self) -> int:
        """Multiply-accumulates of one row in one GEMM."""
        return self.layer.d_model * self.layer.d_hidden

    def transfer(self, *, rows: float, degree: int) -> Estimate:
        """Return one chunk's dispatch, which is also its combine; 0 on one rank.

        Args:
            rows: of the chunk on one rank.
            degree: of the phase; its chunks are in flight together.
        """
        in_flight = 1 if degree <= ALONE_CHUNKS else degree
        return self.exchange("all_to_all", rows * self.bytes_per_row, in_flight=in_flight)

    def gathering(self, *, tokens: float) -> Estimate:  # noqa: ARG002 - of sequence shards
        """Return what a phase waits for before its first chunk; nothing here."""
        return NOTHING

    def beside(self, *, rows: float, degree: int) -> Interference:
        """Return how the classes disturb each other in a phase of such chunks."""
        table = self.costs.interference
        seconds = self.transfer(rows=rows, degree=degree).seconds
        speeds = self.side_by_side(rows=rows, transfer_seconds=seconds)
        return replace(
            table,
            comp=replace(table.comp, comm=speeds.comp),
            comm=replace(table.comm, comp=speeds.comm),
        )

    def side_by_side(self, *, rows: float, transfer_seconds: float) -> SideBySide:
        """Return the speeds of the experts and of transfers of such chunks."""
        return self.costs.side_by_side(
            exchange_bytes=rows * self.bytes_per_row, exchange_seconds=transfer_seconds
        )

    def makespan(
        self, *, degree: int, rows: float, transfer_seconds: float, compute_seconds: float,
        order: Order,
    ) -> float:  # fmt: skip
        """Return the time of a phase in chunks of so many rows."""
        speeds = self.side_by_side(rows=rows, transfer_seconds=transfer_seconds)
        return makespan(
            degree=degree,
            transfer_seconds=transfer_seconds,
            compute_seconds=compute_seconds,
            comm_speed=speeds.comm,
            comp_speed=speeds.comp,
            order=order,
        )

    def best_degree(
        self, lines: tuple[LinearCost, LinearCost], *, rows: float, max_degree: int
    ) -> int:
        """Return the closed form's degree for a phase of so many rows.

        Args:
            lines: of that phase.
        """
        return best_degree(
            transfer=lines[0],
            payload_bytes=rows * self.bytes_per_row,
            compute=lines[1],
            macs=rows * self.macs_per_row,
            max_degree=max_degree,
        )

    def compute(self, *, phase: Phase, rows: float) -> Estimate:
        """Return one chunk's experts: GEMMs, activation, and sorting its rows by expert.

        The backward pass has two products for each of the forward pass, and evaluates the
        activation again, since the layer keeps what went into it.
        """
        sorting = self.sorting(rows)
        return total(*self.gemms(phase, rows), self.activation(phase, rows), sorting, sorting)

    def overhead(self, *, tokens: float) -> Estimate:
        """Return gate, permutation and the ranks' two small exchanges; 0 where not measured."""
        return total(*(self.phase_overhead(phase, tokens=tokens) for phase in PHASES))

    def phase_overhead(self, phase: Phase, *, tokens: float) -> Estimate:
        """Return one phase's share of the overhead.

        Forward the ranks exchange their numbers of tokens and the counts of all chunks.
        """
        rows = tokens * self.layer.top_k
        small = NOTHING
        gate = self.gate(phase, tokens=tokens)
        if phase == "forward" and gate.seconds:
            small = self.exchange("all_to_all", self.layer.num_experts * COUNT_BYTES)
        return total(
            gate,
            self.rows_op("gather", rows, self.layer.d_model),
            self.rows_op("scatter_add", rows, self.layer.d_model),
            small,
            small,
        )

    def gate(self, phase: Phase, *, tokens: float) -> Estimate:
        """Return scores, softmax and choice of the experts; 0 where not measured."""
        experts = self.layer.num_experts
        choice = self.rows_op("gate", tokens, experts)
        if choice is None:
            return NOTHING
        if phase == "backward":
            choice = self.rows_op("gate_backward", tokens, experts)
        products = (
            self.costs.gemm(
                dtype=self.dtype,
                product=product,
                num_experts=1,
                rows=tokens,
                d_in=self.layer.d_model,
                d_out=experts,
            )
            for product in PHASE_PRODUCTS[phase]
        )
        return total(choice, *products)

    def exchange(self, op: CollectiveOp, num_bytes: float, *, in_flight: int = 1) -> Estimate:
        """Return one collective of the ranks; 0 on one rank."""
        if self.world_size == 1:
            return NOTHING
        return self.costs.collective(
            op=op,
            group_size=self.world_size,
            num_bytes=num_bytes,
            in_flight=in_flight,
            num_nodes=self.num_nodes,
        )

    def lines(self, phase: Phase) -> tuple[LinearCost, LinearCost] | None:
        """Return (all-to-all over bytes, all GEMMs over the MACs of one), if that is all there is.

        The local experts are one GEMM: t_e = g·α + g·β·T·k·M·H/r, with g = 2 forward (3 for
        swiglu) and twice that backward (PipeMoE Eq. 14).
        """
        transfer = self.collective_line("all_to_all")
        compute = self.gemm_line(phase)
        if transfer is None or compute is None or self.sorting(1.0).seconds:
            return None
        expected = transfer.seconds(self.bytes_per_row)
        alone_and_several = (self.transfer(rows=1.0, degree=degree) for degree in (1, 2))
        if not all(math.isclose(one.seconds, expected) for one in alone_and_several):
            return None  # one in flight and several have different lines
        return transfer, compute

    def collective_line(self, op: CollectiveOp) -> LinearCost | None:
        """Return the line of one collective of the ranks, None where there is none."""
        return self.costs.collective_line(
            op=op, group_size=self.world_size, num_nodes=self.num_nodes
        )

    def gemm_line(self, phase: Phase) -> LinearCost | None:
        """Return the line of all GEMMs, None where experts do more or there is no line."""
        gemm = self.costs.gemm_line(dtype=self.dtype)
        if gemm is None or self.activation(phase, 1.0).seconds:
            return None
        num_gemms = self.layer.num_gemms * (1 if phase == "forward" else 2)
        return LinearCost(
            alpha_seconds=num_gemms * gemm.alpha_seconds,
            beta_seconds=num_gemms * gemm.beta_seconds,
        )

    def product(self, product: Product, *, rows: float, is_second: bool = False) -> Estimate:
        """Return one product of all local experts.

        Args:
            is_second: with W₂ instead of W₁ (or, for swiglu, W₃).
        """
        sizes = self.layer.d_model, self.layer.d_hidden
        d_in, d_out = sizes[::-1] if is_second else sizes
        local_experts = self.layer.num_experts // self.world_size
        return self.costs.gemm(
            dtype=self.dtype,
            product=product,
            num_experts=local_experts,
            rows=rows / local_experts,
            d_in=d_in,
            d_out=d_out,
        )

    def activation(self, phase: Phase, rows: float) -> Estimate:
        """Return the activation; backward it is evaluated again, and then its gradient."""
        name, width = self.layer.activation, self.layer.d_hidden
        backward = self.rows_op(f"{name}_backward", rows, width) if phase == "backward" else None
        return total(self.rows_op(name, rows, width), backward)

    @property
    def sorts_rows(self) -> bool:
        """Whether rows arrive by sender and are computed by expert: sorted once, and back."""
        return 1 < self.world_size < self.layer.num_experts

    def sorting(self, rows: float) -> Estimate:
        """Return the time to sort a chunk's rows by expert, which is also the way back."""
        if not self.sorts_rows:
            return NOTHING
        return total(self.rows_op("gather", rows, self.layer.d_model))

    def gemms(self, phase: Phase, rows: float) -> Iterator[Estimate]:
        """Yield all products of the local experts."""
        for product in PHASE_PRODUCTS[phase]:
            yield from (self.product(product, rows=rows),) * (self.layer.num_gemms - 1)
            yield self.product(product, rows=rows, is_second=True)

    def rows_op(self, op: str, rows: float, width: int) -> Estimate | None:
        """Return an operation bound by memory, None where it was not measured."""
        return self.costs.rows_op(op=op, dtype=self.dtype, rows=rows, width=width)


def total(*parts: Estimate | None) -> Estimate:
    """Return the sum; its relative error is the mean one, weighted by time."""
    known = [part for part in parts if part is not None]
    seconds = sum((part.seconds for part in known), 0.0)
    error = sum(part.seconds * part.relative_error for part in known)
    return Estimate(
        seconds=seconds,
        trust=least_trust(part.trust for part in known),
        relative_error=error / seconds if seconds else 0.0,
    )
