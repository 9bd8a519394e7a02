"""Steps and memory of layouts and layers that are drawn, on machines in turn.

Frozen plans are of usual questions; a term of a rare one is seen here alone.
`python -m tests.golden.drawn` writes them anew.
"""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moetune.app.profiles import named_profile
from moetune.domain.errors import ProfileError
from moetune.domain.targets import TARGETS
from moetune.fit.costs import costs_of
from moetune.solve.model.memory import MemoryModel
from moetune.solve.model.profiled import step_prices
from tests.golden.answers import document
from tests.golden.cases import LAB
from tests.launches.drawn import plans

FILE = Path(__file__).with_name("drawn.json")
LAYERS_FILE = Path(__file__).with_name("drawn_layers.json")
MACHINES = ("h100-x8", "gb200-nvl72", "a100-x8", "h100-x8-efa", "mi300x-x8", "gh200-x4")
COUNT, SEED = 60, 11
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
                "bound by host": step.bound_by_host,
            }  # fmt: skip


PLACES = (
    ("rtx2080ti-x64", "float16", "64"), ("rtx2080ti-x64", "float32", "16"),
    ("rtx2080ti-x16", "float16", "4"), ("a100-x4", "bfloat16", "4"), ("v100-x256", "float16", "8"),
    (LAB, "float32", "2"), (LAB, "float32", "2"), (LAB, "float32", "2"),
)  # fmt: skip
"""Profiles with a dtype and ranks that they have."""
LAYERS: dict[str, tuple[str, ...]] = {
    "--d-model": ("512", "1024", "2048"), "--d-hidden": ("2048", "8192"),
    "--num-experts": ("16", "64"), "--top-k": ("1", "2", "4"),
    "--activation": ("gelu", "swiglu", "relu"), "--tokens": ("1k", "4k", "10k", "48k"),
    "--memory-limit": ("", "", "2GB", "8GB"), "--memory-taken": ("", "", "100MB"),
    "--strategy": ("", "", "", "S1", "S2", "S3", "S4"), "--order": ("", "", "interleaved"),
    "--forward-degree": ("", "", "1", "3", "8"), "--max-degree": ("", "", "6"),
    "--routing": ("", "", "natural"),
}  # fmt: skip
"""Values of the flags of a layer's question; "" for none."""
KEPT = ("layout", "pipeline", "predicted", "memory", "decision")
QUESTIONS = 60


def layers() -> Iterator[dict[str, Any]]:
    """Yield the plan of each layer, or the exit code that refuses the question."""
    draw = random.Random(SEED)
    for _ in range(QUESTIONS):
        place = zip(("--profile", "--dtype", "--world-size"), draw.choice(PLACES), strict=True)
        flags = {**dict(place), **{flag: draw.choice(values) for flag, values in LAYERS.items()}}
        if flags["--profile"] != LAB and flags["--strategy"]:
            flags["--strategy"] = "S4"  # others copy to the host, of which there are no times
        words = [word for flag, value in flags.items() if value for word in (flag, value)]
        code, plan = document("sqlite:///none.db", "plan", *words, "--allow-modelled", "--no-save")
        kept = {key: plan[key] for key in KEPT if key in plan}
        yield {"words": " ".join(words).replace(LAB, "lab"), "code": code, **kept}


if __name__ == "__main__":
    for file, rows in ((FILE, steps()), (LAYERS_FILE, layers())):
        lines = ",\n".join(map(json.dumps, rows))
        file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
