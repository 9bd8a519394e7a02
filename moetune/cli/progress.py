"""Progress of a measurement on stderr: bars on a terminal, else a line every ten seconds."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence

from moetune.cli.render import Screen
from moetune.domain.samples import Sample
from moetune.workflows.profile_quality import GroupSummary
from moetune.workflows.recording import Progress

_BAR_WIDTH = 24
_PAUSE_SECONDS = 10.0


class ScreenProgress(Progress):
    """A bar for each group of points on a terminal, else a line every ten seconds.

    Args:
        resume: command that measures the points for which the budget was too short.
        longer: command that measures more than all of these points; "" where there is none.
    """

    def __init__(self, screen: Screen, *, resume: str, longer: str = "") -> None:
        self._screen, self._resume, self._longer = screen, resume, longer
        self._is_terminal = sys.stderr.isatty() and not screen.quiet
        self._total: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._printed_at = 0.0
        self.num_failed = 0
        self.seconds = 0.0

    @property
    def num_done(self) -> int:
        """Finished points."""
        return sum(self._done.values())

    @property
    def num_points(self) -> int:
        """Points to measure."""
        return sum(self._total.values())

    def start(self, groups: Mapping[str, int], seconds: float) -> None:
        """Print the number of points and the estimated time."""
        self._total, self._done = dict(groups), dict.fromkeys(groups, 0)
        self.seconds = seconds
        about = clock(seconds)
        self._screen.note(
            f"{self.num_points} points, about {about} (Ctrl-C stops; finished points stay stored)"
        )
        self._printed_at = time.monotonic()
        if self._is_terminal:
            sys.stderr.write("\n" * len(groups))

    def advance(self, sample: Sample, group: str, seconds_left: float) -> None:
        """Advance the group's bar."""
        self._done[group] += 1
        self.num_failed += bool(sample.error)
        self._show(group, f"{self.num_done}/{self.num_points} points", seconds_left)

    def repeat(self, group: str, seconds_left: float) -> None:
        """Show that points are measured again."""
        self._show(group, "measuring points again", seconds_left)

    def _show(self, group: str, words: str, seconds_left: float) -> None:
        if self._is_terminal:
            self._paint(group, seconds_left)
        elif time.monotonic() - self._printed_at >= _PAUSE_SECONDS:
            self._printed_at = time.monotonic()
            self._screen.note(f"{words}, {clock(seconds_left)} left")

    def _paint(self, active: str, seconds_left: float) -> None:
        """Rewrite the lines of all groups."""
        lines = [f"\033[{len(self._total)}F"]
        for group, total in self._total.items():
            left = f"{clock(seconds_left)} left" if group == active else ""
            shown = bar(group, self._done[group], total, width=_width(self._total))
            lines.append(f"\033[2K{shown}  {left}\n")
        sys.stderr.write("".join(lines))
        sys.stderr.flush()

    def finish(self, summaries: Sequence[GroupSummary]) -> None:
        """Print the quality of each group."""
        if self._is_terminal and self._total:
            sys.stderr.write(f"\033[{len(self._total)}F\033[J")
        width = _width([one.group for one in summaries])
        for one in summaries:
            done = one.num_points - one.num_failed
            error = (
                ""
                if one.median_error is None
                else f"   median error {100 * one.median_error:.1f} %"
            )
            shown = bar(one.group, done, one.num_points, width=width)
            line = f"{shown}  {one.quality:<8}{error}"
            self._screen.note(line.rstrip())
        if summaries and self.num_done < self.num_points:
            self._screen.note(
                f"the budget ended after {self.num_done} of {self.num_points} points, the most "
                "useful ones; the others make ranges narrower and layouts of other sizes known:\n"
                f"  {self._resume}"
            )
        elif summaries and self._longer:
            self._screen.note(
                "a longer run measures more sizes of GEMMs, exchanges and copies, so that ranges "
                "are narrower and less is extrapolated:\n"
                f"  {self._longer}"
            )


def bar(group: str, done: int, total: int, *, width: int) -> str:
    """Return "GEMM  ━━━━━━╸    21/44", the name in `width` characters."""
    halves = 2 * _BAR_WIDTH * done // max(total, 1)
    full = "━" * (halves // 2) + "╸" * (halves % 2)
    return f"{group:<{width}}{full:<{_BAR_WIDTH}} {f'{done}/{total}':>7}"


def _width(groups: Iterable[str]) -> int:
    return max((len(group) + 1 for group in groups), default=0)


def clock(seconds: float) -> str:
    """Return "45 s", "1 min 50 s" or "2 h 5 min"."""
    rounded = max(round(seconds), 1)
    if rounded < 60:  # noqa: PLR2004 - seconds of a minute
        return f"{rounded} s"
    minutes, rest = divmod(rounded, 60)
    if minutes < 60:  # noqa: PLR2004 - minutes of an hour
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
