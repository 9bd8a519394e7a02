"""The experts' loads while a layer trains, from counts that the host reads anyway.

Nothing is exchanged until the record is asked for. L local experts, S steps, P ranks.
"""

from collections import deque
from collections.abc import Sequence
from operator import add

import torch

from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.domain.routing_record import RoutingRecord, record_of
from moetune.runtime.autograd import is_in_backward

MOST_STEPS = 1024
"""The number of newest steps for which each rank remembers its rows."""


class LoadRecorder:
    """The rows of this rank's experts, summed over steps, and the rows of each recent step."""

    def __init__(self, num_local: int) -> None:
        self._totals_L = [0] * num_local
        self._rows_S: deque[int] = deque(maxlen=MOST_STEPS)
        self._num_without_gradients = 0

    def add_pass(self, rows_CL: Sequence[Sequence[int]]) -> None:
        """Add the rows of a training step's forward pass once, even if it is computed again.

        A checkpoint computes the pass again in the backward pass. A reentrant checkpoint runs the
        first pass without gradients, as passes that do not train do: only the second pass counts.
        """
        is_again, is_counted = is_in_backward(), torch.is_grad_enabled()
        if not is_again:
            self._num_without_gradients = 0 if is_counted else self._num_without_gradients + 1
        elif is_counted:
            is_counted = self._num_without_gradients > 0
            self._num_without_gradients -= is_counted
        if is_counted:
            self.add(rows_CL)

    def add(self, rows_CL: Sequence[Sequence[int]]) -> None:
        """Add a step's rows, [chunk][local expert]."""
        step_L = rows_CL[0] if len(rows_CL) == 1 else list(map(sum, zip(*rows_CL, strict=True)))
        self._totals_L = list(map(add, self._totals_L, step_L))
        self._rows_S.append(sum(step_L))

    def clear(self) -> None:
        """Forget all steps."""
        self._totals_L = [0] * len(self._totals_L)
        self._rows_S.clear()
        self._num_without_gradients = 0

    def record(self, communicator: Communicator, *, top_k: int) -> RoutingRecord:
        """Return the record of all ranks' experts; all ranks call this together."""
        num_steps = len(self._rows_S)
        mine = [num_steps, *self._totals_L, *self._rows_S]
        values = torch.zeros(
            1 + len(self._totals_L) + MOST_STEPS, dtype=torch.int64, device=communicator.device
        )
        values[: len(mine)] = torch.tensor(mine, dtype=torch.int64, device="cpu")
        rows = communicator.all_gather_values(values, "the gathering of experts' loads").tolist()
        steps = [row[0] for row in rows]
        if min(steps) != max(steps):
            raise InputError(
                f"ranks recorded from {min(steps)} to {max(steps)} steps",
                "record, and forget, on all ranks alike",
            )
        first = 1 + len(self._totals_L)
        totals_E = [total for row in rows for total in row[1:first]]
        rows_SP = list(zip(*(row[first : first + num_steps] for row in rows), strict=True))
        return record_of(rows_SP, totals_E, top_k=top_k, num_ranks=len(rows))
