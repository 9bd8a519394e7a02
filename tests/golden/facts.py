"""Facts of data sheets, tables and the sources of runtimes, entered a second time here.

Among them are the numbers and tables that modules name: spreads, limits and thresholds.
`python -m tests.golden.facts` writes them anew: read the difference against the sources.
"""

import ast
import dataclasses
import importlib
import json
import math
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from moetune.domain import kernels, megatron_models, torch_rules
from moetune.domain.chips import CHIPS, LINK_BYTES_PER_SECOND, PEAK_FLOPS, memory_bytes_per_second
from moetune.domain.optimizers import OPTIMIZERS, layer_optimizer, optimizer_of
from moetune.domain.targets import TARGETS, find_target

ROOT = Path(__file__).parents[2]
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
        "kernels": {name: value for name, value in vars(kernels).items() if name.isupper()},
        "numbers": dict(numbers()),
        "before": {name: find_target(name) for name in ("megatron@0.16", "bridge@0.3")},
    }
    values: dict[str, Any] = json.loads(json.dumps(plain(shown), sort_keys=True))
    return values


def numbers() -> Iterator[tuple[str, object]]:
    """Yield the numbers and tables that modules name, by module and name."""
    for package in ("domain", "fit", "solve", "app"):
        for path in sorted((ROOT / "moetune" / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            named = vars(importlib.import_module(module))
            for name in _assigned(path):
                if name.isupper() and _is_number(named[name]):
                    yield f"{module}.{name}", named[name]


def _assigned(path: Path) -> list[str]:
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _leaves(value: object) -> Iterator[object]:
    """Yield what a table has at the ends of its tables."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _is_number(value: object) -> bool:
    """Return whether a value is a number, or a table of numbers and texts."""
    leaves = [*_leaves(value)]
    numbers = [leaf for leaf in leaves if isinstance(leaf, int | float) and math.isfinite(leaf)]
    num_texts = sum(isinstance(leaf, str) for leaf in leaves)
    return bool(numbers) and len(numbers) + num_texts == len(leaves)


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
