"""Exchanges that a torch.distributed group is busy with, and the error that names one."""

import contextlib
import threading
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from moetune.domain.errors import CollectiveError


class GroupTransfer:
    """What a group was given to do, in one or several pieces of work."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        tensors: tuple[torch.Tensor, ...],
        name: str,
        where: str,
    ) -> None:
        self._works = works
        self._tensors: tuple[torch.Tensor, ...] = tensors
        self._name = name
        self._where = where
        self._watched: torch.futures.Future[object] | None = None

    def wait(self) -> None:
        """Order the current stream, or the caller, behind the end of all of it.

        Raises:
            CollectiveError: a piece failed.
        """
        try:
            if self._watched is None:
                for work in self._works:
                    work.wait()
            else:
                self._watched.wait()
        except RuntimeError as error:
            raise collective_failed(self._name, self._where, error) from error
        self._works, self._tensors = (), ()

    def future(self) -> torch.futures.Future[object]:
        """Return the group's future, or one that a thread completes.

        gloo has none for a reduce-scatter, nor for sends and receives.
        """
        if self._watched is not None:
            return self._watched
        if len(self._works) == 1:
            with contextlib.suppress(RuntimeError):
                return self._works[0].get_future()
        self._watched = torch.futures.Future()
        threading.Thread(target=_watch, args=(self._works, self._watched)).start()
        return self._watched


def _watch(works: Sequence[dist.Work], watched: "torch.futures.Future[object]") -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        watched.set_exception(error)
    else:
        watched.set_result(None)


def collective_failed(name: str, where: str, error: Exception) -> CollectiveError:
    """Return the error that names an exchange and the rank that saw it fail."""
    return CollectiveError(
        f"{name} failed on {where}: {str(error).splitlines()[0] if str(error) else error!r}",
        "a rank died, left early or was too slow: look at the other ranks' output",
    )


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


_NUM_TAGS = 2**20


class GlooLink(GroupLink):
    """Point-to-point exchanges between CPU tensors, in the order of issue on every pair."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self._issued = 0

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
        """Post all receives, then all sends; in a queue, leave it to gloo."""
        if not is_alone:
            return super().exchange(
                output, rows, output_splits, input_splits, name, is_alone=is_alone
            )
        tag = self._issued % _NUM_TAGS
        self._issued += 1
        arriving, leaving = output.split(list(output_splits)), rows.split(list(input_splits))
        others = [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]
        try:
            works = [
                dist.irecv(arriving[rank], group=self._group, group_src=rank, tag=tag)
                for rank in reversed(others)
                if len(arriving[rank])
            ]
            works += [
                dist.isend(leaving[rank], group=self._group, group_dst=rank, tag=tag)
                for rank in others
                if len(leaving[rank])
            ]
        except RuntimeError as error:
            raise collective_failed(name, self.where, error) from error
        arriving[self.rank].copy_(leaving[self.rank])
        return GroupTransfer([work for work in works if work], (output, rows), name, self.where)


def link_of(group: dist.ProcessGroup | None, *, device: torch.device) -> Link:
    """Return the link of a group: None is the world, or one rank without torch.distributed."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return LocalLink()
    if dist.get_world_size(group) == 1:
        return LocalLink()
    return GlooLink(group) if device.type == "cpu" else GroupLink(group)
