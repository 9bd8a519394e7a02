"""Sums of gradients over the replicas of hot experts, which then take equal steps.

Two exchanges among all ranks of a layer. Of an expert with n replicas each of them sums one n-th of
the gradient: it gets that part from the others, and sends the sum to them behind every backward
phase (`add_up`). A sum is made on one rank, and so is equal on all. Where micro-batches are many,
one sum of a step is enough: each replica then updates its own n-th with it (`sum_parts`), and sends
that to the others behind the optimizer's step (`gather_parts`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch

from moetune.comm.group import Communicator
from moetune.domain.placement import has_replicas, replicas_of

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_NAME = "the sum of gradients over replicas of experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """One of this rank's experts that others have, too.

    Args:
        row: of this rank's parameters.
        ranks: that have it, ascending, this one among them.
    """

    row: int
    ranks: tuple[int, ...]

    def part(self, rank: int, num_values: int) -> slice:
        """Return the part of the expert's values that a rank sums."""
        at, number = self.ranks.index(rank), len(self.ranks)
        return slice(num_values * at // number, num_values * (at + 1) // number)

    def size(self, rank: int, num_values: int) -> int:
        """Return the length of that part."""
        part = self.part(rank, num_values)
        length: int = part.stop - part.start
        return length


def shared_experts(order: Sequence[int], num_ranks: int, rank: int) -> tuple[SharedExpert, ...]:
    """Return a rank's experts with replicas, in the order of the experts.

    Args:
        order: expert of each place.
    """
    each = len(order) // num_ranks
    rows = {expert: row for row, expert in enumerate(order[rank * each : (rank + 1) * each])}
    return tuple(
        SharedExpert(row=rows[expert], ranks=tuple(place // each for place in places))
        for expert, places in enumerate(replicas_of(order))
        if len(places) > 1 and expert in rows
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSums:
    """Sums over the replicas of a layer's experts; all its ranks call them together.

    Args:
        shared: this rank's experts with replicas; those that have none take part, too.
    """

    communicator: Communicator
    shared: tuple[SharedExpert, ...]

    @classmethod
    def of(cls, communicator: Communicator, order: Sequence[int]) -> "ReplicaSums | None":
        """Return the sums of a layer; None where no expert has replicas."""
        if not has_replicas(order):
            return None
        shared = shared_experts(order, communicator.num_ranks, communicator.rank)
        return cls(communicator=communicator, shared=shared)

    def add_up(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Replace gradients of replicas by their sums, in place.

        Args:
            grads: (places, …) of each parameter; None where none is wanted, on all ranks alike.

        Raises:
            CollectiveError: an exchange failed.
        """
        self._change(grads, self._sum_parts, self._gather_parts)

    def sum_parts(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Replace each replica's own part of a gradient by the sum of all replicas', in place.

        Args:
            grads: as of `add_up`.

        Raises:
            CollectiveError: the exchange failed.
        """
        self._change(grads, self._sum_parts)

    def gather_parts(self, values: Sequence[torch.Tensor]) -> None:
        """Replace the parts of replicated experts by those of the replicas that own them, in place.

        Args:
            values: (places, …) of each parameter whose gradients were summed.

        Raises:
            CollectiveError: the exchange failed.
        """
        self._change(values, self._gather_parts)

    def others(self, parameters: Sequence[_Tensor]) -> dict[_Tensor, list[slice]]:
        """Return what other ranks own of this rank's experts: ranges of each parameter's values.

        Args:
            parameters: (places, …) of those whose gradients are summed, as of `sum_parts`.
        """
        sizes = [one[0].numel() for one in parameters]
        found: dict[_Tensor, list[slice]] = {}
        for parameter, size, start in zip(
            parameters, sizes, accumulate(sizes, initial=0), strict=False
        ):
            ranges = found[parameter] = []
            for each in self.shared:
                own, row = each.part(self.communicator.rank, sum(sizes)), each.row * size
                low, high = (min(max(at - start, 0), size) for at in (own.start, own.stop))
                ranges += [slice(row, row + low), slice(row + high, row + size)]
        return found

    def _change(
        self,
        tensors: Sequence[torch.Tensor | None],
        *exchanges: Callable[[Sequence[torch.Tensor], torch.Tensor], None],
    ) -> None:
        """Change the shared experts of tensors, each as one vector of all that it has."""
        found = [one for one in tensors if one is not None]
        if not found:
            return
        values = [torch.cat([one[each.row].reshape(-1) for one in found]) for each in self.shared]
        for exchange in exchanges:
            exchange(values, found[0])
        for each, vector in zip(self.shared, values, strict=True):
            sizes = [one[each.row].numel() for one in found]
            for one, part in zip(found, vector.split(sizes), strict=True):
                one[each.row].copy_(part.view_as(one[each.row]))

    def _sum_parts(self, values: Sequence[torch.Tensor], like: torch.Tensor) -> None:
        """Sum this rank's part of each shared expert over the replicas, in place."""
        rank = self.communicator.rank
        sent, sizes = self._nothing(), self._nothing_sized()
        for each, one in zip(self.shared, values, strict=True):
            for peer in self._others(each):
                sent[peer].append(one[each.part(peer, len(one))])
                sizes[peer].append(each.size(rank, len(one)))
        received = self._exchange(sent, sizes, like)
        for each, one in zip(self.shared, values, strict=True):
            mine = one[each.part(rank, len(one))]
            # In the order of the ranks, and without rounding on the way.
            total = torch.zeros_like(mine, dtype=torch.promote_types(mine.dtype, torch.float32))
            for peer in each.ranks:
                total.add_(mine if peer == rank else next(received[peer]))
            mine.copy_(total)

    def _gather_parts(self, values: Sequence[torch.Tensor], like: torch.Tensor) -> None:
        """Send this rank's parts to the replicas, and get theirs, in place."""
        rank = self.communicator.rank
        sent, sizes = self._nothing(), self._nothing_sized()
        for each, one in zip(self.shared, values, strict=True):
            for peer in self._others(each):
                sent[peer].append(one[each.part(rank, len(one))])
                sizes[peer].append(each.size(peer, len(one)))
        received = self._exchange(sent, sizes, like)
        for each, one in zip(self.shared, values, strict=True):
            for peer in self._others(each):
                one[each.part(peer, len(one))] = next(received[peer])

    def _exchange(
        self,
        sent: Mapping[int, list[torch.Tensor]],
        sizes: Mapping[int, list[int]],
        like: torch.Tensor,
    ) -> dict[int, Iterator[torch.Tensor]]:
        """Return the parts that arrive from each rank, of the sizes that are known of them."""
        leaving = torch.cat(
            [like.new_empty(0), *(part for parts in sent.values() for part in parts)]
        )
        arriving = like.new_empty(sum(map(sum, sizes.values())))
        given = [sum(map(len, parts)) for parts in sent.values()]
        taken = list(map(sum, sizes.values()))
        self.communicator.all_to_all(arriving, leaving, taken, given, _NAME, is_alone=True).wait()
        blocks = arriving.split(taken)
        return {peer: iter(blocks[peer].split(mine)) for peer, mine in sizes.items() if mine}

    def _others(self, shared: SharedExpert) -> Iterator[int]:
        return (peer for peer in shared.ranks if peer != self.communicator.rank)

    def _nothing(self) -> dict[int, list[torch.Tensor]]:
        return {peer: [] for peer in range(self.communicator.num_ranks)}

    def _nothing_sized(self) -> dict[int, list[int]]:
        return {peer: [] for peer in range(self.communicator.num_ranks)}
