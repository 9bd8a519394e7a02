"""Experts placed by their loads, on real ranks: 5 minutes, as root.

python -m benchmarks.placement            writes docs/results/placement.md

Layers with uneven loads are planned twice from one profile of the lab, and `moetune verify` runs
both plans with tokens that follow the loads: with the experts in their own order and where the plan
puts them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.lab import Lab, check_supported
from moetune.domain.errors import MoetuneError
from moetune.workflows.files import write_text

_RESULT = Path(__file__).parents[1] / "docs/results/placement.md"
_TIMEOUT_SECONDS = 900.0
_RANKS = 2
_SIZES = (
    *("--d-model", "512", "--d-hidden", "1024", "--num-experts", "16", "--top-k", "2"),
    *("--dtype", "float32"),
)
_TOKENS = ("--tokens", "2048")
_CASES: dict[str, tuple[tuple[float, ...], tuple[str, str]]] = {
    "1 / i": (tuple(1 / (expert + 1) for expert in range(16)), ("natural", "planned")),
}
"""Loads, and the rules that are compared.

A power law has the busiest experts on one rank in the natural order.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan on one link, planned and measured."""

    rate_mbit: float
    loads: str
    experts: str
    degrees: tuple[int, int]
    predicted_seconds: float
    seconds: float
    planned_imbalance: float
    imbalance: float


def main() -> int:
    """Measure, print the table and write it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[500.0, 2000.0], help="Mbit/s")
    parser.add_argument("--budget", default="60s", help="of each profile")
    parser.add_argument("--output", type=Path, default=_RESULT)
    given, load = parser.parse_args(), os.getloadavg()[0]
    try:
        check_supported()
        rows = [row for rate in given.rates for row in _measured(rate, given.budget)]
    except MoetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = "\n".join(_lines(rows, describe_machine(peer=False, load=load))) + "\n"
    print(text)
    write_text(given.output, text)
    return 0


def _measured(rate_mbit: float, budget: str) -> Iterator[Row]:
    with (
        Lab(num_ranks=_RANKS, rate_mbit=rate_mbit) as lab,
        tempfile.TemporaryDirectory(prefix="placement-") as name,
    ):
        folder = Path(name)
        profile = ("profile", "--name", "lab", "--preset", "quick", "--budget", budget)
        _run(lab, folder, *profile, *_SIZES, *_TOKENS)
        for case, (loads, rules) in _CASES.items():
            routing, file = folder / "loads.json", folder / "plan.json"
            routing.write_text(json.dumps(loads), encoding="utf-8")
            for rule in rules:
                asked = ("--routing", str(routing), "--expert-placement", rule)
                world = ("--world-size", str(_RANKS), "--profile", "lab")
                _plan(folder, *_SIZES, *_TOKENS, *world, *asked, "--output", str(file))
                experts = _where(json.loads(file.read_text(encoding="utf-8")))
                found = json.loads(_run(lab, folder, "verify", str(file), "--json"))
                yield _row(rate_mbit, case, experts, found)


def _run(lab: Lab, folder: Path, *words: str) -> str:
    """Run a command of moetune on the lab's ranks, and return what the first one printed."""
    database = ("--db", str(folder / "lab.db"), "--no-config")
    command = [sys.executable, "-m", "moetune", *database, *words]
    return lab.run(command, timeout_seconds=_TIMEOUT_SECONDS, echo=sys.stderr)[0].stdout


def _plan(folder: Path, *words: str) -> None:
    """Run `moetune plan` here, where it needs no ranks.

    Raises:
        MoetuneError: it failed; the text is what it printed.
    """
    database = ("--db", str(folder / "lab.db"), "--no-config")
    command = [sys.executable, "-m", "moetune", *database, "plan", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise MoetuneError(done.stderr)


def _where(plan: dict[str, Any]) -> str:
    placement = plan.get("placement") or {}
    return "placed by their loads" if placement.get("experts") else "in their own order"


def _row(rate_mbit: float, loads: str, experts: str, found: dict[str, Any]) -> Row:
    step = next(one for one in found["steps"] if one["is_planned"])
    return Row(
        rate_mbit=rate_mbit, loads=loads, experts=experts,
        degrees=(step["forward_degree"], step["backward_degree"]),
        predicted_seconds=step["predicted_seconds"], seconds=step["step_seconds"],
        planned_imbalance=found.get("planned_imbalance", 1.0), imbalance=found["imbalance"],
    )  # fmt: skip


def _lines(rows: Sequence[Row], machine: str) -> Iterator[str]:
    yield from ("# Experts placed by their loads", "", machine, "")
    yield (
        "A layer with d_model 512, d_hidden 1024, 16 experts, top-2, 2048 tokens a rank, float32 "
        "on two ranks of the network lab; the expert of number i has a load of 1 / i. "
        "`moetune verify` runs the "
        "plan's layer with tokens that follow the loads. Imbalance: rows of the busiest rank over "
        "the mean."
    )
    yield ""
    yield (
        "| link | loads | experts | chunks | imbalance, planned | measured | step, predicted | "
        "measured | faster |"
    )
    yield "|---:|---|---|---:|---:|---:|---:|---:|---:|"
    for before, after in zip(rows[::2], rows[1::2], strict=True):
        for one in (before, after):
            faster = "" if one is before else f"{before.seconds / one.seconds:.2f} ×"
            yield (
                f"| {one.rate_mbit:g} Mbit/s | {one.loads} | {one.experts} | "
                f"{one.degrees[0]}/{one.degrees[1]} | {one.planned_imbalance:.2f} | "
                f"{one.imbalance:.2f} | {1e3 * one.predicted_seconds:.0f} ms | "
                f"{1e3 * one.seconds:.0f} ms | {faster} |"
            )


if __name__ == "__main__":
    sys.exit(main())
