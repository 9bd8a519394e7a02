"""`StopRequest`: a scheduler's signal, which all ranks heed after the same step."""

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Self

from moetune.comm.agree import vote
from moetune.comm.gloo import check_joined, communicator_of, shared_communicator
from moetune.domain.errors import InputError

EXIT_CODE = 128 + signal.SIGTERM
"""Of a job that SIGTERM has ended before its last step, as shells have it."""


class StopRequest:
    """A signal that asks the job to end: see `is_agreed`.

    While the context is open the signals no longer end the process; before and after they do what
    they did.

        with moetune.StopRequest() as stop:
            for step in range(num_steps):
                ...
                if stop.is_agreed():
                    break

    All ranks of the world make one together, behind `init_process_group`.

    Args:
        signals: default SIGTERM, which Slurm, Kubernetes and torchrun send.

    Raises:
        InputError: there is no process group yet.
        ValueError: another thread than the main one opens the context (`signal.signal`).
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> None:
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, object] = {}
        self._has_come = False
        check_joined("the request to stop")
        self._communicator = shared_communicator()

    def __enter__(self) -> Self:
        for each in self._signals:
            self._before[each] = signal.signal(each, self._note)
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)  # type: ignore[arg-type] # as `signal` returned it
        self._before.clear()

    def is_agreed(self) -> bool:
        """Return whether any rank has had a signal; all ranks of the world call this together.

        One number is reduced over the ranks: call it once a step, after the optimizer's.

        Raises:
            InputError: ranks have joined since it was made.
            CollectiveError: a rank left.
        """
        if self._communicator.num_ranks != communicator_of(None).num_ranks:
            raise InputError(
                "StopRequest was made before init_process_group, and would stop one rank alone",
                "make it behind torch.distributed.init_process_group()",
            )
        return vote(self._communicator, self._has_come, "the vote on the end of the job")()

    def _note(self, _: int, __: FrameType | None) -> None:
        self._has_come = True
