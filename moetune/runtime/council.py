"""What the ranks that share a book tell each other between steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from moetune.domain.errors import MoetuneError, RankMismatchError
from moetune.runtime.group_transfer import collective_failed

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
