"""Links: how rows travel between ranks, asynchronously and in the order of issue."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from moetune.runtime.group_transfer import GroupTransfer, collective_failed


class Transfer(Protocol):
    """An exchange under way; it keeps its tensors alive until it is waited for."""

    def wait(self) -> None:
        """Order the current stream (on a CPU: the caller) behind the end of the exchange.

        Raises:
            CollectiveError: the exchange failed; the text names it.
        """
        ...

    def future(self) -> torch.futures.Future[object] | None:
        """Return a future that completes with the exchange, None where there is none."""
        ...


class Link(Protocol):
    """Exchanges between the ranks that share a layer's experts.

    Every rank issues the same exchanges in the same order, also those of zero rows.
    """

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        ...

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        ...

    def exchange(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        name: str,
        *,
        is_alone: bool,
    ) -> Transfer:
        """Start one all-to-all of rows.

        Args:
            output: (sum of output_splits, width), filled in the order of the source ranks.
            rows: (sum of input_splits, width), contiguous, in the order of the target ranks.
            name: what an error calls the exchange.
            is_alone: whether the phase has too few chunks for a queue on the link.
        """
        ...

    def add(self, values: torch.Tensor, name: str) -> Transfer:
        """Start adding up every rank's contiguous `values`, in place."""
        ...

    def add_shards(
        self, total: torch.Tensor, shards: Sequence[torch.Tensor], name: str
    ) -> Transfer:
        """Start adding up every rank's contiguous `shards`, the r-th on rank r in its `total`."""
        ...

    def gather_shards(self, rows: torch.Tensor, num_rows: Sequence[int], name: str) -> torch.Tensor:
        """Return every rank's rows, one after another, blocking.

        Args:
            num_rows: of every rank.
        """
        ...

    def swap(self, blocks: torch.Tensor, name: str) -> torch.Tensor:
        """Return block r of every rank's `blocks` (num_ranks, …) on rank r, blocking."""
        ...

    def gather(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return every rank's `values` (n,) as (num_ranks, n), blocking."""
        ...

    def gather_texts(self, text: str) -> list[str]:
        """Return every rank's text, blocking."""
        ...


class _Done:
    """A transfer that ended when it was issued."""

    def wait(self) -> None:
        """Return at once."""

    def future(self) -> None:
        """Return no future."""


class LocalLink:
    """One rank: rows stay where they are."""

    num_ranks = 1
    rank = 0

    def exchange(
        self, output: torch.Tensor, rows: torch.Tensor, *_: object, **__: object
    ) -> Transfer:
        """Copy the rows."""
        output.copy_(rows)
        return _Done()

    def add(self, values: torch.Tensor, name: str) -> Transfer:  # noqa: ARG002 - see `Link`
        """Do nothing: the sum is there."""
        return _Done()

    def add_shards(
        self, total: torch.Tensor, shards: Sequence[torch.Tensor], name: str
    ) -> Transfer:
        """Copy the only shard, and add nothing to it."""
        total.copy_(shards[0])
        return self.add(total, name)

    def gather_shards(self, rows: torch.Tensor, *_: object) -> torch.Tensor:
        """Return the rows."""
        return rows

    def swap(self, blocks: torch.Tensor, *_: object) -> torch.Tensor:
        """Return the blocks."""
        return blocks

    def gather(self, values: torch.Tensor, *_: object) -> torch.Tensor:
        """Return the values as the only row."""
        return values.unsqueeze(0)

    def gather_texts(self, text: str) -> list[str]:
        """Return the only text."""
        return [text]


class GroupLink:
    """A torch.distributed group (gloo or NCCL), which orders streams by itself.

    With NCCL the exchange runs on the group's own stream behind what the current stream has
    been given so far; waiting orders the current stream behind it, and the tensors are kept
    alive until then, so that the caching allocator never hands them out early.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group: dist.ProcessGroup | None = group if group is not None else dist.group.WORLD
        self.num_ranks = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)

    def exchange(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        name: str,
        *,
        is_alone: bool,  # noqa: ARG002 - NCCL orders both alike
    ) -> Transfer:
        """Start one all_to_all_single."""
        try:
            work = dist.all_to_all_single(
                output, rows, list(output_splits), list(input_splits),
                group=self._group, async_op=True,
            )  # fmt: skip
        except RuntimeError as error:
            raise collective_failed(name, self.where, error) from error
        return GroupTransfer([work], (output, rows), name, self.where)

    def add(self, values: torch.Tensor, name: str) -> Transfer:
        """Start one all_reduce."""
        try:
            work = dist.all_reduce(values, group=self._group, async_op=True)
        except RuntimeError as error:
            raise collective_failed(name, self.where, error) from error
        return GroupTransfer([work], (values,), name, self.where)

    def add_shards(
        self, total: torch.Tensor, shards: Sequence[torch.Tensor], name: str
    ) -> Transfer:
        """Start one reduce_scatter; shards may differ in size."""
        try:
            work = dist.reduce_scatter(total, list(shards), group=self._group, async_op=True)
        except RuntimeError as error:
            raise collective_failed(name, self.where, error) from error
        return GroupTransfer([work], (total, *shards), name, self.where)

    def gather_shards(self, rows: torch.Tensor, num_rows: Sequence[int], name: str) -> torch.Tensor:
        """Gather the rows, filled up to those of the largest shard: gloo takes no others."""
        most = max(num_rows)
        missing = most - len(rows)
        if missing:
            rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
        filled = rows.new_empty((most * len(num_rows), *rows.shape[1:]))
        parts = filled.split([most] * len(num_rows))
        try:
            dist.all_gather(list(parts), rows, group=self._group)
        except RuntimeError as error:
            raise collective_failed(name, self.where, error) from error
        if most == min(num_rows):
            return filled
        return torch.cat([part[:num] for part, num in zip(parts, num_rows, strict=True)])

    def swap(self, blocks: torch.Tensor, name: str) -> torch.Tensor:
        """Exchange equal blocks."""
        received = torch.empty_like(blocks)
        try:
            dist.all_to_all_single(received, blocks, group=self._group)
        except RuntimeError as error:
            raise collective_failed(name, self.where, error) from error
        return received

    def gather(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Gather equal vectors."""
        parts = [torch.empty_like(values) for _ in range(self.num_ranks)]
        try:
            dist.all_gather(parts, values, group=self._group)
        except RuntimeError as error:
            raise collective_failed(name, self.where, error) from error
        return torch.stack(parts)

    def gather_texts(self, text: str) -> list[str]:
        """Gather texts of any length."""
        texts: list[str] = [""] * self.num_ranks
        try:
            dist.all_gather_object(texts, text, group=self._group)
        except RuntimeError as error:
            raise collective_failed("the exchange of texts", self.where, error) from error
        return texts

    @property
    def where(self) -> str:
        """This rank, for an error."""
        return f"rank {self.rank} of {self.num_ranks}"
