"""Progress of a measurement on stderr."""

import sys
import time
from collections.abc import Mapping
from typing import Self

from moetune.app.recording import Progress
from moetune.cli.render import Screen
from moetune.domain.samples import Sample

_NEW_LINE = "\r\033[K"
_PAUSE_SECONDS = 10.0
_BAR = 20
"""Characters of a bar."""


class ScreenProgress(Progress):
    """One line that is written anew on a terminal, else a line every ten seconds.

    Args:
        resume: command that measures the points for which the budget was too short.
        longer: command that measures more than all of these points; "" where there is none.

    Attributes:
        num_done, num_points: finished points, and points to measure.
    """

    def __init__(self, screen: Screen, *, resume: str, longer: str = "") -> None:
        self._screen, self._resume, self._longer = screen, resume, longer
        self._is_terminal = sys.stderr.isatty() and not screen.quiet
        self._printed_at = 0.0
        self.num_done = self.num_points = 0

    def start(self, groups: Mapping[str, int], seconds: float) -> None:
        """Print the number of points and the estimated time."""
        self.num_points, self._printed_at = sum(groups.values()), time.monotonic()
        self._screen.note(
            f"{self.num_points} points, about {clock(seconds)} (Ctrl-C stops; finished points stay "
            "stored)"
        )

    def advance(self, sample: Sample, group: str, seconds_left: float) -> None:  # noqa: ARG002 - of other displays
        """Show one more finished point."""
        self.num_done += 1
        self._show(f"{self.num_done}/{self.num_points} points, {group}", seconds_left)

    def repeat(self, group: str, seconds_left: float) -> None:
        """Show that points are measured again."""
        self._show(f"measuring points again, {group}", seconds_left)

    def _show(self, words: str, seconds_left: float) -> None:
        line = f"{words}, {clock(seconds_left)} left"
        if self._is_terminal:
            _write(line)
        elif time.monotonic() - self._printed_at >= _PAUSE_SECONDS:
            self._printed_at = time.monotonic()
            self._screen.note(line)

    def finish(self, *, is_complete: bool) -> None:
        """Print what a longer run would add, where the measurement was not interrupted."""
        if self._is_terminal and self.num_points:
            sys.stderr.write(_NEW_LINE)
        if is_complete and self.num_done < self.num_points:
            self._screen.note(
                f"the budget ended after {self.num_done} of {self.num_points} points, the most "
                "useful ones; the others make ranges narrower and layouts of other sizes known:\n"
                f"  {self._resume}"
            )
        elif is_complete and self._longer:
            self._screen.note(
                "a longer run measures more sizes of GEMMs, exchanges and copies, so that ranges "
                "are narrower and less is extrapolated:\n"
                f"  {self._longer}"
            )


class Counter:
    """A bar on stderr of what is done; without a terminal nothing.

    Args:
        noun: of what is counted, in the plural.

    Attributes:
        total: of what there is to do.
    """

    def __init__(self, screen: Screen, noun: str) -> None:
        self._is_shown = sys.stderr.isatty() and not screen.quiet
        self._noun, self._done, self._start = noun, 0, time.monotonic()
        self.total = 0

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def advance(self, name: str) -> None:
        """Count what is done, and show its name."""
        self._done += 1
        filled = round(_BAR * self._done / self.total)
        left = (time.monotonic() - self._start) / self._done * (self.total - self._done)
        bar = f"[{'#' * filled}{'.' * (_BAR - filled)}]"
        words = f"{self._done}/{self.total} {self._noun}, {clock(left)} left: {name}"
        self._write(f"{bar} {words}"[:79])

    def _write(self, line: str) -> None:
        if self._is_shown:
            _write(line)


def _write(line: str) -> None:
    """Write a line in the place of the last one."""
    sys.stderr.write(f"{_NEW_LINE}{line}")
    sys.stderr.flush()


def clock(seconds: float) -> str:
    """Return "45 s", "1 min 50 s" or "2 h 5 min"."""
    rounded = max(round(seconds), 1)
    if rounded < 60:  # noqa: PLR2004 - seconds of a minute
        return f"{rounded} s"
    minutes, rest = divmod(rounded, 60)
    if minutes < 60:  # noqa: PLR2004 - minutes of an hour
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
