"""Who has which tokens in a tensor-parallel group: every rank all of them, or a shard each.

T tokens of the group. With shards, as between sequence-parallel neighbours, the input is
all-gathered and sums are reduce-scattered, forward and backward: each is the other's conjugate.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from moetune.domain.layer import Activation, Phase
from moetune.runtime.links import Link, Transfer
from moetune.runtime.moe.dispatch import common_pieces
from moetune.runtime.moe.executor import slices_of
from moetune.runtime.moe.experts import (
    Blocks,
    activate,
    blocks_of,
    hidden_room,
    hidden_shapes,
    multiply,
)
from moetune.runtime.moe.function import ExpertGrads, SavedActivations
from moetune.runtime.moe.trace import SpanRecorder
from moetune.runtime.moe.weights import ChunkWeights
from moetune.runtime.moe.workspace import MemoryTracker, Workspace

Parts = tuple[slice, ...]
"""Some tokens of each shard, by their places among all T."""


class Sharing(Protocol):
    """How the ranks share the tokens."""

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens of every shard; of the only one where all ranks have all tokens."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether a rank has all tokens, so that gathering takes no exchange."""
        ...

    def gather(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return (T, …) from what this rank has of it."""
        ...

    def room(self, what: str, sums: torch.Tensor, account: MemoryTracker) -> torch.Tensor:
        """Return where this rank's part of the sums (T, …) goes, which may be `sums`."""
        ...

    def add(self, parts: Parts, sums: torch.Tensor, own: torch.Tensor, name: str) -> Transfer:
        """Start adding up the ranks' sums of some tokens.

        Args:
            own: of `room`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Everywhere:
    """Every rank has all tokens."""

    link: Link
    num_tokens: tuple[int, ...]
    is_complete = True

    def gather(self, values: torch.Tensor, _: str) -> torch.Tensor:
        """Return the values."""
        return values

    def room(self, _: str, sums: torch.Tensor, __: MemoryTracker) -> torch.Tensor:
        """Return the sums."""
        return sums

    def add(self, parts: Parts, sums: torch.Tensor, _: torch.Tensor, name: str) -> Transfer:
        """Start one all-reduce."""
        return self.link.add(sums[parts[0]], name)


@dataclass(frozen=True, slots=True)
class Sharded:
    """Every rank has a shard of the tokens, in the order of the ranks."""

    link: Link
    num_tokens: tuple[int, ...]
    is_complete = False

    def gather(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Start and end one all-gather."""
        return self.link.gather_shards(values, self.num_tokens, name)

    def room(self, what: str, sums: torch.Tensor, account: MemoryTracker) -> torch.Tensor:
        """Return room for this rank's shard."""
        return account.empty(what, (self.num_tokens[self.link.rank], *sums.shape[1:]), sums)

    def add(self, parts: Parts, sums: torch.Tensor, own: torch.Tensor, name: str) -> Transfer:
        """Start one reduce-scatter."""
        rank = self.link.rank
        first, mine = sum(self.num_tokens[:rank]), parts[rank]
        into = own[mine.start - first : mine.stop - first]
        return self.link.add_shards(into, [sums[part] for part in parts], name)


def all_parts(num_tokens: Sequence[int]) -> Parts:
    """Return all tokens of every shard."""
    ends = [sum(num_tokens[: place + 1]) for place in range(len(num_tokens))]
    return tuple(slice(end - num, end) for end, num in zip(ends, num_tokens, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One phase's chunks.

    Args:
        tokens: the tokens of every chunk, by shard.
        rows: where its pairs lie among all of them.
        blocks: its experts' rows, from the chunk's first on.
    """

    tokens: tuple[Parts, ...]
    rows: tuple[slice, ...]
    blocks: tuple[Blocks, ...]

    @property
    def degree(self) -> int:
        """Number of chunks."""
        return len(self.tokens)

    @property
    def most_rows(self) -> int:
        """Rows of the largest chunk."""
        sizes: list[int] = [rows.stop - rows.start for rows in self.rows]
        return max(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPairs:
    """The pairs of this rank's experts, cut for both phases.

    Args:
        pairs_R: token·K + choice.
        tokens_R: their tokens.
    """

    pairs_R: torch.Tensor
    tokens_R: torch.Tensor
    forward: Cut
    backward: Cut


def local_pairs(
    experts_TK: torch.Tensor,
    *,
    num_tokens: Sequence[int],
    first_expert: int,
    num_experts: int,
    forward_degree: int,
    backward_degree: int,
) -> LocalPairs:
    """Return the pairs whose expert is one of `num_experts` from `first_expert` on.

    Args:
        experts_TK: chosen experts, shard after shard.
        num_tokens: of every shard.
    """
    places, *phases = common_pieces(forward_degree, backward_degree)
    num_pieces, device = len(places) - 1, experts_TK.device
    bounds = [
        [shard.start + num * place // places[-1] for place in places]
        for shard, num in zip(all_parts(num_tokens), num_tokens, strict=True)
    ]
    sizes = [high - low for shard in bounds for low, high in itertools.pairwise(shard)]
    piece_T = torch.arange(num_pieces, device=device).repeat(len(bounds))
    piece_T = piece_T.repeat_interleave(
        torch.tensor(sizes, device=device), output_size=len(experts_TK)
    )
    local_TK = experts_TK - first_expert
    is_local_TK = (local_TK >= 0) & (local_TK < num_experts)
    cell_TK = piece_T.unsqueeze(1) * num_experts + local_TK
    cells = torch.where(is_local_TK, cell_TK, num_pieces * num_experts).reshape(-1)
    counts = torch.bincount(cells, minlength=num_pieces * num_experts + 1)[:-1]
    counts_CL: list[list[int]] = counts.view(num_pieces, num_experts).tolist()
    pairs_R = torch.sort(cells, stable=True).indices[: sum(map(sum, counts_CL))]
    forward, backward = (_cut(counts_CL, bounds, pieces) for pieces in phases)
    return LocalPairs(
        pairs_R=pairs_R,
        tokens_R=pairs_R // experts_TK.shape[1],
        forward=forward,
        backward=backward,
    )


def _cut(
    counts_CL: list[list[int]], bounds: Sequence[Sequence[int]], pieces: tuple[int, ...]
) -> Cut:
    """Return the chunks that are these runs of pieces.

    Args:
        bounds: [shard][piece] in tokens.
    """
    chunks = list(itertools.pairwise(pieces))
    counts = [counts_CL[low:high] for low, high in chunks]
    return Cut(
        tokens=tuple(
            tuple(slice(shard[low], shard[high]) for shard in bounds) for low, high in chunks
        ),
        rows=slices_of(sum(map(sum, each)) for each in counts),
        blocks=tuple(map(blocks_of, counts)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summing:
    """What both phases of a step share."""

    sharing: Sharing
    pairs: LocalPairs
    activation: Activation
    recorder: SpanRecorder
    scratch: Workspace

    @property
    def account(self) -> MemoryTracker:
        """What counts the tensors that are no rooms of the scratch."""
        return self.scratch.account

    def rooms(
        self, phase: Phase, like_TD: torch.Tensor, pre_RH: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return rooms for one chunk."""
        cut: Cut = getattr(self.pairs, phase)
        names = ("rows", "results" if phase == "forward" else "grads")
        shapes = dict.fromkeys(names, (cut.most_rows, like_TD.shape[1]))
        shapes |= hidden_shapes(
            self.activation, cut.most_rows, pre_RH.shape[1], backward=phase == "backward"
        )
        return self.scratch.rooms(shapes, like_TD)

    def gather(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return (T, …) from what this rank has of it."""
        whole = self.sharing.gather(values, name)
        if not self.sharing.is_complete:
            self.account.add(whole)
        return whole

    def gather_tokens(self, phase: Phase, values_SD: torch.Tensor) -> torch.Tensor:
        """Return (T, D): what the phase's first chunk waits for."""
        if self.sharing.is_complete:
            return values_SD
        name = "the gathering of x" if phase == "forward" else "the gathering of the gradient"
        with self.recorder.exchange(phase, "gather", 0):
            return self.gather(values_SD, name)

    def run(
        self, phase: Phase, compute: Callable[[int, torch.Tensor], None], like_TD: torch.Tensor
    ) -> tuple[torch.Tensor, list[Transfer]]:
        """Compute chunk after chunk, and add up each over the ranks behind the next ones.

        Args:
            compute: (chunk, sums (T, D)) adds the chunk's rows to its tokens' sums.

        Returns:
            (S, D), and the transfers that fill it.
        """
        cut: Cut = getattr(self.pairs, phase)
        what = "the results" if phase == "forward" else "the gradient of x"
        sums_TD = self.account.empty(what, like_TD.shape, like_TD).zero_()
        own_SD = self.sharing.room(what, sums_TD, self.account)
        under_way: list[Transfer] = []
        for chunk in range(cut.degree):
            with self.recorder.compute(phase, "experts", chunk):
                compute(chunk, sums_TD)
            name = f"{phase} sum {chunk + 1} of {cut.degree}"
            transfer = self.sharing.add(cut.tokens[chunk], sums_TD, own_SD, name)
            self.recorder.transfer(phase, "sum", chunk, transfer)
            under_way.append(transfer)
        return own_SD, under_way


class SummedExperts(torch.autograd.Function):
    """y = Σₖ weights · expert(x), the experts' share of every rank added up.

    Saved for the backward: x, and the experts' pre-activations; rows are gathered from x again.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_SD: torch.Tensor,
        weights_SK: torch.Tensor,
        summing: Summing,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        w3: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (S, D); without shards it is equal on all ranks."""
        pairs, account, activation = summing.pairs, summing.account, summing.activation
        x_TD = summing.gather_tokens("forward", x_SD)
        weights_TK = summing.gather(weights_SK, "the gathering of weights")
        weights_R1 = weights_TK.reshape(-1)[pairs.pairs_R].to(x_TD.dtype).unsqueeze(1)
        shape = len(pairs.pairs_R), w1.shape[2]
        pre_RH = account.empty("the experts' pre-activations", shape, x_TD)
        gate_RH = None if w3 is None else account.empty("the experts' gates", shape, x_TD)
        account.add(weights_R1)
        rooms = summing.rooms("forward", x_TD, pre_RH)

        def compute(chunk: int, sums_TD: torch.Tensor) -> None:
            mine, blocks = pairs.forward.rows[chunk], pairs.forward.blocks[chunk]
            rows = _gather(x_TD, pairs.tokens_R[mine], rooms["rows"])
            pre, gate = multiply(rows, w1, blocks, pre_RH[mine], b1), None
            if w3 is not None and gate_RH is not None:
                gate = multiply(rows, w3, blocks, gate_RH[mine])
            hidden = activate(pre, gate, activation, hidden_room(pre, activation, rooms))
            results = multiply(hidden, w2, blocks, rooms["results"][: len(rows)], b2)
            sums_TD.index_add_(0, pairs.tokens_R[mine], results.mul_(weights_R1[mine]))

        y_SD, under_way = summing.run("forward", compute, x_TD)
        _wait(under_way)
        ctx.summing = summing
        ctx.save_for_backward(x_TD, weights_SK, weights_R1, pre_RH, gate_RH, w1, b1, w2, b2, w3)
        return y_SD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_SD: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and the weights, complete, and of the parameters."""
        summing: Summing = ctx.summing
        with summing.scratch.guard("a backward pass"):
            return _backward(summing, ctx.saved_tensors, grad_SD.contiguous())


def _backward(
    summing: Summing, saved: tuple[Any, ...], grad_SD: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    x_TD, weights_SK, weights_R1, pre_RH, gate_RH, *parameters = saved
    pairs, account = summing.pairs, summing.account
    grad_TD = summing.gather_tokens("backward", grad_SD)
    rooms = summing.rooms("backward", grad_TD, pre_RH)
    experts = ExpertGrads(parameters, summing.activation, pairs.backward.degree, rooms, account)
    grads_R1 = account.empty("the gradients of weights", weights_R1.shape, weights_R1)

    def compute(chunk: int, sums_TD: torch.Tensor) -> None:
        mine, blocks = pairs.backward.rows[chunk], pairs.backward.blocks[chunk]
        tokens = pairs.tokens_R[mine]
        rows = _gather(x_TD, tokens, rooms["rows"])
        grads = _gather(grad_TD, tokens, rooms["grads"])
        weights = ChunkWeights(weights_R1[mine], grads_R1[mine], parameters[3])
        gate = None if gate_RH is None else gate_RH[mine]
        kept = SavedActivations(received_RD=rows, pre_RH=pre_RH[mine], gate_RH=gate)
        experts.run(grads, kept, blocks, grads, weights)
        sums_TD.index_add_(0, tokens, grads)

    grad_x_SD, under_way = summing.run("backward", compute, x_TD)
    grad_weights_TK = weights_SK.new_zeros((len(x_TD), weights_SK.shape[1]))
    grad_weights_TK.view(-1)[pairs.pairs_R] = grads_R1.squeeze(1).to(weights_SK.dtype)
    grad_weights_SK = summing.sharing.room("the gradients of weights", grad_weights_TK, account)
    everything = all_parts(summing.sharing.num_tokens)
    name = "backward sum of the weights' gradients"
    last = summing.sharing.add(everything, grad_weights_TK, grad_weights_SK, name)
    _wait([*under_way, last])
    return grad_x_SD, grad_weights_SK, None, *experts.totals()


def _gather(values_TD: torch.Tensor, tokens: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    return torch.index_select(values_TD, 0, tokens, out=room[: len(tokens)])


def _wait(under_way: list[Transfer]) -> None:
    for transfer in under_way:
        transfer.wait()
