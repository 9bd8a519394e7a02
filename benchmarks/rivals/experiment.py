"""Train every variant alone, then all of them in turns on each link, in one run."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks.netlab.lab import Lab
from benchmarks.netlab.profiled import profile_of
from benchmarks.rivals.case import DTYPE, NUM_RANKS, Case
from benchmarks.rivals.predicted import Planned, planned_ways
from benchmarks.rivals.ranks import Work
from moetune.domain.document import canonical_json
from moetune.domain.errors import MoetuneError

_TIMEOUT_SECONDS = 1800.0
_ALONE_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A variant in processes of its own, on loopback without a limit.

    Args:
        seconds: of its steps but the first.
        losses: of all steps, means over the ranks.
        peak_bytes: most resident memory of a rank's process.
        error: why it could not train; its last line.
    """

    variant: str
    seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    peak_bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One link.

    Args:
        ways: those of ours.
        seconds: raw step times by variant, in the order of the rounds.
    """

    rate_mbit: float
    ways: tuple[Planned, ...]
    seconds: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run.

    Args:
        imbalance: the busiest expert's tokens over the mean, in the first step.
        alone: of all variants, those of ours last.
    """

    case: Case
    imbalance: float
    alone: tuple[Alone, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What is run.

    Args:
        rivals: names in `ranks`.
        budget: of each profile, as `moetune profile --budget` takes it.
        env: of the ranks.
        folder: for weights and databases.
        echo: where progress goes.
    """

    case: Case
    rates_mbit: tuple[float, ...]
    rivals: tuple[str, ...]
    rounds: int
    budget: str
    env: Mapping[str, str]
    folder: Path
    echo: TextIO

    def run(self) -> Result:
        """Run everything.

        A rival that cannot train has its error in the result, and is in no link's rounds.

        Raises:
            MoetuneError: the lab, a profile, a variant of ours, or all in turns failed.
        """
        imbalance = self.case.save_model(self._weights)
        rivals = tuple(self._alone(name) for name in self.rivals)
        usable = tuple(one.variant for one in rivals if not one.error)
        cells = tuple(self._cell(rate, usable) for rate in self.rates_mbit)
        ways = dict.fromkeys(way.variant for cell in cells for way in cell.ways)
        ours = tuple(self._alone(name) for name in ways)
        for one in ours:
            if one.error:
                raise MoetuneError(f"{one.variant} cannot train: {one.error}")
        return Result(
            case=self.case, imbalance=imbalance, alone=(*rivals, *ours), cells=cells
        )  # fmt: skip

    @property
    def _weights(self) -> Path:
        return self.folder / "weights"

    def _alone(self, variant: str) -> Alone:
        print(f"{variant} alone", file=self.echo, flush=True)
        with Lab(num_ranks=NUM_RANKS, rate_mbit=None) as lab:
            try:
                found = self._train(lab, (variant,), _ALONE_ROUNDS)
            except MoetuneError as error:
                return Alone(variant=variant, error=str(error).strip().splitlines()[-1])
        return Alone(
            variant=variant, seconds=tuple(found["seconds"][variant]),
            losses=tuple(found["losses"][variant]), peak_bytes=found["peak_bytes"],
        )  # fmt: skip

    def _cell(self, rate_mbit: float, rivals: Sequence[str]) -> Cell:
        shape = self.case.transformer
        folder = self.folder / f"{rate_mbit:g}"
        folder.mkdir()
        with Lab(num_ranks=NUM_RANKS, rate_mbit=rate_mbit) as lab:
            profile = profile_of(
                lab, shape, tokens=self.case.tokens, dtype=DTYPE, budget=self.budget,
                folder=folder, echo=self.echo,
            )  # fmt: skip
            ways = planned_ways(self.case, profile)
            variants = (*(way.variant for way in ways), *rivals)
            found = self._train(lab, variants, self.rounds)
        seconds = {name: tuple(each) for name, each in found["seconds"].items()}
        return Cell(rate_mbit=rate_mbit, ways=ways, seconds=seconds)

    def _train(self, lab: Lab, variants: tuple[str, ...], rounds: int) -> dict[str, Any]:
        work = Work(case=self.case, folder=str(self._weights), variants=variants)
        command = [
            *(sys.executable, "-m", "benchmarks.rivals.ranks", "--work", canonical_json(work)),
            *("--rounds", str(rounds)),
        ]
        outputs = lab.run(
            command, timeout_seconds=_TIMEOUT_SECONDS, env=self.env, echo=self.echo
        )  # fmt: skip
        found: dict[str, Any] = json.loads(outputs[0].stdout.splitlines()[-1])
        return found
