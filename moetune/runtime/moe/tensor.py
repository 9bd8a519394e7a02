"""Sum the experts of a tensor-parallel group: the memory policy without dispatch (PPMoE §3.3).

A token's way to the wire: `layer`, `gate`, `function`, `executor`, **tensor**, `comm`.

Every rank has all tokens, or a sequence shard of them. With shards the input is all-gathered and
the outputs are reduce-scattered; backward the same happens to the gradients.

T tokens of the group, S of this rank, K choices, R pairs of this rank's experts, D model width.
"""

import itertools
from dataclasses import dataclass, replace
from functools import partial

import torch

from moetune.comm.group import Communicator
from moetune.comm.transfer import Transfer
from moetune.domain.layer import Phase
from moetune.runtime.moe.dispatch import Dispatch
from moetune.runtime.moe.executor import PhaseInputs, PhaseRun, PipelineContext, local_schedule
from moetune.runtime.moe.experts import SavedActivations
from moetune.runtime.moe.function import MemoryPolicy
from moetune.runtime.moe.token_rows import RowSums
from moetune.runtime.moe.workspace import MemoryTracker, Shape

Parts = tuple[slice, ...]
"""A slice of each shard's tokens, by their places among all T."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSharing:
    """The distribution of tokens over the ranks, and the exchanges that it needs.

    Args:
        num_tokens: of every shard, in the order of the ranks; of one where all ranks have all.
        in_shards: each rank has a shard of the tokens.
    """

    communicator: Communicator
    num_tokens: tuple[int, ...]
    in_shards: bool

    def gather(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return (T, …) from this rank's part of it, of shards by one all-gather."""
        if not self.in_shards:
            return values
        return self.communicator.all_gather_rows(values, self.num_tokens, name)

    def output(self, what: str, sums: torch.Tensor, tracker: MemoryTracker) -> torch.Tensor:
        """Return memory for this rank's part of the sums (T, …), which may be `sums` itself.

        Args:
            what: purpose of the memory, for the error.
        """
        if not self.in_shards:
            return sums
        return tracker.empty(what, (self.num_tokens[self.communicator.rank], *sums.shape[1:]), sums)

    def reduce(self, parts: Parts, sums: torch.Tensor, own: torch.Tensor, name: str) -> Transfer:
        """Start summing some tokens over the ranks: an all-reduce, of shards a reduce-scatter.

        Args:
            parts: those tokens.
            sums: (T, …), this rank's.
            own: the memory from `output`, for this rank's part of the result.
        """
        if not self.in_shards:
            return self.communicator.all_reduce(sums[parts[0]], name)
        rank = self.communicator.rank
        first, mine = sum(self.num_tokens[:rank]), parts[rank]
        into = own[mine.start - first : mine.stop - first]
        return self.communicator.reduce_scatter(into, [sums[part] for part in parts], name)

    def chunks(self, degree: int) -> list[Parts]:
        """Return the tokens of every chunk: a part of each shard's."""
        firsts = itertools.accumulate(self.num_tokens, initial=0)
        shards = [
            [first + num * chunk // degree for chunk in range(degree + 1)]
            for first, num in zip(firsts, self.num_tokens, strict=False)
        ]
        return [
            tuple(slice(*bounds[chunk : chunk + 2]) for bounds in shards) for chunk in range(degree)
        ]


def sum_over_ranks(
    context: PipelineContext, dispatch: Dispatch, sharing: TokenSharing
) -> MemoryPolicy:
    """Return the policy that computes the pairs of this rank's experts, and sums over the ranks.

    Saved for the backward pass: x and the experts' pre-activations. Rows are gathered from x again.
    """
    return MemoryPolicy(
        context=context, dispatch=dispatch, forward=partial(_TensorForward, sharing),
        backward=partial(_TensorBackward, sharing),
    )  # fmt: skip


class _TensorPhase(PhaseRun):
    """The common part of both phases: sum a chunk's rows by token, then over the ranks."""

    def __init__(self, phase: Phase, sharing: TokenSharing, inputs: PhaseInputs) -> None:
        super().__init__(phase, inputs)
        self._sharing, experts = sharing, inputs.experts
        self._all_TD = like_TD = self._gather_tokens(phase)
        self._chunks = sharing.chunks(self._dispatch.degree)
        self.schedule = local_schedule(self._dispatch.degree)
        self._reductions: list[Transfer] = []
        is_backward, most = phase == "backward", self._dispatch.most_rows
        names = ("rows", "grads" if is_backward else "results")
        shapes: dict[str, Shape] = dict.fromkeys(names, (most, like_TD.shape[1]))
        shapes |= experts.hidden_shapes(most, backward=is_backward)
        self._buffers = self._context.workspace.buffers(shapes, like_TD)

    def _gather(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return (T, …) from this rank's part of it."""
        whole = self._sharing.gather(values, name)
        if self._sharing.in_shards:
            self._tracker.add(whole)
        return whole

    def _gather_tokens(self, phase: Phase) -> torch.Tensor:
        """Return (T, D), x or the gradient of y; the phase's first chunk waits for it."""
        values_SD, name = self._values_TD, "the gathering of x"
        if phase == "backward":
            values_SD, name = values_SD.contiguous(), "the gathering of the gradient"
        if not self._sharing.in_shards:
            return values_SD
        with self._context.recorder.exchange(phase, "gather", 0, values_SD.nbytes):
            return self._gather(values_SD, name)

    def combine(self, chunk: int) -> None:
        """Start summing the chunk's tokens over the ranks."""
        parts = self._chunks[chunk]
        self._reductions.append(
            self.start(
                "sum", chunk,
                lambda name: self._sharing.reduce(parts, self._sums_TD, self._own_SD, name),
                num_bytes=sum(self._sums_TD[part].nbytes for part in parts),
            )
        )  # fmt: skip

    def _make_sums(self, what: str, like_TD: torch.Tensor) -> None:
        self._sums_TD = self._tracker.empty(what, like_TD.shape, like_TD)
        self._own_SD = self._sharing.output(what, self._sums_TD, self._tracker)

    def _sum(self, chunk: int, rows: torch.Tensor) -> None:
        """Write the sums of the rows at the chunk's tokens, which no other chunk has."""
        parts = self._chunks[chunk]
        sums = RowSums.by(self._tokens(chunk), len(self._sums_TD))
        starts = torch.cat([sums.starts[part] for part in parts])
        sums_TD = replace(sums, starts=starts).of(rows, slice(0, None), slice(0, None))
        self._tracker.add(sums_TD)
        sizes = [part.stop - part.start for part in parts]
        for part, some_TD in zip(parts, sums_TD.split(sizes), strict=True):
            self._sums_TD[part] = some_TD

    def _take(self, buffer: str, values_TD: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens' rows in a buffer."""
        out = self._buffers[buffer][: len(tokens)]
        return torch.index_select(values_TD, 0, tokens, out=out)

    def _tokens(self, chunk: int) -> torch.Tensor:
        """Return the tokens of the chunk's rows."""
        return self._dispatch.tokens_M[self._dispatch.parts[chunk].rows]

    def _reduced(self) -> torch.Tensor:
        """Return this rank's part of the sums over the ranks, once all have arrived."""
        del self._sums_TD  # with shards only the transfers still need it, and then free it
        for transfer in self._reductions:
            transfer.wait()
        return self._own_SD


class _TensorForward(_TensorPhase):
    """The forward phase."""

    def __init__(self, sharing: TokenSharing, inputs: PhaseInputs) -> None:
        super().__init__("forward", sharing, inputs)
        weights_TK = self._gather(inputs.weights_TK, "the gathering of weights")
        weights_R1 = weights_TK.reshape(-1, 1).index_select(0, self._dispatch.pairs_N)
        self._activations = saved = inputs.experts.save_activations(
            len(weights_R1), self._all_TD, self._tracker
        )
        self._tracker.add(weights_R1)
        self._weights_R1 = weights_R1
        self.saved = self._all_TD, weights_R1, saved.pre_RH, saved.gate_RH

    def begin(self) -> None:
        """Allocate the sums by token."""
        self._make_sums("the results", self._all_TD)

    def finish(self) -> torch.Tensor:
        """Return (S, D)."""
        return self._reduced()

    def compute(self, chunk: int) -> None:
        """Sum the experts' weighted results at their tokens."""
        experts, part = self._experts, self._dispatch.parts[chunk]
        rows = self._take("rows", self._all_TD, self._tokens(chunk))
        results = self._buffers["results"][: len(rows)]
        activations = experts.project_up(rows, self._activations.chunk(part.rows), part)
        hidden = experts.activate(activations, self._buffers["hidden"])
        experts.project_down(hidden, self._weights_R1[part.rows], results, part)
        self._sum(chunk, results)


class _TensorBackward(_TensorPhase):
    """The backward phase."""

    def __init__(self, sharing: TokenSharing, inputs: PhaseInputs) -> None:
        super().__init__("backward", sharing, inputs)
        self._x_TD, weights_R1, pre_RH, gate_RH = inputs.saved
        self._activations = SavedActivations(pre_RH=pre_RH, gate_RH=gate_RH)
        self.grads = self.expert_grads(inputs, weights_R1, self._buffers)

    def begin(self) -> None:
        """Allocate the sums by token."""
        self._make_sums("the gradient of x", self._x_TD)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x (S, D) and of the weights (S, K)."""
        weights_SK = self._weights_TK
        grads_TK = weights_SK.new_zeros((len(self._x_TD), weights_SK.shape[1]))
        grads_R = self.grads.weight_grads_R1.squeeze(1)
        grads_TK.view(-1)[self._dispatch.pairs_N] = grads_R.to(weights_SK.dtype)
        grads_SK = self._sharing.output("the gradients of weights", grads_TK, self._tracker)
        (parts,) = self._sharing.chunks(1)
        name = "backward sum of the weights' gradients"
        self._reductions.append(self._sharing.reduce(parts, grads_TK, grads_SK, name))
        return self._reduced(), grads_SK

    def compute(self, chunk: int) -> None:
        """Sum the gradients of the experts' rows at their tokens."""
        part, tokens = self._dispatch.parts[chunk], self._tokens(chunk)
        rows = self._take("rows", self._x_TD, tokens)
        grads = self._take("grads", self._all_TD, tokens)
        self.grads.run(grads, rows, self._activations.chunk(part.rows), part, grads)
        self._sum(chunk, grads)
