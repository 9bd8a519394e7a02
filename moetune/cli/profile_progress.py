"""A measurement's progress on stderr: bars on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence

from moetune.cli.render import Screen
from moetune.domain.samples import Sample
from moetune.workflows.measuring import GroupSummary

_BAR_WIDTH = 24
_PAUSE_SECONDS = 10.0


class ScreenProgress:
    """One line for each group of points."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._is_terminal = sys.stderr.isatty() and not screen.quiet
        self._total: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._said = 0.0
        self.num_failed = 0

    @property
    def num_done(self) -> int:
        """Points that were finished."""
        return sum(self._done.values())

    @property
    def num_points(self) -> int:
        """Points to measure."""
        return sum(self._total.values())

    def start(self, groups: Mapping[str, int], seconds: float) -> None:
        """Say how much there is to do."""
        self._total, self._done = dict(groups), dict.fromkeys(groups, 0)
        about = clock(seconds)
        self._screen.note(f"{self.num_points} points, about {about} (Ctrl-C keeps what is done)")
        self._said = time.monotonic()
        if self._is_terminal:
            sys.stderr.write("\n" * len(groups))

    def advance(self, sample: Sample, group: str, seconds_left: float) -> None:
        """Move the group's bar, or say a line where ten seconds have passed."""
        self._done[group] += 1
        self.num_failed += bool(sample.error)
        if self._is_terminal:
            self._paint(group, seconds_left)
        elif time.monotonic() - self._said >= _PAUSE_SECONDS:
            self._said = time.monotonic()
            self._screen.note(
                f"{self.num_done}/{self.num_points} points, {clock(seconds_left)} left"
            )

    def repeat(self, group: str, seconds_left: float) -> None:
        """Say that what is noisy is measured again."""
        if self._is_terminal:
            self._paint(group, seconds_left)
        elif time.monotonic() - self._said >= _PAUSE_SECONDS:
            self._said = time.monotonic()
            self._screen.note(f"noisy points again, {clock(seconds_left)} left")

    def _paint(self, active: str, seconds_left: float) -> None:
        """Write all lines again over the old ones."""
        lines = [f"\033[{len(self._total)}F"]
        for group, total in self._total.items():
            left = f"{clock(seconds_left)} left" if group == active else ""
            shown = bar(group, self._done[group], total, width=_width(self._total))
            lines.append(f"\033[2K{shown}  {left}\n")
        sys.stderr.write("".join(lines))
        sys.stderr.flush()

    def finish(self, summaries: Sequence[GroupSummary]) -> None:
        """Say how good each group became."""
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
                f"the budget ended after {self.num_done} of {self.num_points} points: "
                "--resume measures the rest"
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
    whole = max(round(seconds), 1)
    if whole < 60:  # noqa: PLR2004 - seconds of a minute
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:  # noqa: PLR2004 - minutes of an hour
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
