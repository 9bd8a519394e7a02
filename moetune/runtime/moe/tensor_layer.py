"""`TensorExpertLayer`: experts inside a tensor-parallel group, without dispatch (PPMoE §3.3).

First step of a token's way: as in `planned_layer`, with the policy of `tensor`.
"""

from functools import partial
from typing import ClassVar

import torch

from moetune.comm.agree import Opening, agree_on_tokens
from moetune.domain.layer import ExpertParallel
from moetune.runtime.moe.counts import open_beside_counts
from moetune.runtime.moe.dispatch import GroupedRows
from moetune.runtime.moe.executor import PipelineContext
from moetune.runtime.moe.expert_layer import ExpertLayer
from moetune.runtime.moe.function import MemoryPolicy
from moetune.runtime.moe.gate import Routing
from moetune.runtime.moe.planned_layer import LayerStep, Route
from moetune.runtime.moe.products import has_grouped
from moetune.runtime.moe.tensor import TensorParallelPolicy
from moetune.runtime.moe.tensor_tokens import LocalCells, TokenSharing


class TensorExpertLayer(ExpertLayer):
    """A Mixture-of-Experts layer inside a tensor-parallel group, without dispatch.

    Every rank gives the same tokens, as behind a tensor-parallel layer, and gets the same output:
    its experts compute the (token, choice) pairs that chose them, and one all-reduce sums the
    ranks' outputs. Backward, the gradient of x is summed the same way. The gate is replicated, and
    its gradient is complete and equal on all ranks. Parameters have the names and shapes of
    `MoELayer`'s, and the degree changes the time of a step, never its numbers.

    Args:
        d_model, d_hidden, num_experts, top_k, activation, bias: as in `MoELayer`.
        normalize_topk, plan, planbook, device, dtype, communicator: as in `MoELayer`.
        capacity_factor, placement, shared_experts: None; no pair is dropped.
        group: tensor-parallel group, default the world. All its ranks construct the layer.
        mesh: in place of a group, as in `MoELayer`.
        pipeline: as in `MoELayer`: a chunk of the output, or of the gradient of x, is summed
            over the ranks while the next one is computed.
        memory_reuse: True, False or "none", which are the same here.
        sequence_parallel: x and the output are this rank's shard of the group's tokens; shards may
            differ in size. The input is all-gathered, the output reduce-scattered. Its plans are
            those with sequence shards, for the tokens of all ranks.

    Attributes:
        aux_loss: balance loss of the last forward pass over all tokens, equal on all ranks: add
            it to the loss on every rank, as any loss that all of them compute alike.
        decision, num_dropped, recorder: as in `MoELayer`.

    Raises:
        InputError: an argument is out of range, or would drop pairs or reuse memory.
    """

    expert_parallel: ClassVar[ExpertParallel] = "tensor"

    def _prepare(
        self, x: torch.Tensor, opening: Opening, dtype: torch.dtype, route: Route
    ) -> LayerStep:
        """Agree, decide and route, with one stop of the host where all ranks have all tokens.

        Shards take two: the gate sums over the ranks, and choices are gathered by the shards'
        sizes, so that the ranks must agree before.
        """
        if self.communicator.num_ranks > 1 and not self.sequence_parallel:
            return self._prepare_at_once(x, opening, dtype, route)
        num_tokens, note = agree_on_tokens(self.communicator, opening, x.device)
        planned = self._decide(num_tokens, note, dtype)
        return self._step(planned, route(), self._sharing(num_tokens))

    def _prepare_at_once(
        self, x: torch.Tensor, opening: Opening, dtype: torch.dtype, route: Route
    ) -> LayerStep:
        """Read the counts of rows with the agreement, for the chunks that are expected.

        Counts of replicated tokens are the rank's own. Where the ranks agree on other chunks, they
        are made and read again, without another exchange.
        """
        degrees = self._expected_degrees(opening.num_tokens)
        sharing = self._sharing((opening.num_tokens,))
        routing = None if opening.problem else route()
        cells = None if routing is None else self._cells(routing.experts_TK, sharing, degrees)
        rows, counts_CL = open_beside_counts(
            opening, None if cells is None else cells.counts_CL, self.communicator, x.device
        )
        planned = self._decide(*opening.agree(rows, self.communicator), dtype)
        # A problem on any rank has raised on all.
        assert routing is not None  # noqa: S101
        assert cells is not None  # noqa: S101
        self._expect_degrees(opening.num_tokens)
        if degrees != self._degrees:
            return self._step(planned, routing, sharing)
        return self._step(planned, routing, sharing, (cells, counts_CL))

    def _cells(
        self, experts_TK: torch.Tensor, sharing: TokenSharing, degrees: tuple[int, int]
    ) -> LocalCells:
        local = self.experts.local_experts
        return LocalCells(
            experts_TK, num_tokens=sharing.num_tokens, num_experts=local,
            first_expert=self.communicator.rank * local, degrees=degrees,
        )  # fmt: skip

    def _step(
        self,
        num_tokens: int,
        routing: Routing,
        sharing: TokenSharing,
        counted: tuple[LocalCells, list[list[int]]] | None = None,
    ) -> LayerStep:
        """Return the step; its cells are counted and read now if they were not before."""
        if counted is None:
            experts_TK = sharing.gather(routing.experts_TK, "the gathering of choices")
            cells = self._cells(experts_TK, sharing, self._degrees)
            counted = cells, cells.counts_CL.tolist()
        self._record(counted[1])
        return LayerStep(
            num_tokens=num_tokens, routing=routing, policy=partial(self._policy, *counted, sharing)
        )

    def _policy(
        self,
        cells: LocalCells,
        counts_CL: list[list[int]],
        sharing: TokenSharing,
        x_TD: torch.Tensor,
        context: PipelineContext,
    ) -> MemoryPolicy:
        groups = partial(GroupedRows.of, like=x_TD, bias=self.experts.b1 is not None)
        pairs = cells.pairs(counts_CL, groups if has_grouped(x_TD, self.experts.w1) else None)
        self._tracker.add(pairs.pairs_R, pairs.tokens_R, pairs.rows_TK)
        return TensorParallelPolicy(context=context, sharing=sharing, pairs=pairs)

    def _sharing(self, num_tokens: tuple[int, ...]) -> TokenSharing:
        in_shards = self.sequence_parallel and self.communicator.num_ranks > 1
        return TokenSharing(
            communicator=self.communicator, in_shards=in_shards,
            num_tokens=num_tokens if in_shards else num_tokens[:1],
        )  # fmt: skip

    def _planned_tokens(self, num_tokens: tuple[int, ...]) -> int:
        return sum(self._sharing(num_tokens).num_tokens)

    def _signature(self, x: torch.Tensor, dtype: torch.dtype) -> str:
        tokens = f"{x.shape[:-1].numel()} tokens on every rank"
        shards = "shards of the tokens" if self.sequence_parallel else tokens
        return f"{super()._signature(x, dtype)}, {shards}"
