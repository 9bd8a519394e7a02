"""The figures of MPipeMoE with moetune, measured: tables, and pictures beside them.

python -m benchmarks.mpipemoe             about 45 minutes on two quiet cores, as root
python -m benchmarks.mpipemoe --part memory     without the network lab, no root needed
python -m benchmarks.mpipemoe --part choice     strategies on two links only, more rounds
python -m benchmarks.mpipemoe --quick     one model, two links; writes nothing but --output
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.mpipemoe import figures, report
from benchmarks.mpipemoe.lab import Grid, StrategyCell, run_rate
from benchmarks.mpipemoe.memory import MODELS, TOKENS, Row, measure_table
from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.lab import check_supported
from benchmarks.netlab.peers import ensure_peer
from moetune.domain.document import encode
from moetune.domain.errors import MoetuneError
from moetune.domain.interference import Interference
from moetune.domain.layer import LayerShape, Workload
from moetune.solve.layer.memory import layer_memory
from moetune.workflows.files import write_text

_FOLDER = Path(__file__).parents[2] / "docs/results"
_MAIN_MODEL = "GPT-XL/4"
_MODELS_RATE = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabResult:
    """What the network lab measured."""

    cells: tuple[StrategyCell, ...]
    interference: tuple[tuple[str, Interference], ...]


def main() -> int:
    """Measure, print the report and write it; return the exit code."""
    given = _arguments()
    load = os.getloadavg()[0]
    try:
        rows = tuple(_memory(quick=given.quick)) if given.part in {"memory", "all"} else ()
        lab = None
        if given.part in {"lab", "all"}:
            check_supported()
            lab = _lab(quick=given.quick, peer=None if given.no_peer else ensure_peer())
        if given.part == "choice":
            check_supported()
            grid = replace(_grid(_MAIN_MODEL, None), rounds=9)
            lab = _measure([(grid, 200.0), (grid, 1000.0)])
    except MoetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    has_peer = lab is not None and lab.cells[0].peer_seconds > 0
    machine = describe_machine(peer=has_peer, load=load)
    text = _report(rows, lab, machine=machine)
    print(text)
    output = given.output or (None if given.quick else _output(given.part))
    if output is not None:
        _write(output, text, rows, lab)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mpipemoe", description=__doc__)
    parser.add_argument("--part", choices=["memory", "lab", "choice", "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="few cells, few rounds")
    parser.add_argument("--no-peer", action="store_true", help="leave DeepSpeed out")
    parser.add_argument("--output", type=Path, help="the report; default docs/results/mpipemoe.md")
    return parser.parse_args()


def _output(part: str) -> Path:
    return _FOLDER / ("mpipemoe.md" if part == "all" else f"mpipemoe-{part}.md")


def _memory(*, quick: bool) -> Sequence[Row]:
    models = [_MAIN_MODEL] if quick else list(MODELS)
    rows = []
    for row in measure_table(models=models, tokens=TOKENS[:1] if quick else TOKENS):
        print(f"memory: {row.model}, {row.tokens} tokens, n = {row.degree}", file=sys.stderr)
        rows.append(row)
    return rows


def _lab(*, quick: bool, peer: Path | None) -> LabResult:
    grid = _grid(_MAIN_MODEL, peer)
    rates: tuple[float | None, ...] = (200.0, 500.0, 1000.0)
    grids = [
        (replace(grid, max_tokens_with_peaks=2048 if rate == _MODELS_RATE else 0), rate)
        for rate in rates
    ]
    if quick:
        small = replace(grid, tokens=(1024,), rounds=3, budget="30s", max_tokens_with_peaks=1024)
        grids = [(small, rate) for rate in rates[::2]]
    else:
        others = [replace(_grid(name, peer), tokens=(4096,)) for name in MODELS]
        grids += [(one, _MODELS_RATE) for one in others if one.model != _MAIN_MODEL]
    return _measure(grids)


def _measure(grids: Sequence[tuple[Grid, float | None]]) -> LabResult:
    cells: list[StrategyCell] = []
    tables: list[tuple[str, Interference]] = []
    for one, rate in grids:
        print(f"{one.model}, {rate:g} Mbit/s:" if rate else one.model, file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="mpipemoe-") as folder:
            found, profile = run_rate(one, rate_mbit=rate, folder=Path(folder), echo=sys.stderr)
        cells += found
        if one.model == _MAIN_MODEL:
            tables.append((report.link(found[0]), profile.interference))
    return LabResult(cells=tuple(cells), interference=tuple(tables))


def _grid(model: str, peer: Path | None) -> Grid:
    d_model, d_hidden = MODELS[model]
    return Grid(
        model=model,
        layer=LayerShape(d_model=d_model, d_hidden=d_hidden, num_experts=2, activation="relu"),
        tokens=(1024, 2048, 4096),
        degrees=(2, 4, 8),
        limit_degree=4,
        max_tokens_with_peaks=0,
        rounds=5,
        budget="60s",
        peer=peer,
    )


def _breakdown() -> list[tuple[str, int, int, int, int]]:
    """Return (model, tokens, states, activations, buffers) of Table III's models, full size."""
    rows = []
    for name, (d_model, d_hidden) in MODELS.items():
        for tokens in TOKENS:
            layer = LayerShape(d_model=4 * d_model, d_hidden=4 * d_hidden, num_experts=64)
            workload = Workload(layer=layer, world_size=64, tokens_per_rank=tokens)
            memory = layer_memory(workload=workload, forward_degree=4, backward_degree=4)
            rows.append(
                (
                    name.removesuffix("/4"), tokens, memory.state_bytes, memory.activation_bytes,
                    memory.buffer_bytes,
                )
            )  # fmt: skip
    return rows


def _report(rows: Sequence[Row], lab: LabResult | None, *, machine: str) -> str:
    targets = [
        *(report.memory_targets(rows) if rows else ()),
        *(report.lab_targets(lab.cells) if lab else ()),
    ]
    parts = [
        "# MPipeMoE: memory reuse and strategies", machine, _METHOD,
        "## Targets",
        "\n".join(
            f"- {'met' if one.is_met else '**missed**'}: {one.promise}: {one.found}"
            for one in targets
        ),
        "## Breakdown (Fig. 2)",
        "By the formula, float32, 64 experts on 64 ranks, 4 chunks, nothing reused.",
        report.breakdown_table(_breakdown()),
    ]  # fmt: skip
    if lab:
        parts += _lab_parts(lab)
    if rows:
        parts += ["## Peak against the bound (Fig. 10)", report.memory_table(rows)]
    return "\n\n".join(parts) + "\n"


def _lab_parts(lab: LabResult) -> list[str]:
    return [
        "## Interference (Fig. 3)",
        "Measured by `moetune profile` in the lab: speed of a class beside others.",
        report.interference_table(lab.interference),
        "## Speed by degree (Figs. 8 and 12)",
        "Strategy none, ms a step; the plan had all memory.",
        report.degree_table(lab.cells),
        "## Choice under a limit (Fig. 13)",
        _CHOICE,
        report.choice_table(lab.cells),
        "## Memory and time of every step (Figs. 9 and 11)",
        report.step_table(lab.cells),
    ]


def _write(output: Path, text: str, rows: Sequence[Row], lab: LabResult | None) -> None:
    pictures = _draw(output.with_suffix(""), rows, lab)
    shown = "\n".join(f"![{one.stem}]({output.stem}/{one.name})" for one in pictures)
    write_text(output, f"{text}\n## Pictures\n\n{shown}\n")
    raw = {"memory": [encode(row) for row in rows], "cells": encode(lab.cells) if lab else []}
    write_text(output.with_suffix(".json"), json.dumps(raw, indent=1) + "\n")


def _draw(folder: Path, rows: Sequence[Row], lab: LabResult | None) -> list[Path]:
    drawn = {"fig02-breakdown": figures.breakdown(_breakdown())}
    if lab:
        ours = [cell for cell in lab.cells if cell.model == _MAIN_MODEL]
        middle = [cell for cell in lab.cells if cell.rate_mbit == _MODELS_RATE]
        drawn |= {
            "fig03-interference": figures.interference(lab.interference),
            "fig12-degree": figures.degree_by_batch([one for one in middle if one in ours] or ours),
            "fig13-strategies": figures.strategies(ours),
        }
        weighed = [cell for cell in ours if cell.steps[0].peak_bytes]
        if weighed:
            drawn["fig11-memory-time"] = figures.memory_and_time(max(weighed, key=_tokens))
        if lab.cells[0].peer_seconds:
            drawn["fig08-speed-up"] = figures.speed_ups(middle or ours)
    if rows:
        drawn["fig10-achieved"] = figures.achieved(rows)
    folder.mkdir(parents=True, exist_ok=True)
    return [figures.write_figure(drawn[name], folder / name) for name in sorted(drawn)]


def _tokens(cell: StrategyCell) -> int:
    return cell.tokens


_CHOICE = (
    "The limit is what reuse needs in 4 chunks; a strategy's time is that of its fastest measured "
    "degree that fits."
)
_METHOD = (
    "The models are those of the paper's Table III with both widths divided by four, float32, "
    "relu, top_k 1. Memory: one rank, a whole step with Adam, peak of live tensors as the "
    "allocator reports them, states included. Network lab: two ranks, one core and one thread "
    "each, links by a token bucket, gloo, forward and backward; all variants of a cell take turns "
    "in one process, a figure is the median of the rounds, the maximum over the ranks. On a CPU "
    "'host' memory is the same memory, and copies are made by the core that computes."
)

if __name__ == "__main__":
    sys.exit(main())
