"""The steps of layers whose tokens travel to their experts by all-to-all, and back.

First step of a token's way: as in `planned_layer`, with the policies of `keep` and `reuse`.
"""

from functools import cached_property, partial
from typing import ClassVar

import torch

from moetune.comm.agree import Opening, agree_on_tokens
from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel
from moetune.domain.placement import places_of
from moetune.runtime.moe.cells import Cells
from moetune.runtime.moe.counts import RowCounts, exchange_counts, open_with_counts
from moetune.runtime.moe.dispatch import GroupedRows
from moetune.runtime.moe.executor import PipelineContext
from moetune.runtime.moe.function import MemoryPolicy
from moetune.runtime.moe.gate import Routing
from moetune.runtime.moe.keep import KeepActivations
from moetune.runtime.moe.offload import DeviceCopies, HostPool, Offload
from moetune.runtime.moe.planned_layer import LayerStep, PlannedLayer, Route
from moetune.runtime.moe.products import has_grouped
from moetune.runtime.moe.reuse import ReuseBuffers


class AllToAllLayer(PlannedLayer):
    """Experts between a dispatch and a combine over the ranks of a group."""

    expert_parallel: ClassVar[ExpertParallel] = "all_to_all"
    _has_met = False
    """Whether the ranks have compared their layers, whose shape is the size of an exchange."""

    @cached_property
    def _host_pool(self) -> HostPool:
        return HostPool(self._host_tracker, DeviceCopies())

    def _prepare(
        self, x: torch.Tensor, opening: Opening, dtype: torch.dtype, route: Route
    ) -> LayerStep:
        """Agree, decide and route, with one stop of the host from the second call on.

        Counts of rows travel with the opening, for the chunks that this number of tokens had
        before. Only if the ranks agree on others is there a second exchange.
        """
        if self._has_met:
            return self._prepare_at_once(x, opening, dtype, route)
        agreed = agree_on_tokens(self.communicator, opening, x.device)
        self._has_met = self.communicator.num_ranks > 1
        planned = self._decide(*agreed, dtype)
        routing = route()
        return self._step(planned, routing, self._cells(routing, self._degrees), None)

    def _prepare_at_once(
        self, x: torch.Tensor, opening: Opening, dtype: torch.dtype, route: Route
    ) -> LayerStep:
        degrees = self._expected_degrees(opening.num_tokens)
        routing = None if opening.problem else route()
        cells = None if routing is None else self._cells(routing, degrees)
        sent = cells.counts_CPL if cells is not None else self._no_counts(x.device)
        rows, counts = open_with_counts(opening, sent, degrees, self.communicator)
        planned = self._decide(*opening.agree(rows, self.communicator), dtype)
        # A problem on any rank has raised on all.
        assert routing is not None  # noqa: S101
        assert cells is not None  # noqa: S101
        if counts is None or degrees != self._degrees:
            cells, counts = self._cells(routing, self._degrees), None
        self._expect_degrees(opening.num_tokens)
        return self._step(planned, routing, cells, counts)

    def _cells(self, routing: Routing, degrees: tuple[int, int]) -> Cells:
        return Cells(
            self.places_of(routing.experts_TK), routing.kept,
            num_experts=self.experts.local_experts * self.communicator.num_ranks,
            num_ranks=self.communicator.num_ranks, degrees=degrees,
        )  # fmt: skip

    def places_of(self, experts_TK: torch.Tensor) -> torch.Tensor:
        """Return the places of experts: rows travel to those."""
        order = self.experts.placement.order
        if not order:
            return experts_TK
        known_E = self._known_places.get(experts_TK.device)
        if known_E is None:
            known_E = torch.tensor(places_of(order), device=experts_TK.device)
            self._known_places[experts_TK.device] = known_E
        return known_E[experts_TK]

    @cached_property
    def _known_places(self) -> dict[torch.device, torch.Tensor]:
        """Place of each expert, on each device where it was needed."""
        return {}

    def _no_counts(self, device: torch.device) -> torch.Tensor:
        """Return the counts of a rank whose input has a problem."""
        shape = 1, self.communicator.num_ranks, self.experts.local_experts
        return torch.zeros(shape, dtype=torch.int64, device=device)

    def _step(
        self, num_tokens: int, routing: Routing, cells: Cells, counts: RowCounts | None
    ) -> LayerStep:
        if counts is None:
            counts = exchange_counts(cells.counts_CPL, self.communicator)
        self._record(counts.rows_CL)
        return LayerStep(
            num_tokens=num_tokens, routing=routing, policy=partial(self._policy, cells, counts)
        )

    def _policy(
        self, cells: Cells, counts: RowCounts, x_TD: torch.Tensor, context: PipelineContext
    ) -> MemoryPolicy:
        bias = self.experts.b1 is not None
        grouped = None
        if has_grouped(x_TD, self.experts.w1):
            num_rows = sum(map(sum, counts.rows_CL))
            on_device_CL = counts.receive_PCL.sum(0)
            grouped = GroupedRows.of(on_device_CL, num_rows, like=x_TD, bias=bias)
        dispatch, decision = cells.dispatch(counts, grouped=grouped), self.decision
        self._num_dropped = dispatch.num_dropped
        self._tracker.add(*dispatch.tensors)
        if dispatch.is_single_chunk or decision.strategy == "none":
            return KeepActivations(context=context, dispatch=dispatch, order=decision.order)
        if self.weight_gradients is not None:
            raise InputError(
                f"strategy {decision.strategy!r} reuses memory that gradients of weights wait in",
                'use the strategy "none" with a schedule that splits the backward pass',
            )
        offload = Offload(
            decision.strategy, self._host_pool, num_rows=dispatch.num_received, layer=self.shape,
            like=x_TD, is_needed=torch.is_grad_enabled(), is_fused=self.experts.form is not None,
        )  # fmt: skip
        return ReuseBuffers(context=context, dispatch=dispatch, offload=offload)
