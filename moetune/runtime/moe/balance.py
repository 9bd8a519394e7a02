"""The balance loss of a batch, and of a half of one whose other half takes turns with it.

E experts.
"""

from dataclasses import dataclass, replace

import torch

from moetune.domain.errors import InputError
from moetune.runtime.moe.turns import current_batch, current_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How evenly a gate chose its experts for some tokens, before any drop.

    Args:
        mean_E: mean probabilities, with gradients.
        share_E: each expert's share of the pairs.
        num_tokens: (), at least 1.
    """

    mean_E: torch.Tensor
    share_E: torch.Tensor
    num_tokens: torch.Tensor

    def loss(self) -> torch.Tensor:
        """Return E · Σₑ fₑ·pₑ, with fₑ the share of expert e and pₑ its mean probability."""
        return _loss(self.share_E, self.mean_E)

    def part_of_loss_with(self, other: "Balance") -> torch.Tensor:
        """Return this half's part of the loss of both; values and gradients of the parts add up.

        Args:
            other: of the other half; it gets no gradient.
        """
        mine, others = (one.num_tokens.to(self.mean_E.dtype) for one in (self, other))
        part = mine / (mine + others)
        share_E = part * self.share_E + (1 - part) * other.share_E
        return part * _loss(share_E, self.mean_E)


def _loss(share_E: torch.Tensor, mean_E: torch.Tensor) -> torch.Tensor:
    with torch.autocast(mean_E.device.type, enabled=False):
        return len(mean_E) * (share_E * mean_E).sum()


class BalanceLosses:
    """A layer's balance losses, one for each batch in flight."""

    def __init__(self) -> None:
        self._balances = dict[int, Balance]()
        self._losses = dict[int, torch.Tensor]()
        self._are_halves = self._lacks_gradients = False
        self._name = object()

    def __reduce__(self) -> tuple[type["BalanceLosses"], tuple[()]]:
        """Copies of a layer have no loss: torch copies no tensor of a graph."""
        return BalanceLosses, ()

    def note(self, balance: Balance, *, trains: bool) -> None:
        """Take the balance of this thread's batch, and tell its other half."""
        self._lacks_gradients = trains and not torch.is_grad_enabled()
        batch, turn = current_batch(), current_turn()
        self._balances[batch], self._losses[batch] = balance, balance.loss()
        self._are_halves = turn is not None and turn.halves is not None
        if turn is not None:
            # A graph here would hold itself: its functions hold what the halves tell each other.
            told = replace(balance, mean_E=balance.mean_E.detach())
            turn.tell(self._name, told)

    def set(self, loss: torch.Tensor) -> None:
        """Put a loss in the place of this thread's batch's."""
        self._balances.pop(current_batch(), None)
        self._lacks_gradients = False
        self._losses[current_batch()] = loss

    def get(self) -> torch.Tensor | None:
        """Return the loss of this thread's batch, or of half a batch its part; None before any.

        Behind a step in halves it is the whole batch's, without gradients.

        Raises:
            InputError: the batch's other half has not passed the layer; or the training pass ran
                without gradients, and the loss is asked for with them.
        """
        if self._lacks_gradients and torch.is_grad_enabled():
            raise InputError(
                "the balance loss of the last training pass has no gradient: the layer ran under "
                "no_grad, as torch's checkpoint with use_reentrant=True does",
                "checkpoint with use_reentrant=False; or read aux_loss inside of the checkpointed "
                "function, or under torch.no_grad() for its value alone",
            )
        turn, mine = current_turn(), self._balances.get(current_batch())
        if not self._are_halves or mine is None:
            return self._losses.get(current_batch())
        if turn is None:
            other = self._balances[1]
            return (mine.part_of_loss_with(other) + other.part_of_loss_with(mine)).detach()
        found = turn.ask(self._name)
        if not isinstance(found, Balance):
            raise InputError(
                "half of a batch passed a layer of experts that the other one did not pass",
                "give both halves to the same model",
            )
        return mine.part_of_loss_with(found)
