"""Faults put in by chance, one at a time: how many of them do the tests notice?

    python -m benchmarks.mutants collect            # once: which test runs which line
    python -m benchmarks.mutants run --count 120    # a sample; writes docs/results/mutants.md

Faults are cosmic-ray's (`pip install 'moetune[mutants]'`), drawn evenly over lines. Each is tried
in a copy of the tree against the tests that run its line, the quickest first.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("domain", "fit", "solve", "workflows")
COLLECTED = ROOT / ".mutants.json"
RESULT = ROOT / "docs" / "results" / "mutants.md"
PATIENCE_SECONDS = 240
MOST_TESTS = 60
OPERATORS = (
    "AddNot", "NumberReplacer", "ReplaceAndWithOr", "ReplaceBinaryOperator", "ReplaceBreak",
    "ReplaceComparisonOperator", "ReplaceContinue", "ReplaceFalse", "ReplaceOrWithAnd",
    "ReplaceTrue", "ReplaceUnaryOperator", "ZeroIterationForLoop",
)  # fmt: skip
UNLIKELY = ("BitOr", "BitAnd", "BitXor", "Shift", "Mod", "Pow")
"""Operators that nobody writes by mistake, and that any test notices."""
EQUIVALENT = ("@dataclass", "TYPE_CHECKING", "Literal[", "import ", "__slots__")
"""Lines whose faults no run can tell: annotations, and what only the type checker reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault: the n-th place of an operator in a file."""

    path: str
    line: int
    operator: str
    occurrence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a fault.

    Args:
        outcome: "killed", "survived" or "not run" where no test runs its line.
    """

    mutant: Mutant
    outcome: str
    before: str
    after: str


class Collected(TypedDict):
    """Which tests run which line of which file, and how long each takes."""

    lines: dict[str, dict[str, list[str]]]
    seconds: dict[str, float]


def collect(tests: Sequence[str]) -> None:
    """Run the tests once and keep which of them run which line, and how long each takes."""
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder) / "coverage", Path(folder) / "report.xml"
        sources = [f"--cov=moetune.{name}" for name in PACKAGES]
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--cov-report=",
            *sources, "--cov-context=test", f"--junitxml={report}", *tests,
        ]  # fmt: skip
        subprocess.run(
            command, check=False, cwd=ROOT, env={**os.environ, "COVERAGE_FILE": str(data)}
        )
        COLLECTED.write_text(json.dumps({"lines": _lines(data), "seconds": _seconds(report)}))


def _lines(data: Path) -> dict[str, dict[int, list[str]]]:
    from coverage import CoverageData

    found = CoverageData(basename=str(data))
    found.read()
    return {
        str(Path(file).relative_to(ROOT)): {
            line: sorted({name.partition("|")[0] for name in names if name})
            for line, names in found.contexts_by_lineno(file).items()
        }
        for file in found.measured_files()
    }


def _seconds(report: Path) -> dict[str, float]:
    import xml.etree.ElementTree as ET

    found: dict[str, float] = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - our own
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        found[name] = float(case.get("time", 0))
    return found


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every fault of a file."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    text = path.read_text()
    lines, tree = text.splitlines(), get_ast(text)
    for name in sorted(operator_names()):
        short = name.partition("/")[2]
        if not short.startswith(OPERATORS) or any(word in short for word in UNLIKELY):
            continue
        operator = get_operator(name)()
        places = [place for node in ast_nodes(tree) for place in operator.mutation_positions(node)]
        for occurrence, ((line, _), _) in enumerate(places):
            if not any(word in lines[line - 1] for word in EQUIVALENT):
                yield Mutant(
                    path=str(path.relative_to(ROOT)),
                    line=line,
                    operator=name,
                    occurrence=occurrence,
                )


def sample(count: int, seed: int) -> list[Mutant]:
    """Return faults on that many different lines."""
    generator = random.Random(seed)  # noqa: S311 - a sample, no secret
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / "moetune" / package).rglob("*.py")):
            for mutant in mutants_of(path):
                by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    chosen = generator.sample(sorted(by_line), min(count, len(by_line)))
    return [generator.choice(by_line[place]) for place in chosen]


def judge(mutant: Mutant, tree: Path, collected: Collected) -> Verdict:
    """Put the fault into the copy of the tree, run the tests of its line, and take it out."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    path = tree / mutant.path
    text = path.read_text()
    changed = mutate_code(text, get_operator(mutant.operator)(), mutant.occurrence) or text
    pairs = zip(text.splitlines(), changed.splitlines(), strict=False)
    before, after = next(((a, b) for a, b in pairs if a != b), ("", ""))
    tests = _tests_of(mutant, collected)
    outcome = "not run"
    if tests:
        path.write_text(changed)
        try:
            outcome = "survived" if _passes(tests, tree) else "killed"
        finally:
            path.write_text(text)
    return Verdict(mutant=mutant, outcome=outcome, before=before.strip(), after=after.strip())


def _tests_of(mutant: Mutant, collected: Collected) -> list[str]:
    lines, seconds = collected["lines"].get(mutant.path, {}), collected["seconds"]
    found = lines.get(str(mutant.line), [])
    # A value at module level is made at the import: whatever runs the file may see it.
    found = found or sorted({name for names in lines.values() for name in names})
    return sorted(found, key=lambda name: seconds.get(name, 1.0))[:MOST_TESTS]


def _passes(tests: Sequence[str], tree: Path) -> bool:
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=100",
        *tests,
    ]  # fmt: skip
    variables = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, check=False, cwd=tree, env=variables, capture_output=True,
            timeout=PATIENCE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def run(count: int, seed: int, workers: int) -> list[Verdict]:
    """Judge a sample, each worker in a copy of its own."""
    collected = json.loads(COLLECTED.read_text())
    trees: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        for number in range(workers):
            tree = Path(folder) / str(number)
            shutil.copytree(
                ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__")
            )
            trees.put(tree)

        def one(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                verdict = judge(mutant, tree, collected)
            finally:
                trees.put(tree)
            print(verdict.outcome, mutant.path, mutant.line, "|", verdict.after, flush=True)
            return verdict

        return list(pool.map(one, sample(count, seed)))


def write(verdicts: Sequence[Verdict], seed: int) -> None:
    """Write the table: the share that was killed, and every survivor."""
    killed = sum(one.outcome == "killed" for one in verdicts)
    lines = [
        "# Faults put in by chance",
        "",
        (
            f"`python -m benchmarks.mutants run --count {len(verdicts)} --seed {seed}`: {killed} "
            f"of {len(verdicts)} faults in {', '.join(PACKAGES)} were noticed "
            f"({killed / len(verdicts):.0%}). The others:"
        ),
        "",
        "| where | line before | line after | outcome |",
        "|---|---|---|---|",
    ]
    for one in verdicts:
        if one.outcome != "killed":
            where = f"{one.mutant.path}:{one.mutant.line}"
            cells = (where, f"`{one.before}`", f"`{one.after}`", one.outcome)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    RESULT.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Collect, or run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("collect", "run"))
    parser.add_argument("tests", nargs="*", default=["tests"])
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.action == "collect":
        collect(arguments.tests)
    else:
        write(run(arguments.count, arguments.seed, arguments.workers), arguments.seed)


if __name__ == "__main__":
    main()
