"""Faults put in by chance, one at a time: how many of them do the tests notice?

    python -m benchmarks.mutants collect            # which test runs which line
    python -m benchmarks.mutants collect FILE …     # the same of these files alone, anew
    python -m benchmarks.mutants run --count 120    # a sample, and its table

Faults are cosmic-ray's (`pip install 'moetune[mutants]'`), drawn evenly over lines. Each is tried
in a copy of the tree against the tests that run its line, those that run the fewest other lines
first, and the frozen answers last. Verdicts are kept in a file of the seed, so a run with
`--batch 15` judges the next 15, and one whose line was taken out of that file is judged again.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import TypedDict

from benchmarks.tree_tests import ROOT, copy_tree, first_failure

PACKAGES = ("domain", "fit", "solve", "app")
COLLECTED = ROOT / ".mutants.json"
PATIENCE_SECONDS = 300
MOST_SECONDS = 150
"""A fault is tried against so many seconds of the tests that run its line, and frozen answers."""
_FROZEN = "tests/golden/"
OPERATORS = (
    "AddNot", "NumberReplacer", "ReplaceAndWithOr", "ReplaceBinaryOperator", "ReplaceBreak",
    "ReplaceComparisonOperator", "ReplaceContinue", "ReplaceFalse", "ReplaceOrWithAnd",
    "ReplaceTrue", "ReplaceUnaryOperator", "ZeroIterationForLoop",
)  # fmt: skip
UNLIKELY = (
    "BitOr", "BitAnd", "BitXor", "Shift", "Mod", "Pow", "Invert",
    "Eq_Is", "Lt_Is", "Gt_Is", "tE_Is",
)  # fmt: skip
"""Operators that nobody writes by mistake, and that any test notices, or else ruff (F632)."""
EQUIVALENT = re.compile(
    r"@dataclass|TYPE_CHECKING|Literal\[|import |__slots__"  # annotations
    r"|strict=True"  # zip's guard is itself a check, of lengths that are equal
    r"|get_close_matches\("  # the first of two near names is the first of one
    r"|(^|[(,])\s*\*,"  # a bare star is no product: other operators there do not compile
)
"""Lines whose faults no run can tell."""


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
        noticed_by: the first test that failed.
    """

    mutant: Mutant
    outcome: str
    before: str
    after: str
    noticed_by: str = ""


class Collected(TypedDict):
    """Which tests run which line of which file, how long each takes, and how many lines it runs."""

    lines: dict[str, dict[str, list[str]]]
    seconds: dict[str, float]
    sizes: dict[str, int]


def collect(tests: Sequence[str]) -> None:
    """Run the tests once and keep which of them run which line, and how long each takes.

    What is known of other files' tests stays known.
    """
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
        kept: Collected = {"lines": {}, "seconds": {}, "sizes": {}}
        if COLLECTED.exists():
            kept = json.loads(COLLECTED.read_text())
        COLLECTED.write_text(json.dumps(_merged(kept, _lines(data), _seconds(report), tests)))


def _merged(
    kept: Collected,
    lines: dict[str, dict[str, list[str]]],
    seconds: dict[str, float],
    tests: Sequence[str],
) -> Collected:
    again = tuple(tests)
    times = {name: took for name, took in kept["seconds"].items() if not name.startswith(again)}
    merged: dict[str, dict[str, list[str]]] = {}
    for file in {**kept["lines"], **lines}:
        old, new = kept["lines"].get(file, {}), lines.get(file, {})
        merged[file] = {
            line: [name for name in old.get(line, []) if not name.startswith(again)]
            + [name for name in new.get(line, []) if name in seconds]
            for line in {**old, **new}
        }
    sizes = Counter(name for file in merged.values() for names in file.values() for name in names)
    return {"lines": merged, "seconds": times | seconds, "sizes": sizes}


def _lines(data: Path) -> dict[str, dict[str, list[str]]]:
    from coverage import CoverageData

    coverage = CoverageData(basename=str(data))
    coverage.read()
    return {
        str(Path(file).relative_to(ROOT)): {
            str(line): sorted({name.partition("|")[0] for name in names if name})
            for line, names in coverage.contexts_by_lineno(file).items()
        }
        for file in coverage.measured_files()
    }


def _seconds(report: Path) -> dict[str, float]:
    import xml.etree.ElementTree as ET

    seconds: dict[str, float] = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - our own
        if case.find("failure") is not None or case.find("error") is not None:
            continue  # it would fail with every fault
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        seconds[name] = float(case.get("time", 0))
    return seconds


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
            if not EQUIVALENT.search(lines[line - 1]):
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
    outcome, noticed_by = "not run", ""
    if tests:
        path.write_text(changed)
        try:
            failure = first_failure(tests, tree, patience_seconds=PATIENCE_SECONDS)
            outcome = "killed" if failure else "survived"
            noticed_by = failure.test if failure else ""
        finally:
            path.write_text(text)
    return Verdict(
        mutant=mutant, outcome=outcome, before=before.strip(), after=after.strip(),
        noticed_by=noticed_by,
    )  # fmt: skip


def _tests_of(mutant: Mutant, collected: Collected) -> list[str]:
    lines, seconds = collected["lines"].get(mutant.path, {}), collected["seconds"]
    tests, named = lines.get(str(mutant.line), []), set[str]()
    if not tests:
        # A value at module level is made at the import, and ranks run lines that coverage does not
        # see: whatever runs the file may see it, and tests of its name first.
        stem = Path(mutant.path).stem
        named = {name for name in seconds if stem in name.partition("::")[0]}
        frozen = (name for name in seconds if name.startswith(_FROZEN))
        tests = sorted({*frozen, *named, *(name for names in lines.values() for name in names)})
    chosen, total = list[str](), 0.0
    sizes = collected["sizes"]
    for name in sorted(tests, key=lambda name: (name not in named, sizes.get(name, 0))):
        total += seconds.get(name, 1.0)
        if chosen and total > MOST_SECONDS:
            break
        chosen.append(name)
    return chosen + [name for name in tests if name.startswith(_FROZEN) and name not in chosen]


def verdicts_of(seed: int) -> list[Verdict]:
    """Return the verdicts so far on a sample."""
    kept = ROOT / f".mutants-{seed}.jsonl"
    lines = kept.read_text().splitlines() if kept.exists() else []
    return [Verdict(**{**row, "mutant": Mutant(**row["mutant"])}) for row in map(json.loads, lines)]


def run(mutants: Sequence[Mutant], seed: int, workers: int) -> None:
    """Judge faults, each worker in a copy of its own, and keep the verdicts."""
    collected = json.loads(COLLECTED.read_text())
    trees: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        for number in range(workers):
            tree = Path(folder) / str(number)
            copy_tree(tree)
            trees.put(tree)

        def work(mutant: Mutant) -> None:
            tree = trees.get()
            try:
                verdict = judge(mutant, tree, collected)
            finally:
                trees.put(tree)
            print(verdict.outcome, mutant.path, mutant.line, "|", verdict.after, flush=True)
            with (ROOT / f".mutants-{seed}.jsonl").open("a") as kept:
                kept.write(json.dumps(asdict(verdict)) + "\n")

        for _ in pool.map(work, mutants):
            pass


def table(verdicts: Sequence[Verdict], seed: int) -> str:
    """Return the share that was noticed, and every survivor, as Markdown."""
    killed = sum(verdict.outcome == "killed" for verdict in verdicts)
    lines = [
        (
            f"`python -m benchmarks.mutants run --count {len(verdicts)} --seed {seed}`: {killed} "
            f"of {len(verdicts)} faults in {', '.join(PACKAGES)} were noticed "
            f"({killed / len(verdicts):.0%}). The others:"
        ),
        "",
        "| where | line before | line after | outcome |",
        "|---|---|---|---|",
    ]
    for verdict in verdicts:
        if verdict.outcome != "killed":
            where = f"{verdict.mutant.path}:{verdict.mutant.line}"
            cells = (where, f"`{verdict.before}`", f"`{verdict.after}`", verdict.outcome)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Collect, or run a sample and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("collect", "run"))
    parser.add_argument("tests", nargs="*", default=["tests"])
    for name, default in (("count", 120), ("seed", 0), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, help="judge at most so many now")
    arguments = parser.parse_args()
    if arguments.action == "collect":
        collect(arguments.tests)
    else:
        judged = {verdict.mutant for verdict in verdicts_of(arguments.seed)}
        left = [fault for fault in sample(arguments.count, arguments.seed) if fault not in judged]
        run(left[: arguments.batch], arguments.seed, arguments.workers)
        print(table(verdicts_of(arguments.seed), arguments.seed))


if __name__ == "__main__":
    main()
