"""The balance loss of a layer's last forward pass.

E experts.
"""

import torch

from moetune.domain.errors import InputError


def balance_loss(share_E: torch.Tensor, mean_E: torch.Tensor) -> torch.Tensor:
    """Return E · Σₑ fₑ·pₑ, with fₑ the share of expert e and pₑ its mean probability, ().

    Args:
        share_E: each expert's share of the pairs, before any drop.
        mean_E: mean probabilities, with gradients.
    """
    with torch.autocast(mean_E.device.type, enabled=False):
        return len(mean_E) * (share_E * mean_E).sum()


class LastLoss:
    """The balance loss of a layer's last forward pass."""

    def __init__(self) -> None:
        self._loss: torch.Tensor | None = None
        self._lacks_gradients = False

    def __reduce__(self) -> tuple[type["LastLoss"], tuple[()]]:
        """Copies of a layer have no loss: torch copies no tensor of a graph."""
        return LastLoss, ()

    def put(self, loss: torch.Tensor, *, trains: bool = False) -> None:
        """Keep a loss; where it trains, it is to have gradients."""
        self._loss, self._lacks_gradients = loss, trains and not torch.is_grad_enabled()

    def get(self) -> torch.Tensor | None:
        """Return the loss; None before any.

        Raises:
            InputError: the training pass ran without gradients, and the loss is asked for with
                them.
        """
        if self._lacks_gradients and torch.is_grad_enabled():
            raise InputError(
                "the balance loss of the last training pass has no gradient: the layer ran under "
                "no_grad, as torch's checkpoint with use_reentrant=True does",
                "checkpoint with use_reentrant=False; or read aux_loss inside of the checkpointed "
                "function, or under torch.no_grad() for its value alone",
            )
        return self._loss
