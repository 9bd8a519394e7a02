"""Phases that reuse memory as arrays: what they are, and what their operations take."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import Floats
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed
from moetune.domain.layer import Phase
from moetune.solve.layer.reuse import ChunkKind, ReusedChunk

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyPhases:
    """Phases that reuse memory, n of them.

    Args:
        kinds: of the phases.
        kind: index of each phase's kind, shape (n,).
        degree: chunks, shape (n,).
        durations: seconds of a chunk's operations as in `reuse.Durations`, shape (5, n).
        speeds: of operations beside others, the entries of `speeds_of`, shape (9, n).
    """

    kinds: Sequence[ChunkKind]
    kind: Ints
    degree: Ints
    durations: Floats
    speeds: Floats

    @classmethod
    def of(
        cls, chunk: ReusedChunk, phase: Phase, *, degree: int, interference: Interference
    ) -> "ManyPhases":
        """Return one phase of equal chunks."""
        return cls(
            kinds=(chunk.kind(phase),), kind=np.zeros(1, np.int64), degree=np.array([degree]),
            durations=np.array(chunk.durations)[:, None],
            speeds=np.array(speeds_of(interference))[:, None],
        )  # fmt: skip

    def only(self, chosen: Bools | Ints) -> "ManyPhases":
        """Return some of the phases."""
        return ManyPhases(
            kinds=self.kinds, kind=self.kind[chosen], degree=self.degree[chosen],
            durations=self.durations[:, chosen], speeds=self.speeds[:, chosen],
        )  # fmt: skip


def joined(parts: Sequence[ManyPhases]) -> ManyPhases:
    """Return the phases of all parts."""
    before = np.cumsum([0, *(len(one.kinds) for one in parts)])
    return ManyPhases(
        kinds=[kind for one in parts for kind in one.kinds],
        kind=np.concatenate([one.kind + at for at, one in zip(before, parts, strict=False)]),
        degree=np.concatenate([one.degree for one in parts]),
        durations=np.hstack([one.durations for one in parts]),
        speeds=np.hstack([one.speeds for one in parts]),
    )


def _places() -> dict[tuple[str, str], int]:
    table = Interference()
    names = [
        (victim.name, one.name)
        for victim in fields(table)
        for one in fields(getattr(table, victim.name))
    ]
    return {name: place for place, name in enumerate(names)}


PLACES = _places()
_SPEEDS = attrgetter(*(f"{victim}.{beside}" for victim, beside in PLACES))
COMP_BESIDE_COMM, COMM_BESIDE_COMP = PLACES["comp", "comm"], PLACES["comm", "comp"]
"""Places of the two speeds that depend on the exchange's size among those of `speeds_of`."""


def speeds_of(table: Interference) -> tuple[float, ...]:
    """Return the table's nine speeds: of comp, comm and mem beside both others, and all."""
    found: tuple[float, ...] = _SPEEDS(table)
    return found


def table_of(speeds: Sequence[float]) -> Interference:
    """Return the table with the nine speeds of `speeds_of`."""
    of: dict[str, dict[str, float]] = {victim: {} for victim, _ in PLACES}
    for (victim, beside), place in PLACES.items():
        of[victim][beside] = speeds[place]
    return Interference(
        comp=CompSpeed(**of["comp"]), comm=CommSpeed(**of["comm"]), mem=MemSpeed(**of["mem"])
    )
