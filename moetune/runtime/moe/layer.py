"""`MoELayer`: experts between a dispatch and a combine over the ranks of a group.

First step of a token's way: as in `expert_layer`, with the policies of `keep` and `reuse`.
"""

import math
from dataclasses import replace
from functools import cached_property, partial
from typing import ClassVar

import torch

from moetune.comm.agree import Opening, agree_on_tokens
from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel
from moetune.domain.placement import places_of
from moetune.runtime.moe.cells import Cells
from moetune.runtime.moe.counts import MOST_EXPECTED, RowCounts, exchange_counts, open_with_counts
from moetune.runtime.moe.dispatch import Dispatch, GroupedRows
from moetune.runtime.moe.executor import PipelineContext
from moetune.runtime.moe.expert_layer import ExpertLayer, Step
from moetune.runtime.moe.function import MemoryPolicy
from moetune.runtime.moe.gate import Routing
from moetune.runtime.moe.inputs import is_capturing
from moetune.runtime.moe.keep import KeepActivations
from moetune.runtime.moe.offload import Copies, DeviceCopies, Host, HostPool, Offload
from moetune.runtime.moe.padded import padded_dispatch
from moetune.runtime.moe.products import has_grouped
from moetune.runtime.moe.reuse import ReuseBuffers


class MoELayer(ExpertLayer):
    """A Mixture-of-Experts layer that overlaps its all-to-alls with its experts' computation.

    The degree, the number of chunks, changes the time of a step, never its numbers.

    Args:
        d_model, d_hidden: width of the tokens and of the experts.
        num_experts: experts of the whole group; every rank holds num_experts / ranks of them.
        top_k: experts of a token.
        activation: "relu", "gelu", "silu" or "swiglu" (gated, no biases).
        bias: whether experts add biases.
        capacity_factor: None drops no token; otherwise an expert takes at most
            ceil(factor · tokens · top_k / num_experts) pairs of each rank, those with the largest
            weights, as Megatron-Core by default.
        pad_to_capacity: an expert always gets so many rows, some of them of no pair. No size then
            depends on the routing, the host never waits, and a CUDA graph can hold the step; all
            ranks give the same number of tokens. Ranks compare their layers and tokens in their
            first call with a number of tokens, which must not be captured. Plans are looked up by
            the rows that are computed: for ceil(factor · tokens) tokens.
        normalize_topk: divide the chosen probabilities by their sum; default top_k > 1.
        group: expert-parallel group, default the world. All its ranks construct the layer.
        mesh: in place of a group: experts are spread over its last dimension, and a first one
            has their replicas.
        pipeline: True takes the degrees from the plan, False is one chunk, a number is that
            degree forward and backward; see also `pin`.
        memory_reuse: True takes the strategy from the plan, False or "none" keeps everything,
            "S1" to "S4" reuse buffers (see `moetune.runtime.moe.reuse`). In one chunk there is
            nothing to reuse, and all are alike.
        plan: a plan, or the path of a plan file.
        planbook: a book that all ranks share, see `moetune.open_planbook`.
        placement: expert of each place, of which rank r of P has the r-th of P equal parts;
            default, the plan's. The gate and checkpoints know experts by their own numbers.
        device, dtype: of the parameters.
        communicator: in place of the group's, for example one that models a slower wire.
        sequence_parallel: False; see `TensorExpertLayer`.
        quantization: "fp8_rowwise", "mxfp8" or a `moetune.Quantization`: experts multiply in 8
            bits. All activations are kept, and plans do not know such layers yet.

    Attributes:
        aux_loss: balance loss of the last forward pass, a scalar.
        decision: what the last forward pass ran with.
        num_dropped: pairs over the capacity in the last forward pass; with padding the host waits
            for them, when they are read.
        recorder: records when each step of forward and backward ran; see
            `moetune.runtime.trace`.

    Raises:
        InputError: an argument is out of range or the plan is for another layer.
        RankMismatchError: the ranks have different plans; on every rank.
    """

    expert_parallel: ClassVar[ExpertParallel] = "all_to_all"
    _has_met = False
    """Whether the ranks have compared their layers, whose shape is the size of an exchange."""
    _counting: Communicator | None = None
    """That of the last step: the next one's counts travel before the ranks agree on another."""

    def offload_with(self, copies: Copies) -> None:
        """Copy to and from the host with `copies` from now on."""
        self._host = replace(self._host, copies=copies)

    @cached_property
    def _host(self) -> Host:
        return Host(pool=HostPool(self._host_tracker), copies=DeviceCopies())

    def _prepare(self, x: torch.Tensor, opening: Opening, dtype: torch.dtype) -> Step:
        """Agree, decide and route, with one stop of the host from the second call on.

        Counts of rows travel with the opening, for the chunks that this number of tokens had
        before. Only if the ranks agree on others is there a second exchange.
        """
        if self.pad_to_capacity:
            return self._prepare_padded(x, opening, dtype)
        if self.communicator.num_ranks == 1:
            planned = self._decide(*opening.alone(), dtype)
            routing = self._route(x)
            return self._step(planned, routing, self._cells(routing, self._degrees), None)
        if not self._has_met:
            agreed = agree_on_tokens(self.communicator, opening, x.device)
            self._has_met = True
            planned = self._decide(*agreed, dtype)
            routing = self._route(x)
            return self._step(planned, routing, self._cells(routing, self._degrees), None)
        return self._prepare_at_once(x, opening, dtype)

    def _prepare_at_once(self, x: torch.Tensor, opening: Opening, dtype: torch.dtype) -> Step:
        degrees = self._expected.get(opening.num_tokens, self._degrees)
        routing = None if opening.problem else self._route(x)
        cells = None if routing is None else self._cells(routing, degrees)
        sent = cells.counts_CPL if cells is not None else self._no_counts(x.device)
        counting = self._counting or self.communicator
        rows, counts = open_with_counts(opening, sent, degrees, counting)
        planned = self._decide(*opening.agree(rows, self.communicator), dtype)
        # A problem on any rank has raised on all.
        assert routing is not None  # noqa: S101
        assert cells is not None  # noqa: S101
        if counts is None or degrees != self._degrees or counting is not self._exchanging:
            cells, counts = self._cells(routing, self._degrees), None
        if len(self._expected) >= MOST_EXPECTED:
            self._expected.clear()
        self._expected[opening.num_tokens] = self._degrees
        return self._step(planned, routing, cells, counts)

    def _prepare_padded(self, x: torch.Tensor, opening: Opening, dtype: torch.dtype) -> Step:
        """Decide and route, without a stop of the host but in the ranks' first such call."""
        agreed: tuple[tuple[int, ...], int] = (opening.num_tokens,) * self.communicator.num_ranks, 0
        # Ranks with other tokens must not go on: their exchanges would have other sizes.
        opening = replace(opening, signature=f"{opening.signature}, {opening.num_tokens} tokens")
        if self.communicator.num_ranks == 1:
            agreed = opening.alone()
        elif opening.problem or opening.signature not in self._agreed:
            if is_capturing(x):
                raise InputError(
                    "a CUDA graph cannot hold the first call with a new number of tokens, dtype or "
                    "plan, in which the ranks compare them",
                    "run one step outside of the capture before",
                )
            agreed = agree_on_tokens(self.communicator, opening, x.device)
            self._agreed.add(opening.signature)
        planned = self._decide(*agreed, dtype)
        routing = self._route(x)
        return Step(
            num_tokens=planned, routing=routing, policy=partial(self._policy_padded, routing)
        )

    @cached_property
    def _agreed(self) -> set[str]:
        """Signatures that all ranks had in the same call."""
        return set()

    def _planned_tokens(self, num_tokens: tuple[int, ...]) -> int:
        """Return the most tokens of a rank, with padding those that would be as many rows."""
        most = super()._planned_tokens(num_tokens)
        if not self.pad_to_capacity:
            return most
        assert self.gate.capacity_factor is not None  # noqa: S101 - checked with the arguments
        return math.ceil(self.gate.capacity_factor * most)

    @property
    def _degrees(self) -> tuple[int, int]:
        return self.decision.forward_degree, self.decision.backward_degree

    @cached_property
    def _expected(self) -> dict[int, tuple[int, int]]:
        """Degrees that this rank's numbers of tokens had before; a guess, never relied on."""
        return {}

    def _route(self, x: torch.Tensor) -> Routing:
        routing: Routing = self.gate(x.reshape(-1, self.shape.d_model))
        return routing

    def _cells(self, routing: Routing, degrees: tuple[int, int]) -> Cells:
        return Cells(
            self._places_of(routing.experts_TK), routing.kept, num_experts=self.shape.num_experts,
            num_ranks=self.communicator.num_ranks, degrees=degrees,
        )  # fmt: skip

    def _places_of(self, experts_TK: torch.Tensor) -> torch.Tensor:
        """Return the places of experts: rows travel to those."""
        order = self.experts.placement.order
        if not order:
            return experts_TK
        places_E = self._known_places.get(experts_TK.device)
        if places_E is None:
            places_E = torch.tensor(places_of(order), device=experts_TK.device)
            self._known_places[experts_TK.device] = places_E
        return places_E[experts_TK]

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
    ) -> Step:
        if counts is None:
            counts = exchange_counts(cells.counts_CPL, self._exchanging)
        self._record(counts.rows_CL)
        self._counting = self._exchanging
        return Step(
            num_tokens=num_tokens, routing=routing, policy=partial(self._policy, cells, counts)
        )

    def _policy(
        self, cells: Cells, counts: RowCounts, x_TD: torch.Tensor, context: PipelineContext
    ) -> MemoryPolicy:
        bias = self.experts.b1 is not None
        grouped = None
        is_scaled = self.quantization is not None and self.quantization.multiplies
        if is_scaled or has_grouped(x_TD, self.experts.w1):
            num_rows = sum(map(sum, counts.rows_CL))
            on_device_CL = counts.receive_PCL.sum(0)
            grouped = GroupedRows.of(on_device_CL, num_rows, like=x_TD, bias=bias)
        return self._policy_of(cells.dispatch(counts, grouped=grouped), x_TD, context)

    def _policy_padded(
        self, routing: Routing, x_TD: torch.Tensor, context: PipelineContext
    ) -> MemoryPolicy:
        assert routing.places_TK is not None  # noqa: S101 - there is a capacity
        assert routing.capacity is not None  # noqa: S101
        groups = partial(GroupedRows.of, like=x_TD, bias=self.experts.b1 is not None)
        dispatch = padded_dispatch(
            self._places_of(routing.experts_TK), routing.places_TK, capacity=routing.capacity,
            num_experts=self.shape.num_experts, num_ranks=self.communicator.num_ranks,
            degrees=self._degrees, groups=groups if has_grouped(x_TD, self.experts.w1) else None,
        )  # fmt: skip
        return self._policy_of(dispatch, x_TD, context)

    def _policy_of(
        self, dispatch: Dispatch, x_TD: torch.Tensor, context: PipelineContext
    ) -> MemoryPolicy:
        decision = self.decision
        self._num_dropped = dispatch.num_dropped
        self._tracker.add(*dispatch.tensors)
        if dispatch.is_single_chunk or decision.strategy == "none":
            return KeepActivations(context=context, dispatch=dispatch, order=decision.order)
        offload = Offload(
            decision.strategy, self._host, num_rows=dispatch.num_received, layer=self.shape,
            like=x_TD, is_needed=torch.is_grad_enabled(),
        )  # fmt: skip
        return ReuseBuffers(context=context, dispatch=dispatch, offload=offload)
