"""Multiprocessors of dispatchers with kernels of their own: what other numbers than theirs change.

Inside a node the time of an exchange follows the times that are known by the number of
multiprocessors, relative to the dispatcher's own number, at which prices are as without it. What
goes between nodes is the network's. While an exchange is hidden, its multiprocessors are missing to
the computation; what the dispatcher's own number takes is in the share that overlap hides.
"""

from typing import Protocol

from moetune.domain.chips import chip_of
from moetune.domain.reference import TransferPhase
from moetune.domain.training import DEFAULT_SMS, FoldedLayout

_HOPPER_SMS = 132
"""Of an H100 with SXM; devices whose number is not known are taken to be alike."""


class TransferTimes(Protocol):
    """Times of a machine's dispatchers by their multiprocessors."""

    def known(self, dispatcher: str) -> tuple[int, ...]:
        """Return the numbers of multiprocessors that have times, ascending."""
        ...

    def seconds(
        self, dispatcher: str, phase: TransferPhase, *, group_size: int, num_sms: int,
        rows: float, width_bytes: float,
    ) -> float:  # fmt: skip
        """Return the time of a phase inside a node that sends so many rows from each rank."""
        ...


def slowdown(
    times: TransferTimes, layout: FoldedLayout, phase: TransferPhase, *, group_size: int,
    rows: float, width_bytes: float,
) -> float:  # fmt: skip
    """Return an exchange's time inside a node over that with the dispatcher's own number."""
    now, usual = (
        times.seconds(
            layout.dispatcher, phase, group_size=group_size, num_sms=num_sms, rows=rows,
            width_bytes=width_bytes,
        )
        for num_sms in (layout.sms, DEFAULT_SMS[layout.dispatcher])
    )  # fmt: skip
    return now / usual


def hidden_share(layout: FoldedLayout, device: str) -> float:
    """Return what hiding an exchange gains, over that with the dispatcher's own number.

    In S multiprocessors, n of them for the exchange, computation has S − n: while n instead of n₀
    are missing it gets (S − n) / (S − n₀) of what it did.
    """
    if layout.has_usual_sms:
        return 1.0
    chip = chip_of(device)
    every = chip.num_sms if chip and chip.num_sms else _HOPPER_SMS
    return (every - layout.sms) / (every - DEFAULT_SMS[layout.dispatcher])
