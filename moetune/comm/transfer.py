"""Transfers that were issued and are waited for: collectives, with their errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from moetune.domain.errors import CollectiveError

Wait = Callable[[], None]
"""Makes the current stream, or the host on a CPU, wait for a transfer."""
_MANY_RANKS = 16
_ADVICE = "a rank died, left early or was too slow: look at the other ranks' output"
_ADVICE_ON_GPU = (
    "with TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_TRACE_BUFFER_SIZE=2000 every rank leaves a list "
    "of its collectives, which torchfrtrace compares"
)


class Transfer(Protocol):
    """A collective under way; its tensors live until it is waited for."""

    def wait(self) -> None:
        """Order the current stream (on a CPU: the caller) behind the end of the collective.

        Raises:
            CollectiveError: the collective failed; never on a GPU, where only torch's watchdog
                learns of it.
        """
        ...

    def future(self) -> torch.futures.Future[object] | None:
        """Return a future that completes with the collective, None if it is complete already."""
        ...


class Done:
    """A transfer that was complete when it was issued."""

    def wait(self) -> None:
        """Return at once."""

    def future(self) -> None:
        """Return None: it is complete."""


@dataclass(frozen=True, slots=True)
class GroupRank:
    """A rank of a group, as errors name it.

    Args:
        members: the group's ranks in the world, in order.
    """

    rank: int
    members: tuple[int, ...]

    def error(
        self, collective: str, name: str, tensors: Sequence[torch.Tensor], cause: Exception
    ) -> CollectiveError:
        """Return the error with the names of collective, sizes, group and rank.

        Args:
            collective: torch's name of it.
            name: the caller's name of it.
            tensors: its arguments.
        """
        sizes = ", ".join(
            f"{'x'.join(map(str, tensor.shape)) or 1} {str(tensor.dtype).removeprefix('torch.')}"
            for tensor in tensors
        )
        of_sizes = f" of {sizes}" if sizes else ""
        reason = str(cause).splitlines()[0] if str(cause) else repr(cause)
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        return CollectiveError(
            f"{name} failed on rank {self.rank} of {len(self.members)}: {reason} "
            f"({collective}{of_sizes} among {_spelled(self.members)})",
            f"{_ADVICE}; {_ADVICE_ON_GPU}" if on_gpu else _ADVICE,
        )


class GroupTransfer:
    """A transfer of a process group: one or several of torch's works."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        tensors: tuple[torch.Tensor, ...],
        collective: str,
        name: str,
        group_rank: GroupRank,
    ) -> None:
        self._works = works
        self._tensors = tensors
        self._collective = collective
        self._name = name
        self._group_rank = group_rank

    def wait(self) -> None:
        """Order the current stream (on a CPU: the caller) behind the end of all works.

        Raises:
            CollectiveError: one failed.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._group_rank.error(
                self._collective, self._name, self._tensors, error
            ) from error
        self._works, self._tensors = (), ()

    def future(self) -> torch.futures.Future[object]:
        """Return the future of the only work, which layers' exchanges and sums have."""
        (work,) = self._works
        future: torch.futures.Future[object] = work.get_future()
        return future


def _spelled(members: Sequence[int]) -> str:
    """Return the ranks in words: consecutive ones by the first and last, others one by one."""
    first, last = members[0], members[-1]
    if len(members) > 1 and list(members) == list(range(first, last + 1)):
        return f"ranks {first} to {last} of the world"
    shown = ", ".join(map(str, members[:_MANY_RANKS]))
    return f"ranks {shown}{', …' if len(members) > _MANY_RANKS else ''} of the world"
