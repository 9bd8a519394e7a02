"""Public launch files, read where they lie: `python -m benchmarks.public_launches CLONE…`.

Each shell script, configuration and recipe of the clones is read as `moetune check` reads it.
Writes docs/results/launches.md: how many give a layout, and of which runtime.
"""

import argparse
import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from moetune.domain.errors import MoetuneError
from moetune.launches.files import open_launch
from moetune.launches.reading import Asked

RESULT = Path(__file__).parents[1] / "docs/results/launches.md"
_SAYS_TRAINING = re.compile(
    r"(tensor|pipeline|expert)[_-]model[_-]parallel[_-]size|per_device_train_batch_size|"
    r"zero_optimization|zero_stage|fsdp_version|expert_parallel_degree|data_parallel_shard_degree"
)
_ENDINGS = frozenset({".sh", ".toml", ".json", ".yaml", ".yml"})
_RANKS = 64


def main() -> None:
    """Read the clones' launches and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("clones", type=Path, nargs="+")
    arguments = parser.parse_args()
    rows = [_row(clone) for clone in arguments.clones]
    RESULT.write_text(_PAGE.format(rows="\n".join(rows)), encoding="utf-8")


def _row(clone: Path) -> str:
    """Return the table's row of a clone, whose folder is named OWNER+NAME."""
    targets = [_target(*launch) for launch in _launches(clone)]
    read = Counter(filter(None, targets))
    words = ("git", "-C", str(clone), "rev-parse", "--short", "HEAD")
    commit = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    kinds = ", ".join(f"{number} {name}" for name, number in sorted(read.items()))
    name = clone.name.replace("+", "/")
    return f"| {name} at `{commit}` | {len(targets)} | {read.total()} | {kinds} |"


def _launches(clone: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield files that say a training, with their texts, and functions of recipes."""
    for file in sorted(clone.rglob("*")):
        if file.suffix not in _ENDINGS | {".py"} or not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.suffix == ".py":
            if "recipes" in file.parts or file.name == "config_registry.py":
                makers = (node.name for node in ast.parse(text).body
                          if isinstance(node, ast.FunctionDef) and "parallel" in ast.unparse(node)
                          and not node.name.startswith("_"))  # fmt: skip
                yield from ((file, text, name) for name in makers)
        elif _SAYS_TRAINING.search(text) and len(text) < 2**20:
            yield file, text, ""


def _target(file: Path, text: str, function: str) -> str:
    """Return the runtime of a launch, "" where it gives a message."""
    extra = (function,) if function else ()
    asked = Asked(extra=extra, world_size=_RANKS, reads_files=False, folder=file.parent)
    try:
        launch = open_launch(file.name, text, asked)
        list(launch.problems(None))
    except MoetuneError:
        return ""
    return launch.reading.target.name


_PAGE = f"""\
# Public launch files

Scripts, configurations and recipe functions of public repositories that name a size of a layout, a
batch a device or a ZeRO stage, read by `moetune check` on {_RANKS} ranks where they do not say
theirs (`python -m benchmarks.public_launches`). None crashes.

| repository | files and functions | give a layout | of which runtime |
|---|---:|---:|---|
{{rows}}

The others give one message: a model that the registry does not have, a variable or a length without
a value, no model, or another engine than those that are read.

Eleven launches whose authors reported them as broken have that break as the first problem
(`tests/launches/test_broken_launches.py`): layers that pipeline ranks do not divide (Megatron-LM
1304 and 468, ms-swift 5737, Megatron-Bridge 5884), ranks that the experts' sizes do not divide
(slime 1818, Megatron-Bridge 5754, twice), no sequence parallelism (NeMo-Framework-Launcher 309),
and memory (LLaMA-Factory 2518 and 2379, TRL 1268).
"""

if __name__ == "__main__":
    main()
