"""Progress on stderr, of measurements and of counted work."""

import itertools
import sys
import time
from collections.abc import Callable, Mapping

from moetune.app.recording import Progress
from moetune.cli.render import Screen
from moetune.domain.samples import Sample

_NEW_LINE = "\r\033[K"
_PAUSE_SECONDS = 10.0
_WIDTH = 79


class StatusLine:
    """A status line on stderr: rewritten on a terminal, else printed every ten seconds."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._is_terminal = sys.stderr.isatty() and not screen.quiet
        self._printed_at = time.monotonic()

    def show(self, words: str, seconds_left: float) -> None:
        """Show the finished work and the remaining time."""
        line = f"{words}, {clock(seconds_left)} left"
        if self._is_terminal:
            sys.stderr.write(f"{_NEW_LINE}{line[:_WIDTH]}")
            sys.stderr.flush()
        elif time.monotonic() - self._printed_at >= _PAUSE_SECONDS:
            self._printed_at = time.monotonic()
            self._screen.note(line)

    def counter(self, noun: str, total: int) -> Callable[[str], None]:
        """Return a function that counts a finished item and shows its name."""
        start, numbers = time.monotonic(), itertools.count(1)

        def advance(name: str) -> None:
            number = next(numbers)
            left = (time.monotonic() - start) / number * (total - number)
            self.show(f"{number}/{total} {noun}, {name}", left)

        return advance

    def close(self) -> None:
        """Clear the line."""
        if self._is_terminal:
            sys.stderr.write(_NEW_LINE)


class ScreenProgress(Progress):
    """Progress of a measurement in a status line.

    Args:
        resume: command that measures the points for which the budget was too short.
        longer: command that measures more than all of these points; "" if there is none.

    Attributes:
        num_done, num_points: finished points, and points to measure.
    """

    def __init__(self, screen: Screen, *, resume: str, longer: str = "") -> None:
        self._screen, self._resume, self._longer = screen, resume, longer
        self._line = StatusLine(screen)
        self.num_done = self.num_points = 0

    def start(self, groups: Mapping[str, int], seconds: float) -> None:
        """Print the number of points and the estimated time."""
        self.num_points = sum(groups.values())
        self._screen.note(
            f"{self.num_points} points, about {clock(seconds)} (Ctrl-C stops; finished points stay "
            "stored)"
        )

    def advance(self, sample: Sample, group: str, seconds_left: float) -> None:  # noqa: ARG002 - of other displays
        """Show one more finished point."""
        self.num_done += 1
        self._line.show(f"{self.num_done}/{self.num_points} points, {group}", seconds_left)

    def repeat(self, group: str, seconds_left: float) -> None:
        """Show that points are measured again."""
        self._line.show(f"measuring points again, {group}", seconds_left)

    def finish(self, *, is_complete: bool) -> None:
        """Print what a longer run would add, unless the measurement was interrupted."""
        self._line.close()
        if is_complete and self.num_done < self.num_points:
            self._screen.note(
                f"the budget ended after {self.num_done} of {self.num_points} points, the most "
                "useful groups; the others make ranges narrower and layouts of other sizes known:\n"
                f"  {self._resume}"
            )
        elif is_complete and self._longer:
            self._screen.note(
                "a longer run measures more sizes of GEMMs, exchanges and copies, so that ranges "
                "are narrower and less is extrapolated:\n"
                f"  {self._longer}"
            )


def clock(seconds: float) -> str:
    """Return "45 s", "1 min 50 s" or "2 h 5 min"."""
    rounded = max(round(seconds), 1)
    if rounded < 60:  # noqa: PLR2004 - seconds of a minute
        return f"{rounded} s"
    minutes, rest = divmod(rounded, 60)
    if minutes < 60:  # noqa: PLR2004 - minutes of an hour
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
