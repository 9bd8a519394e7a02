"""Facts that were copied from data sheets and runtimes' sources, each entered a second time here.

`python -m tests.golden.facts` writes them anew: read the difference against the sources.
"""

import dataclasses
import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from moetune.domain import megatron_models, torch_rules
from moetune.domain.chips import CHIPS, LINK_BYTES_PER_SECOND, PEAK_FLOPS, memory_bytes_per_second
from moetune.domain.optimizers import OPTIMIZERS, layer_optimizer, optimizer_of
from moetune.domain.targets import TARGETS, find_target

FILE = Path(__file__).with_name("facts.json")


def facts() -> dict[str, Any]:
    """Return chips, optimizers and runtimes as JSON has them."""
    shown = {
        "chips": {chip.name: chip for chip in CHIPS},
        "peak_flops": PEAK_FLOPS,
        "link_bytes_per_second": LINK_BYTES_PER_SECOND,
        "memory_bytes_per_second": {
            chip.name: memory_bytes_per_second(chip.name) for chip in CHIPS
        },
        "optimizers": {name: optimizer_of(name) for name in OPTIMIZERS},
        "layer_optimizers": {name: layer_optimizer(name) for name in ("float32", "bfloat16")},
        "runtimes": {name: find_target(name) for name in TARGETS},
        "torchtitan_recipes": torch_rules.RECIPES,
        "bridge_recipes": megatron_models.RECIPES,
        "before": {name: find_target(name) for name in ("megatron@0.16", "bridge@0.3")},
    }
    found: dict[str, Any] = json.loads(json.dumps(plain(shown), sort_keys=True))
    return found


def plain(value: object) -> object:
    """Return a value as JSON has it, without what JSON cannot have."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return plain(fields)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(map(str, value))
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
