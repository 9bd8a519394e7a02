"""What runs before what: lanes of operations, points in them, and the bytes that each one touches.

A lane is whatever runs its operations one after another: a stream, one collective, a thread of the
host. An operation comes before another only where a lane, a wait or a launch says so, never because
it happened to be issued earlier. Clocks are vector clocks (Mattern 1989): a lane knows, of every
other lane, how many of its operations are over when its own next one begins.

Lanes also carry a simulated time in seconds, by which events can be read and timelines compared.
"""

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point of a lane, as an event keeps it.

    Args:
        known: how many operations of every lane are over here.
        seconds: the simulated time.
    """

    known: Mapping["Lane", int]
    seconds: float


@dataclass(slots=True, eq=False)
class Lane:
    """A queue of operations.

    Attributes:
        known: of every other lane, how many operations the next one here comes after.
        count: of the operations here.
        seconds: when the last one ends, or is waited for.
    """

    name: str
    device: torch.device
    known: dict["Lane", int] = field(default_factory=dict)
    count: int = 0
    seconds: float = 0.0

    def point(self) -> Point:
        """Return the end of the last operation."""
        return Point(known={**self.known, self: self.count}, seconds=self.seconds)

    def follow(self, point: Point) -> None:
        """Begin no further operation before a point is reached."""
        for lane, number in point.known.items():
            if lane is not self:
                self.known[lane] = max(self.known.get(lane, 0), number)
        self.seconds = max(self.seconds, point.seconds)

    def is_past(self, point: Point) -> bool:
        """Return whether the next operation here begins after the point."""
        return all(self.has_seen(lane, number) for lane, number in point.known.items())

    def has_seen(self, lane: "Lane", number: int) -> bool:
        """Return whether the next operation here begins after that one."""
        return lane is self or self.known.get(lane, 0) >= number


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One operation's use of some bytes of a buffer."""

    lane: Lane
    number: int
    low: int
    high: int
    is_write: bool
    label: str

    @property
    def verb(self) -> str:
        """The access in words."""
        return f"{'written' if self.is_write else 'read'} by {self.label} on {self.lane.name}"


@dataclass(slots=True, eq=False)
class Buffer:
    """The memory behind a tensor's storage.

    Attributes:
        home: the lane whose allocations may take the memory once it is freed; None on the host,
            whose allocator waits for the copies itself.
        accesses: those that a later one may have to wait for.
    """

    name: str
    num_bytes: int
    device: torch.device
    home: Lane | None
    is_pinned: bool = False
    accesses: list[Access] = field(default_factory=list)


Region = tuple[Buffer, int, int]
"""A buffer, and the first and one past the last byte of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation as it ran, for comparisons of timelines."""

    label: str
    lane: Lane
    start_seconds: float
    end_seconds: float


class Ledger:
    """Records operations and finds those that should have waited for another.

    Attributes:
        faults: one text for each, in the order in which they were found.
        operations: all, in the order of issue.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.operations: list[Operation] = []
        self._freed: list[tuple[Buffer, Access]] = []
        self._lanes: dict[Lane, None] = {}

    def lanes_of(self, device: torch.device) -> tuple[Lane, ...]:
        """Return a device's lanes that have had operations."""
        return tuple(lane for lane in self._lanes if lane.device == device)

    def run(
        self,
        lane: Lane,
        launcher: Lane,
        label: str,
        *,
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
        seconds: float = 0.0,
    ) -> None:
        """Append an operation to a lane: it comes after what its launcher knows to be over."""
        if lane is not launcher:
            lane.follow(launcher.point())
        self._lanes[lane] = None
        start = lane.seconds
        lane.count += 1
        lane.seconds += seconds
        where = f"{label} at {place()}"
        self.operations.append(
            Operation(label=label, lane=lane, start_seconds=start, end_seconds=lane.seconds)
        )
        for is_write, regions in ((False, reads), (True, writes)):
            for buffer, low, high in regions:
                if low < high:
                    access = Access(
                        lane=lane, number=lane.count, low=low, high=high, is_write=is_write,
                        label=where,
                    )  # fmt: skip
                    self._touch(buffer, access)

    def allocate(self, lane: Lane, launcher: Lane) -> None:
        """Allocate on a lane, perhaps memory that was freed there before."""
        left = []
        for buffer, access in self._freed:
            is_over = any(lane.has_seen(access.lane, access.number) for lane in (lane, launcher))
            if buffer.home is lane and not is_over:
                self.fault(
                    f"{buffer.name}, {access.verb}, was freed and may be handed out again on "
                    f"{lane.name}, which has not waited for that (allocation at {place()})"
                )
            elif buffer.home is not lane:
                left.append((buffer, access))
        self._freed = left

    def free(self, buffer: Buffer, launcher: Lane) -> None:
        """Free a buffer; uses on other lanes must be over when its home allocates again."""
        home = buffer.home
        if home is not None:
            self._freed += [
                (buffer, access)
                for access in buffer.accesses
                if not home.has_seen(access.lane, access.number)
                and not launcher.has_seen(access.lane, access.number)
            ]
        buffer.accesses = []

    def close(self, launcher: Lane) -> None:
        """End: what was freed too early counts, though nothing was allocated since."""
        for home in {buffer.home for buffer, _ in self._freed}:
            if home is not None:
                self.allocate(home, launcher)

    def fault(self, text: str) -> None:
        """Add a fault, once."""
        if text not in self.faults:
            self.faults.append(text)

    def _touch(self, buffer: Buffer, new: Access) -> None:
        kept = []
        lane, low, high = new.lane, new.low, new.high
        for old in buffer.accesses:
            if old.high <= low or high <= old.low:
                kept.append(old)
                continue
            matters = old.is_write or new.is_write
            is_ordered = lane.has_seen(old.lane, old.number)
            if matters and not is_ordered:
                self.fault(f"{buffer.name}, {old.verb}, is {new.verb}, which does not wait for it")
            is_inside = low <= old.low and old.high <= high
            # Whatever waits for the new one then waits for the old one, too.
            is_implied = is_ordered if new.is_write else new.lane is old.lane and not old.is_write
            if not (is_inside and is_implied):
                kept.append(old)
        kept.append(new)
        buffer.accesses = kept


def place() -> str:
    """Return the innermost line outside of the kit and of libraries, as file:line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = _shown(frame.f_code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@functools.cache
def _shown(file: str) -> str | None:
    """Return the name of a file within the repository; None for the kit and for libraries."""
    is_kit = file.startswith(_FOLDER) and not Path(file).name.startswith("test_")
    if not file.startswith(str(ROOT)) or is_kit or "site-packages" in file:
        return None
    return str(Path(file).relative_to(ROOT))
