"""`make netlab`: predicted against measured steps on links of a set rate, beside DeepSpeed.

python -m benchmarks.netlab            about 15 minutes on two quiet cores, as root
python -m benchmarks.netlab --quick    about 2 minutes; writes nothing unless --output is given
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.netlab.experiment import CellResult, Experiment, run_rate
from benchmarks.netlab.lab import check_supported
from benchmarks.netlab.peers import PEER, ensure_peer
from benchmarks.netlab.report import Summary, cell_table, check_targets, degree_table
from moetune.app.files import write_text
from moetune.domain.document import encode
from moetune.domain.errors import MoetuneError
from moetune.domain.layer import LayerShape

_RESULT = Path(__file__).parents[2] / "docs/results/netlab.md"


def main() -> int:
    """Measure, print the report and write it; return the exit code."""
    given = _arguments()
    load = os.getloadavg()[0]
    try:
        check_supported()
        cells = _measure(_experiment(given))
    except MoetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    report = _report(cells, machine=describe_machine(peer=not given.no_peer, load=load))
    print(report)
    output = given.output or (None if given.quick else _RESULT)
    if output is not None:
        write_text(output, report)
        raw = [encode(cell) | {"plan": cell.plan.id} for cell in cells]
        write_text(output.with_suffix(".json"), json.dumps(raw, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.netlab", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two links, one number of tokens")
    parser.add_argument("--num-experts", type=int, default=2, help="of both ranks together")
    parser.add_argument("--top-k", type=int, default=1, help="1 or 2; DeepSpeed has no more")
    parser.add_argument("--activation", default="relu", choices=["relu", "gelu", "silu"])
    parser.add_argument("--no-peer", action="store_true", help="leave DeepSpeed out")
    parser.add_argument("--output", type=Path, help="the report; default docs/results/netlab.md")
    return parser.parse_args()


def _experiment(given: argparse.Namespace) -> Experiment:
    quick: bool = given.quick
    return Experiment(
        layer=LayerShape(
            d_model=512,
            d_hidden=2048,
            num_experts=given.num_experts,
            top_k=given.top_k,
            activation=given.activation,
        ),
        rates_mbit=(200.0, None) if quick else (200.0, 500.0, 1000.0, None),
        tokens=(1024,) if quick else (1024, 2048, 4096),
        degrees=(1, 2, 4, 8, 16),
        rounds=3 if quick else 11,
        budget="30s" if quick else "60s",
        peer=None if given.no_peer else ensure_peer(),
    )


def _measure(experiment: Experiment) -> list[CellResult]:
    cells: list[CellResult] = []
    for rate in experiment.rates_mbit:
        print(f"{'loopback' if rate is None else f'{rate:g} Mbit/s'}:", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="netlab-") as folder:
            cells += run_rate(experiment, rate_mbit=rate, folder=Path(folder), echo=sys.stderr)
    return cells


def _report(cells: Sequence[CellResult], *, machine: str) -> str:
    summaries = [Summary(cell=cell) for cell in cells]
    targets = check_targets(summaries)
    lines = [
        "# Network lab",
        "",
        machine,
        "",
        _method(cells[0]),
        "",
        "## Targets",
        "",
        *(f"- {'met' if t.is_met else '**missed**'}: {t.promise}: {t.measured}" for t in targets),
        "",
        "## Plans",
        "",
        cell_table(summaries),
        "",
        "## Degrees",
        "",
        degree_table(summaries),
        "",
    ]
    return "\n".join(lines)


def describe_machine(*, peer: bool, load: float) -> str:
    software = [f"{name} {importlib.metadata.version(name)}" for name in ("moetune", "torch")]
    software += [PEER] if peer else []
    return (
        f"{datetime.now(tz=UTC):%Y-%m-%d} · {_cpu_model()}, {os.cpu_count()} cores, "
        f"load {load:.1f} before the start · "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"{', '.join(software)} · gloo, 2 ranks, one core and one thread each"
    )


def _method(cell: CellResult) -> str:
    layer, rounds = cell.plan.inputs.layer, len(cell.seconds["bare"])
    return (
        f"One layer, d_model {layer.d_model}, d_hidden {layer.d_hidden}, {layer.num_experts} "
        f"experts, top_k {layer.top_k}, {layer.activation}, float32, forward and backward. Each "
        "link is a token bucket in both directions. The profile was measured in the same lab "
        "before the steps. All variants of a cell take turns in one process; a step is the "
        f"maximum over the ranks, a figure the median of {rounds} rounds."
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
