"""Times of libraries that exchange tokens, by their multiprocessors.

DeepEP sends a token once to each rank that has one of its experts, and so fewer rows than an
all-to-all of (token, expert) pairs. Its time follows the bytes sent, and falls with the
multiprocessors up to those that it can use. With few experts a token it takes longer than that:
of H100's published times 9 % at top-4, a third at top-2 and half at top-1 are missed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from moetune.domain.costs import Estimate
from moetune.domain.errors import ProfileError
from moetune.domain.profile import Profile
from moetune.domain.reference import DispatcherTable, TransferPhase
from moetune.domain.routing import reached
from moetune.fit.curve import curve_through
from moetune.fit.reference import series_of

ROW_BYTES: Mapping[TransferPhase, int] = MappingProxyType({"dispatch": 1800, "combine": 0})
"""Of a row beside its elements (scales, experts, weights), fitted to DeepEP's rows of 2,048 to
7,168 elements on eight H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTransfer:
    """One phase of an exchange of tokens.

    Args:
        tokens: of one rank.
        width_bytes: of one token.
        num_sms: multiprocessors given to the library.
    """

    dispatcher: str
    phase: TransferPhase
    group_size: int
    num_nodes: int = 0
    num_sms: int
    tokens: float
    top_k: int
    width_bytes: float

    @property
    def num_bytes(self) -> float:
        """Bytes of one rank's rows: each token once for every rank that it reaches."""
        width = self.width_bytes + ROW_BYTES[self.phase]
        return self.tokens * width * reached(self.top_k, self.group_size)


def transfer_time(profile: Profile, wanted: TokenTransfer) -> Estimate:
    """Return the time of a transfer.

    Between two known numbers of multiprocessors the logarithm of the time is straight in that of
    the number; above the largest its time holds.

    Raises:
        ProfileError: the profile has no such dispatcher for that group, or only with more
            multiprocessors.
    """
    found = {
        table.num_sms: table
        for table in profile.tables
        if isinstance(table, DispatcherTable) and _is_alike(table, wanted)
    }
    below = max((one for one in found if one <= wanted.num_sms), default=None)
    if below is None:
        raise ProfileError(
            f"profile {profile.name!r} has no {wanted.dispatcher} {wanted.phase} of "
            f"{wanted.group_size} ranks with {wanted.num_sms} multiprocessors"
            f" (it has: {_known(profile.tables, wanted)})",
            "use another dispatcher, or more multiprocessors",
        )
    seconds = _between(found, wanted.num_sms, wanted.num_bytes)
    return Estimate(seconds=seconds, trust="modelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmTimes:
    """A profile's times of dispatchers by their multiprocessors, of any group inside a node.

    The group of a table nearest in size stands for a group that has none: what counts is how the
    time changes with the multiprocessors.
    """

    profile: Profile

    def known(self, dispatcher: str) -> tuple[int, ...]:
        """Return the numbers of multiprocessors with times of both phases, ascending."""
        found = [
            {table.num_sms for table in self._tables(dispatcher) if table.phase == phase}
            for phase in get_args(TransferPhase)
        ]
        return tuple(sorted(set.intersection(*found)))

    def seconds(
        self, dispatcher: str, phase: TransferPhase, *, group_size: int, num_sms: int,
        rows: float, width_bytes: float,
    ) -> float:  # fmt: skip
        """Return the time of a phase that sends so many rows from each rank.

        Args:
            num_sms: among those that are known, or between them.
            width_bytes: of a row.
        """
        tables = [table for table in self._tables(dispatcher) if table.phase == phase]
        nearest = min((table.group_size for table in tables), key=lambda one: abs(one - group_size))
        of_group = {table.num_sms: table for table in tables if table.group_size == nearest}
        return _between(of_group, num_sms, rows * (width_bytes + ROW_BYTES[phase]))

    def _tables(self, dispatcher: str) -> list[DispatcherTable]:
        ranks = self.profile.machine.devices_per_node
        return [
            table
            for table in self.profile.tables
            if isinstance(table, DispatcherTable)
            and table.dispatcher == dispatcher
            and table.group_size <= ranks
        ]


def _between(found: Mapping[int, DispatcherTable], num_sms: int, num_bytes: float) -> float:
    """Return the time with a number of multiprocessors from the smallest known on."""
    below = max(one for one in found if one <= num_sms)
    above = min((one for one in found if one >= num_sms), default=below)
    low = _seconds(found[below], num_bytes)
    if above == below:
        return low
    share = math.log(num_sms / below) / math.log(above / below)
    high = _seconds(found[above], num_bytes)
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


def _is_alike(table: DispatcherTable, wanted: TokenTransfer) -> bool:
    return (table.dispatcher, table.phase, table.group_size, table.num_nodes) == (
        wanted.dispatcher, wanted.phase, wanted.group_size, wanted.num_nodes,
    )  # fmt: skip


def _seconds(table: DispatcherTable, num_bytes: float) -> float:
    series = series_of(table.points)
    return curve_through(sizes=series.sizes, seconds=series.medians).predict(num_bytes).seconds


def _known(tables: Iterable[object], wanted: TokenTransfer) -> str:
    known = sorted(
        {
            (table.group_size, table.num_sms)
            for table in tables
            if isinstance(table, DispatcherTable) and table.phase == wanted.phase
        }
    )
    return ", ".join(f"{ranks} ranks with {sms}" for ranks, sms in known) or "none"
