"""Exchanges that a torch.distributed group is busy with, and the error that names one."""

import contextlib
import threading
from collections.abc import Sequence

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
