"""Dispatchers: they bring a layer's tokens to the experts of all ranks, and the results back.

`planned_layer` asks them for a step's rows, their counts, and the memory policy that runs the step.
The policy is `keep` or `reuse` with all-to-alls, and `tensor` if all ranks have all tokens. Rows
are counted on the device, exchanged with the ranks' agreement, and read once. This read is the
pass's only host sync: the host needs the sizes of exchanges and products.

P ranks, C chunks, L local experts of a rank.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from types import MappingProxyType

import torch

from moetune.comm.agree import OPENING_VALUES, Opening, few_values
from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel
from moetune.domain.placement import places_of
from moetune.domain.plan import Decision
from moetune.runtime.moe.dispatch import Dispatch, RowCounts, TokenCounts, TokenPermutation
from moetune.runtime.moe.executor import PipelineContext
from moetune.runtime.moe.function import MemoryPolicy
from moetune.runtime.moe.gate import Routing
from moetune.runtime.moe.keep import KeepBackward, KeepForward
from moetune.runtime.moe.offload import DeviceCopies, Offload
from moetune.runtime.moe.placement import ExpertPlacement
from moetune.runtime.moe.reuse import ReuseBackward, ReuseForward
from moetune.runtime.moe.tensor import TensorBackward, TensorForward

_MAX_CHUNKS = 32
"""The most chunks that fit into an opening's exchange, whose size must not depend on the degree."""
_OF_OTHERS = MappingProxyType({
    "deepep": "DeepEP's kernels run in Megatron-Core, Megatron-Bridge and torchtitan",
    "hybrid_ep": "HybridEP's kernels run in Megatron-Core, Megatron-Bridge and torchtitan",
    "symmetric_memory": "exchanges by torch's symmetric memory never ran on a GPU",
})  # fmt: skip
"""Dispatchers that layers do not support, and why."""


def check_dispatcher(name: str | None, kind: ExpertParallel) -> None:
    """Raise InputError if this kind of layer cannot send its tokens by that dispatcher."""
    usual = "all_gather" if kind == "tensor" else "all_to_all"
    if name in {None, usual}:
        return
    instead = f"omit it: the layer sends its tokens by {usual}"
    if name in _OF_OTHERS:
        text = f"the dispatcher {name!r} does not run in a layer of moetune: {_OF_OTHERS[name]}"
        raise InputError(text, f"{instead}, on NCCL and on gloo")
    raise InputError(f"dispatcher {name!r} is unknown to layers of this kind", instead)


class AllToAll:
    """The dispatcher that sends tokens to their experts' ranks, and the results back.

    Args:
        placement: places the experts on the communicator's ranks.

    Attributes:
        copies: copies of activations to the host and back.
    """

    def __init__(self, communicator: Communicator, placement: ExpertPlacement) -> None:
        self._communicator, self._placement = communicator, placement
        self._num_local = placement.num_local
        self._num_numbers = self._num_local + (self._num_local > 1)  # as of `TokenPermutation`
        self.copies = DeviceCopies()

    def permute(self, routing: Routing, degree: int) -> TokenPermutation:
        """Return the order of this rank's rows, before the host knows their counts."""
        if routing.aux_loss is None:
            _check_choices(routing.experts_TK, self._placement.num_experts)
        num_ranks = self._communicator.num_ranks
        return TokenPermutation(
            self.places_of(routing.experts_TK), routing.kept_TK,
            num_experts=self._num_local * num_ranks, num_ranks=num_ranks, degree=degree,
        )  # fmt: skip

    def count(self, permutation: TokenPermutation) -> RowCounts:
        """Exchange the counts of rows, and read them on the host."""
        counts_CPL = permutation.counts_CPL
        if self._communicator.num_ranks == 1:
            return _local_counts(counts_CPL, counts_CPL[:, 0].tolist())
        width, name = len(counts_CPL) * self._num_numbers, "the exchange of token counts"
        return _exchange((), permutation.numbers_CPX, width, self._communicator, name)[1]

    def open(
        self, opening: Opening, permutation: TokenPermutation | None, device: torch.device
    ) -> tuple[list[list[int]], RowCounts | None]:
        """Exchange openings and counts of rows together, and read both on the host.

        All ranks must have the same layer, because its shape sets the exchange's size. A rank
        counts by the degree that it expects, before the ranks agree. The counts are usable only if
        all ranks expected the degree that they then agree on.

        Args:
            permutation: None if the rank's input has a problem.

        Returns:
            Every rank's opening, if there are several ranks, and the counts; None if degrees
            differ.
        """
        if self._communicator.num_ranks == 1:
            return [], None if permutation is None else self.count(permutation)
        shape = 0, self._communicator.num_ranks, self._num_numbers
        numbers_CPX = torch.empty(shape, dtype=torch.int64, device=device)
        if permutation is not None and len(permutation.counts_CPL) <= _MAX_CHUNKS:
            numbers_CPX = permutation.numbers_CPX
        degree, width = len(numbers_CPX), OPENING_VALUES + 1 + _MAX_CHUNKS * self._num_numbers
        heads, counts = _exchange(
            (*opening.values, degree), numbers_CPX, width, self._communicator,
            "the agreement on tokens and their counts",
        )  # fmt: skip
        is_common = degree and all(head[-1] == degree for head in heads)
        return [head[:-1] for head in heads], counts if is_common else None

    def policy(
        self, dispatch: Dispatch, context: PipelineContext, decision: Decision
    ) -> MemoryPolicy:
        """Return the memory policy of a step."""
        if dispatch.degree == 1 or decision.strategy == "none":
            order = decision.order
            return MemoryPolicy(
                context=context, dispatch=dispatch, forward=partial(KeepForward, order),
                backward=partial(KeepBackward, order),
            )  # fmt: skip
        offload = Offload(decision.strategy, self.copies, is_needed=torch.is_grad_enabled())
        return MemoryPolicy(
            context=context, dispatch=dispatch, forward=partial(ReuseForward, offload),
            backward=partial(ReuseBackward, offload), release=offload.end,
        )  # fmt: skip

    def signature(self, _: torch.Tensor) -> str:
        """Return the part of the agreed signature that describes the tokens' number."""
        return ""

    def places_of(self, experts_TK: torch.Tensor) -> torch.Tensor:
        """Return the places of chosen experts; rows travel to places."""
        order = self._placement.order
        if not order:
            return experts_TK
        places_E = self._places.get(experts_TK.device)
        if places_E is None:
            places_E = torch.tensor(places_of(order), device=experts_TK.device)
            self._places[experts_TK.device] = places_E
        return places_E[experts_TK]

    @cached_property
    def _places(self) -> dict[torch.device, torch.Tensor]:
        """The places of all experts, by device."""
        return {}


class AllGather(AllToAll):
    """The dispatcher for ranks that all have all tokens; results are summed over ranks (PPMoE).

    Counts of rows are this rank's, so the ranks exchange only the openings.
    """

    def permute(self, routing: Routing, degree: int) -> TokenPermutation:
        """Return the order of the rows of this rank's experts."""
        local_TK = routing.experts_TK - self._placement.first
        return TokenPermutation(
            local_TK, (local_TK >= 0) & (local_TK < self._num_local),
            num_experts=self._num_local, num_ranks=1, degree=degree,
        )  # fmt: skip

    def count(self, permutation: TokenPermutation) -> RowCounts:
        """Read the counts of rows on the host."""
        counts_C1L = permutation.counts_CPL
        return _local_counts(counts_C1L, counts_C1L[:, 0].tolist())

    def open(
        self, opening: Opening, permutation: TokenPermutation | None, device: torch.device
    ) -> tuple[list[list[int]], RowCounts | None]:
        """Exchange openings, and read them on the host with the counts of rows."""
        mine = few_values(opening.values, device)
        heads = self._communicator.all_gather_values(mine, "the agreement on tokens")
        if permutation is None:
            return heads.tolist(), None
        counts_C1L = permutation.counts_CPL
        rows, rows_CL = _lists((heads, counts_C1L[:, 0]))
        return rows, _local_counts(counts_C1L, rows_CL)

    def policy(self, dispatch: Dispatch, context: PipelineContext, *_: object) -> MemoryPolicy:
        """Return the policy that sums outputs over the ranks."""
        return MemoryPolicy(
            context=context, dispatch=dispatch, forward=TensorForward, backward=TensorBackward
        )

    def signature(self, x: torch.Tensor) -> str:
        """Return the part of the agreed signature that describes the tokens' number."""
        return f", {x.shape[:-1].numel()} tokens on every rank"


def _check_choices(experts_TK: torch.Tensor, num_experts: int) -> None:
    """Raise InputError if a caller's router chose experts that the layer does not have.

    Such choices would be dropped, or would select another expert in another chunk. Choices on a GPU
    are not checked, because the host would have to wait for them.
    """
    if experts_TK.device.type == "cpu" and experts_TK.numel():
        low, high = map(int, torch.aminmax(experts_TK))
        if low < 0 or high >= num_experts:
            raise InputError(
                f"the router chose experts {low} to {high}, and the layer has 0 to "
                f"{num_experts - 1}",
                "give the layer choices among all ranks' experts, numbered from 0",
            )


def _local_counts(counts_C1L: torch.Tensor, rows_CL: Sequence[Sequence[int]]) -> RowCounts:
    """Return the counts of rows that stay on this rank.

    Args:
        rows_CL: the same counts, read by the host.
    """
    sums = [[sum(rows)] for rows in rows_CL]
    return RowCounts(
        send_CP=sums, receive_CP=sums, rows_CL=rows_CL, receive_PCL=counts_C1L.transpose(0, 1)
    )


def _exchange(
    head: Sequence[int], send_CPX: torch.Tensor, width: int, communicator: Communicator, name: str
) -> tuple[list[list[int]], RowCounts]:
    """Exchange heads and counts of rows, a block for each rank; return all heads and the counts.

    Args:
        head: this rank's integers for all ranks.
        send_CPX: as in `TokenPermutation.numbers_CPX`.
        width: integers in a block; zeros fill the rest behind the counts.
    """
    num_chunks, num_ranks, num_numbers = send_CPX.shape
    first, last = len(head), len(head) + num_chunks * num_numbers
    send = send_CPX.new_zeros((num_ranks, width))
    if head:
        send[:, :first] = few_values(head, send.device)
    there = send[:, first:last].view(num_ranks, num_chunks, num_numbers)
    there.copy_(send_CPX.transpose(0, 1))
    received = communicator.all_to_all_blocks(send, name)
    receive_PCX = received[:, first:last].unflatten(1, (num_chunks, num_numbers))
    return _read(received[:, :first], send_CPX, receive_PCX)


def _read(
    heads: torch.Tensor, send_CPX: torch.Tensor, receive_PCX: torch.Tensor
) -> tuple[list[list[int]], RowCounts]:
    """Return every rank's head and the counts, in a single read of the host."""
    num_numbers = send_CPX.shape[2]
    num_local = max(1, num_numbers - 1)
    receive_PCL = receive_PCX[..., :num_local]
    rows_CPX = receive_PCX[..., num_local:].transpose(0, 1)
    sums = [send_CPX[..., :num_local].sum(2), receive_PCL.sum(2).T, receive_PCL.sum(0)]
    if num_numbers > num_local:
        sums += [send_CPX[..., num_local], rows_CPX.squeeze(2)]
    listed, send_CP, receive_CP, rows_CL, *of_tokens = _lists((heads, *sums))
    tokens = None
    if of_tokens:
        sent, received = of_tokens
        tokens = TokenCounts(send_CP=sent, receive_CP=received, received_CP=sums[-1])
    return listed, RowCounts(
        send_CP=send_CP, receive_CP=receive_CP, rows_CL=rows_CL, receive_PCL=receive_PCL,
        tokens=tokens,
    )  # fmt: skip


def _lists(tables: Sequence[torch.Tensor]) -> list[list[list[int]]]:
    """Return tensors as tables of integers, in a single read of the host."""
    read = torch.cat([*map(torch.flatten, tables)]).cpu()
    parts = read.split([*map(torch.numel, tables)])
    return [part.view(table.shape).tolist() for part, table in zip(parts, tables, strict=True)]
