"""Steps and memory of layouts that are drawn for each runtime, on machines in turn.

Frozen plans are of usual layouts; a term of a rare one is seen here alone.
`python -m tests.golden.drawn` writes them anew.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moetune.app.profiles import named_profile
from moetune.app.training import step_prices
from moetune.domain.errors import ProfileError
from moetune.domain.targets import TARGETS
from moetune.fit.costs import costs_of
from moetune.solve.model.memory import MemoryModel
from tests.launches.drawn import plans

FILE = Path(__file__).with_name("drawn.json")
MACHINES = ("h100-x8", "gb200-nvl72", "a100-x8", "h100-x8-efa", "mi300x-x8")
COUNT, SEED = 20, 11
"""Layouts of each runtime, and where their drawing begins."""


def steps() -> Iterator[dict[str, Any]]:
    """Yield the step and the fullest rank of each layout, part by part."""
    profiles = {name: named_profile(name, store=None).profile for name in MACHINES}
    for name in TARGETS:
        pairs = zip(itertools.cycle(MACHINES), plans(name, COUNT, SEED), strict=False)
        for machine, planned in pairs:
            row: dict[str, Any] = {
                "target": name,
                "machine": machine,
                "model": planned.job.decoder.name,
            }
            costs = costs_of(profiles[machine], allow_modelled=True)
            prices = step_prices(planned.job, planned.target, profiles[machine], costs)
            memory = MemoryModel(job=planned.job, stages=prices.stages, target=planned.target)
            row["bytes"] = dict(memory.peak(planned.layout).parts)
            try:
                step = prices.step(planned.layout)
            except ProfileError:  # no numbers of that width
                yield row
                continue
            yield row | {
                "seconds": step.seconds, "parts": dict(step.parts),
                "hidden": [step.hidden_by_shared_experts, step.bound_by_host],
            }  # fmt: skip


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(row) for row in steps())
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
