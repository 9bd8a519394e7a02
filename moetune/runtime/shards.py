"""Who has which tokens in a tensor-parallel group: every rank all of them, or a shard each.

T tokens of the group. With shards, as between sequence-parallel neighbours, the input is
all-gathered and sums are reduce-scattered, forward and backward: each is the other's conjugate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moetune.runtime.account import Account
from moetune.runtime.links import Link, Transfer

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

    def room(self, what: str, sums: torch.Tensor, account: Account) -> torch.Tensor:
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

    def room(self, _: str, sums: torch.Tensor, __: Account) -> torch.Tensor:
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

    def room(self, what: str, sums: torch.Tensor, account: Account) -> torch.Tensor:
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
