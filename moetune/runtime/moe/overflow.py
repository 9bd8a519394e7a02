"""Steps that a GradScaler skips: all ranks of a layer do, or none.

torch's GradScaler looks at a rank's own gradients. An overflow in one rank's experts alone would
let that rank skip its step, and the others take theirs. torch's ShardedGradScaler agrees, for FSDP;
loops and libraries that make the plain one call the same method for it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from moetune.comm.group import Communicator

_Ranks = Callable[[Optimizer], Iterable[Communicator]]


def agree_on_overflow(ranks_of: _Ranks) -> None:
    """Let every GradScaler of this process agree on overflow, from now on.

    Args:
        ranks_of: gives the ranks that share the experts of an optimizer, in an order that is the
            same on all of them; none for optimizers without experts of several ranks.
    """
    find = GradScaler._unscale_grads_

    @functools.wraps(find)
    def agreed(
        self: GradScaler,
        optimizer: Optimizer,
        *args: Any,  # noqa: ANN401 - as torch passes them
    ) -> dict[torch.device, torch.Tensor]:
        flags = find(self, optimizer, *args)
        for communicator in ranks_of(optimizer):
            _agree(communicator, flags)
        return flags

    GradScaler._unscale_grads_ = agreed  # type: ignore[assignment,method-assign]


def _agree(communicator: Communicator, flags: dict[torch.device, torch.Tensor]) -> None:
    """Replace the flags of overflow by their maximum over the ranks.

    Args:
        flags: 0 or 1 by device; empty on a rank without gradients.
    """
    mine = max((float(flag) for flag in flags.values()), default=0.0)
    values = torch.tensor([mine], dtype=torch.float32, device="cpu")
    agreed = communicator.all_reduce_values(values, "the agreement on overflow", op="max")
    for flag in flags.values():
        flag.fill_(float(agreed))
    if not flags:
        flags[communicator.device] = agreed.to(communicator.device)
