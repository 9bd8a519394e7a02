"""A phase with reused memory at the tokens' rank: rows leave, and results come back to them."""

from functools import partial

import torch

from moetune.runtime.links import Transfer
from moetune.runtime.reuse_phase import Chunks
from moetune.runtime.rings import Ring, Rotation


class TokenSide:
    """Sends tokens' rows and adds what comes back, in one rotation of buffers for both.

    A buffer more than a chunk has dispatches is enough where combines go first, and the link
    never waits for it. The next chunk's rows take the place of those that the experts wait for
    anyway, while the results of the chunk before are on the link; results take the place of
    earlier results or of rows at the experts, while the next chunk's rows are on the link.

    Args:
        sum_TD: (T, D), zeros; what comes back is added here.
    """

    def __init__(self, chunks: Chunks, ring: Ring, sum_TD: torch.Tensor) -> None:
        self._chunks, self._rotation, self._sum_TD = chunks, Rotation(ring), sum_TD
        self._use_of: dict[int, int] = {}

    def send(self, chunk: int, values_TD: torch.Tensor, room: torch.Tensor) -> None:
        """Send the chunk's rows of `values_TD`; what arrives here goes to `room`."""
        rows = self._rotation.take(self._chunks.num_sent[chunk])
        torch.index_select(values_TD, 0, self._chunks.tokens[chunk], out=rows)
        self._rotation.until(self._chunks.dispatch(chunk, rows, room).wait)

    def bring_back(self, chunk: int, results: torch.Tensor) -> None:
        """Send the experts' results back."""
        rows = self._rotation.take(self._chunks.num_sent[chunk])
        transfer = self._chunks.combine(chunk, results, rows)
        self._use_of[chunk] = self._rotation.until(partial(self._add, chunk, rows, transfer))

    def settle(self, chunk: int) -> None:
        """Wait until the chunk's results are back, and so have left the experts' buffer."""
        if chunk in self._use_of:
            self._rotation.finish(self._use_of.pop(chunk))

    def end(self) -> torch.Tensor:
        """Return the sum, with everything that was under way."""
        self._rotation.end()
        return self._sum_TD

    def _add(self, chunk: int, rows: torch.Tensor, transfer: Transfer) -> None:
        transfer.wait()
        self._sum_TD.index_add_(0, self._chunks.tokens[chunk], rows)


def num_travelling(num_dispatches: int, degree: int) -> int:
    """Return the buffers of the rotation, for that many dispatches a chunk."""
    return num_dispatches + (degree > 1)
