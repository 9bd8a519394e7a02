"""The launch oracle: drawn questions, their free plans, and the runtimes' own judgement.

    python -m tests.launch --draws 200 --target megatron@0.16 --target bridge@0.3

Judges run in the environment of `make launch-oracle` (`.venv-launch`). Versions that PyPI has for
Python 3.12 alone are judged from their sources: `MOETUNE_LAUNCH_SOURCES` names a folder with
`mlm-0.18.2`, `bridge-0.5.1` and the like, which are the repositories at those tags.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moetune.domain.targets import find_target
from tests.launch.draw import Drawn, answered, questions

JUDGES = Path(__file__).parent / "judges"
PACKAGED = {"megatron": "0.16.1", "bridge": "0.3.1"}
"""Versions that PyPI has for Python 3.11."""
_TORCH = os.environ.get("MOETUNE_LAUNCH_TORCH", ".venv-launch-torch/bin/python")
PYTHONS = {"transformers": sys.executable, "torchtitan": _TORCH, "deepspeed": _TORCH}
"""Other environments than Megatron's: that of the tests, and the one of `make launch-torch`."""
_BRIDGE = Path(os.environ.get("MOETUNE_LAUNCH_BRIDGE", ".venv-launch-bridge"))
"""The environment of `make launch-bridge`, whose transformers Bridge 0.5 and 0.6 pin."""
CORES = {"0.3.1": "0.16.1", "0.4.2": "0.17.1", "0.5.1": "0.18.2", "0.6.0": "0.19.0"}
"""Megatron-Core that each version of Megatron-Bridge pins."""
TRANSFORMERS = {"0.4.2": "transformers-5.3"}
"""Folders in that environment with the transformers that another version pins."""


def sources_of(target: str, version: str, folder: str) -> list[str] | None:
    """Return the sources that a judge reads; None where there are none and it needs some."""
    paths = [Path(folder) / f"mlm-{version}"]
    if target == "bridge":
        paths = [Path(folder) / f"bridge-{version}/src", Path(folder) / f"mlm-{CORES[version]}"]
        paths += [_BRIDGE.resolve() / TRANSFORMERS[version]] if version in TRANSFORMERS else []
    if folder and all(path.is_dir() for path in paths):
        return [os.pathsep.join(map(str, paths))]
    return [] if PACKAGED.get(target, version) == version else None


def python_of(target: str, version: str, python: str) -> str:
    """Return the interpreter of a version's judge; `python` is that of Megatron's packages."""
    if target == "bridge" and version != PACKAGED["bridge"]:
        return str(_BRIDGE / "bin/python")
    return PYTHONS.get(target, python)


def verdicts(jobs: Sequence[dict[str, Any]], *, python: str, folder: str) -> dict[int, str]:
    """Return what the runtime's judge says of each job, by its number; "" for nothing."""
    refusals: dict[int, str] = {}
    groups = {(job["target"], job["version"]) for job in jobs}
    for target, version in sorted(groups):
        sources = sources_of(target, version, folder)
        judge = JUDGES / f"{target}_judge.py"
        runs = python_of(target, version, python)
        if sources is None or not judge.is_file() or not Path(runs).is_file():
            continue
        mine = [job for job in jobs if (job["target"], job["version"]) == (target, version)]
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps(job) + "\n" for job in mine)
            file.flush()
            done = subprocess.run(
                [runs, "-W", "ignore", str(judge), file.name, *sources],
                capture_output=True, text=True, check=False,
                env={**os.environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if len(lines) != len(mine):
            raise RuntimeError(f"the judge of {target} {version} failed: {done.stderr[-2000:]}")
        refusals |= {line["number"]: line["refusal"] for line in lines}
    return refusals


def report(drawn: Iterable[Drawn], problems: dict[int, str]) -> int:
    """Print what was drawn and what was refused, and return the number of refusals."""
    counts, refusals = Counter[str](), 0
    for case in drawn:
        what = problems.get(case.question.number)
        if case.is_refused_by_export or what:
            refusals += 1
            print(f"REFUSED  {case.question.command}\n         {what or case.refused}")
        elif case.job is None:
            counts["refused by name before planning"] += 1
        else:
            counts["not judged" if what is None else "accepted"] += 1
    print(f"{refusals} refused, " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    return refusals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", default=[])
    parser.add_argument("--python", default=".venv-launch/bin/python")
    parser.add_argument("--sources", default=os.environ.get("MOETUNE_LAUNCH_SOURCES", ""))
    parser.add_argument("--keep", type=Path, help="write the jobs to this file, for a judge")
    asked = parser.parse_args()
    targets = asked.target or ["megatron@0.16", "bridge@0.3"]
    for target in targets:
        find_target(target)
    drawn = []
    for question in questions(asked.draws, seed=asked.seed, targets=targets):
        drawn.append(answered(question))
        print(f"\r{len(drawn)} planned", end="", file=sys.stderr)
    jobs = [case.job for case in drawn if case.job is not None]
    if asked.keep:
        asked.keep.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    return bool(report(drawn, verdicts(jobs, python=asked.python, folder=asked.sources)))


if __name__ == "__main__":
    raise SystemExit(main())
