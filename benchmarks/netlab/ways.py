"""Ways to do the same that take turns in one process on each of two ranks of a lab."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from benchmarks.netlab.lab import Lab

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_TIMEOUT_SECONDS = 900.0


def seconds_by_way(
    module: str, work: "DataclassInstance", *, rate_mbit: float, rounds: int
) -> dict[str, list[float]]:
    """Return what the ranks of a benchmark print: seconds of each round, by way.

    Args:
        module: run with `--work` and `--rounds` on each rank; rank 0's last line is JSON.

    Raises:
        MoetuneError: the lab or a rank failed.
    """
    command = [
        *(sys.executable, "-m", module),
        *("--work", json.dumps(asdict(work)), "--rounds", str(rounds)),
    ]
    with Lab(num_ranks=2, rate_mbit=rate_mbit) as lab:
        outputs = lab.run(command, timeout_seconds=_TIMEOUT_SECONDS, echo=sys.stderr)
    found: dict[str, list[float]] = json.loads(outputs[0].stdout.splitlines()[-1])
    return found
