"""The caller's work behind a layer's exchanges, such as shared experts: see `function`."""

from collections.abc import Callable

import torch

from moetune.domain.errors import InputError
from moetune.runtime.selective import HiddenModes

SharedWork = Callable[[], torch.Tensor]
"""Gives what shared experts make of a layer's input, shaped as it."""


class CallersWork:
    """The work of one call, under the caller's autocast and the caller's modes.

    Args:
        x: the layer's input.
        modes: that do not see the layer.
    """

    def __init__(self, work: SharedWork, x: torch.Tensor, modes: HiddenModes) -> None:
        self._work, self._x, self._modes = work, x, modes
        kind = x.device.type
        self._autocast = torch.autocast(
            kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )  # fmt: skip
        self._result = torch.empty(0)

    def __call__(self) -> None:
        """Do the work.

        Raises:
            InputError: it changes the layer's input, whose later chunks have not left yet, or
                returns another shape.
        """
        x = self._x
        before = None if x.is_inference() else x._version  # noqa: SLF001 - as autograd does
        with self._modes.seeing(), self._autocast:
            self._result = self._work()
        if before is not None and x._version != before:  # noqa: SLF001
            raise InputError(
                "shared experts change their input in place while its rows travel to the experts",
                "let them compute on a copy",
            )
        if self._result.shape != x.shape:
            raise InputError(
                f"shared experts return {tuple(self._result.shape)} for tokens {tuple(x.shape)}",
                "they return what they are given, in shape",
            )

    def added_to(self, y: torch.Tensor) -> torch.Tensor:
        """Return the sum of the experts' outputs and the work's, in the dtype of those."""
        return y + self._result.to(y.dtype)
