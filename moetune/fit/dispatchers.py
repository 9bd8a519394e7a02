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
    above = min((one for one in found if one >= wanted.num_sms), default=None)
    if below is None:
        raise ProfileError(
            f"profile {profile.name!r} has no {wanted.dispatcher} {wanted.phase} of "
            f"{wanted.group_size} ranks with {wanted.num_sms} multiprocessors"
            f" (it has: {_known(profile.tables, wanted)})",
            "use another dispatcher, or more multiprocessors",
        )
    low = _seconds(found[below], wanted.num_bytes)
    if above is None or above == below:
        return Estimate(seconds=low, trust="modelled")
    high = _seconds(found[above], wanted.num_bytes)
    share = math.log(wanted.num_sms / below) / math.log(above / below)
    return Estimate(seconds=low ** (1 - share) * high**share, trust="modelled")


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
