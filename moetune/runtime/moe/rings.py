"""Buffers that chunks use in turn: rings at the experts, and a rotation at the tokens.

The memory policy `reuse` allocates them from the workspace, and its handlers use them.

T tokens, N rows this rank sends, D model width.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from moetune.comm.group import Transfer
from moetune.runtime.moe.dispatch import Dispatch
from moetune.runtime.moe.executor import DispatchedPhase
from moetune.runtime.moe.workspace import Workspace

RingShape = tuple[int, int, int]
"""A ring's number of buffers, and the rows and the width of each buffer."""


class Ring:
    """Buffers of one kind that chunks use in turn: a chunk has a buffer until the next takes it.

    Args:
        buffers: (rows of the largest chunk, width) each.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers

    def __len__(self) -> int:
        """Return the number of buffers."""
        return len(self._buffers)

    @property
    def whole(self) -> torch.Tensor:
        """The first buffer, or the only buffer, with the rows of the largest chunk."""
        return self._buffers[0]

    def of(self, chunk: int, rows: int) -> torch.Tensor:
        """Return the chunk's buffer (rows, width) with its present content."""
        return self._buffers[chunk % len(self._buffers)][:rows]


def make_rings(
    workspace: Workspace, shapes: Mapping[str, RingShape], like: torch.Tensor
) -> dict[str, Ring]:
    """Return a phase's rings by name, all cut from the workspace at once.

    Raises:
        AllocationError: the buffers do not fit in memory.
    """
    buffers = workspace.buffers(
        {
            f"{name} {place}": (rows, width)
            for name, (number, rows, width) in shapes.items()
            for place in range(number)
        },
        like,
    )
    return {
        name: Ring([buffers[f"{name} {place}"] for place in range(number)])
        for name, (number, _, _) in shapes.items()
    }


class TokenExchange:
    """The dispatch of tokens' rows and the sum of their results, in one rotation of buffers.

    A buffer goes to its next use once its last use has ended. If combines go first, a chunk's
    number of dispatches plus one buffer are enough, and transfers never wait for a buffer. The next
    chunk's rows overwrite rows whose arrival the experts wait for anyway, while the previous
    chunk's results travel. Results overwrite earlier results, or rows that have arrived, while the
    next chunk's rows travel.

    It has no reference to its phase, so that no cycle keeps their buffers after the step.

    Args:
        sum_TD: (T, D), receives the sums of each token's results.
    """

    def __init__(self, dispatch: Dispatch, ring: Ring, sum_TD: torch.Tensor) -> None:
        self._dispatch = dispatch
        self._num_sent = [rows.stop - rows.start for rows in dispatch.sent]
        self._ring, self._sum_TD = ring, sum_TD
        self._num_uses = 0
        self._endings: dict[int, Callable[[], None]] = {}
        self._use_of: dict[int, int] = {}

    def dispatch(
        self, phase: DispatchedPhase, chunk: int, values_TD: torch.Tensor, into: torch.Tensor
    ) -> None:
        """Send the chunk's rows of `values_TD`; rows for this rank's experts arrive in `into`."""
        rows = self._take(self._num_sent[chunk])
        tokens = self._dispatch.tokens_M[self._dispatch.sent[chunk]]
        torch.index_select(values_TD, 0, tokens, out=rows)
        transfer = phase.send(chunk, rows, into)
        self._endings[self._num_uses - 1] = transfer.wait

    def combine(self, phase: DispatchedPhase, chunk: int, results: torch.Tensor) -> None:
        """Send the experts' results back."""
        rows = self._take(self._num_sent[chunk])
        transfer = phase.send_back(chunk, results, rows)
        self._use_of[chunk] = self._num_uses - 1
        self._endings[self._num_uses - 1] = partial(self._add, chunk, rows, transfer)

    def wait_for(self, chunk: int) -> None:
        """Wait for the chunk's results, which have then left the experts' buffer."""
        if chunk in self._use_of:
            self._end_use(self._use_of.pop(chunk))

    def finish(self) -> torch.Tensor:
        """Return the sum, once all results have arrived."""
        for use in sorted(self._endings):
            self._end_use(use)
        return self._sum_TD

    def _take(self, rows: int) -> torch.Tensor:
        """Return the buffer for the next use, once its last use has ended."""
        self._end_use(self._num_uses - len(self._ring))
        self._num_uses += 1
        return self._ring.of(self._num_uses - 1, rows)

    def _end_use(self, use: int) -> None:
        """Wait for the end of a use, if it has not ended yet."""
        ending = self._endings.pop(use, None)
        if ending is not None:
            ending()

    def _add(self, chunk: int, rows: torch.Tensor, transfer: Transfer) -> None:
        transfer.wait()
        tokens = self._dispatch.tokens_of(chunk)
        part = self._dispatch.sent[chunk]
        self._dispatch.sums.into(rows, part, self._sum_TD, tokens)
