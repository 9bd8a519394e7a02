"""What the ranks that share a book tell each other between steps."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from moetune.domain.errors import InputError, MoetuneError, RankMismatchError
from moetune.runtime.links import Link, collective_failed

T = TypeVar("T")


class Council:
    """The ranks of a group; without torch.distributed this rank alone.

    Args:
        group: default, the world. All its ranks make the same calls in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        is_alone = not (dist.is_available() and dist.is_initialized())
        self._group = group
        self.num_ranks = 1 if is_alone else dist.get_world_size(group)
        self.is_first = is_alone or dist.get_rank(group) == 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks.

        Raises:
            CollectiveError: the exchange failed.
        """
        if self.num_ranks == 1:
            return [value]
        values: list[T | None] = [None] * self.num_ranks
        with self._named():
            dist.all_gather_object(values, value, group=self._group)
        return [one for one in values if one is not None]

    def hear(self, say: Callable[[], T]) -> T:
        """Return on every rank what `say` returns on the first.

        Raises:
            MoetuneError: what `say` raised, on every rank.
            CollectiveError: the exchange failed.
        """
        parcel: list[tuple[T | None, MoetuneError | None]] = [(None, None)]
        if self.is_first:
            try:
                parcel = [(say(), None)]
            except MoetuneError as error:
                parcel = [(None, error)]
        if self.num_ranks > 1:
            with self._named():
                dist.broadcast_object_list(parcel, group=self._group, group_src=0)
        value, failure = parcel[0]
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value] # None only where `say` returned it

    def compare(self, digest: str, what: str) -> None:
        """Raise RankMismatchError on every rank unless all have the same digest."""
        digests = self.gather(digest)
        if len(set(digests)) > 1:
            raise RankMismatchError(f"{what} differ between ranks: {', '.join(digests)}")

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            where = f"rank {dist.get_rank(self._group)} of {self.num_ranks}"
            raise collective_failed("the plan book's exchange", where, error) from error


_HASH_BYTES = 7


def agree_on_tokens(
    link: Link, *, num_tokens: int, signature: str, problem: str, device: torch.device
) -> tuple[int, ...]:
    """Return every rank's tokens, once all ranks have shown the same signature.

    Args:
        signature: what must be equal on all ranks: shapes, dtype, plan.
        problem: what is wrong with this rank's input, empty when nothing is; it travels, so
            that no other rank waits for this one.

    Raises:
        InputError: one rank alone has a problem with its input.
        RankMismatchError: the ranks differ, or one has a problem; the same text on all.
        CollectiveError: the exchange failed.
    """
    if link.num_ranks == 1:
        if problem:
            raise InputError(problem)
        return (num_tokens,)
    hashed = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:_HASH_BYTES], "big")
    mine = torch.tensor([num_tokens, hashed, bool(problem)], dtype=torch.int64, device=device)
    rows = link.gather(mine, "the agreement on tokens").tolist()
    if any(row[2] for row in rows) or len({row[1] for row in rows}) > 1:
        texts = link.gather_texts(f"error: {problem}" if problem else signature)
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        raise RankMismatchError(
            f"the ranks of the layer's group disagree\n{lines}",
            "give every rank the same layer, plan and dtype, and tensors of the same width",
        )
    return tuple(int(row[0]) for row in rows)
