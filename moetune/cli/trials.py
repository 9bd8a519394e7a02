"""Progress of a search over layouts on stderr, which Ctrl-C ends with the best so far."""

import signal
import sys
from types import FrameType, TracebackType
from typing import Self

from moetune.cli.progress import bar
from moetune.cli.render import Screen


class TrialsProgress:
    """A bar of the layouts that were tried, on a terminal.

    The first Ctrl-C stops the search, and a second one the program.
    """

    def __init__(self, screen: Screen, num_trials: int) -> None:
        self._screen, self._num_trials = screen, num_trials
        self._is_terminal = sys.stderr.isatty() and not screen.quiet
        self._is_stopped = False
        self._before = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)
        self._write("")

    def goes_on(self, num_tried: int) -> bool:
        """Show how many layouts were tried; return whether to try more."""
        if num_tried == 0:  # until now there was no answer to end with
            signal.signal(signal.SIGINT, self._stop)
        if self._is_stopped:
            self._write("")
            self._screen.note(
                f"interrupted: this is the best after {num_tried} of {self._num_trials} layouts"
            )
            return False
        self._write(bar("layouts ", num_tried, self._num_trials, width=8) + "  (Ctrl-C stops)")
        return True

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._is_stopped = True
        signal.signal(signal.SIGINT, self._before)

    def _write(self, text: str) -> None:
        if self._is_terminal:
            sys.stderr.write(f"\r\033[2K{text}")
            sys.stderr.flush()
