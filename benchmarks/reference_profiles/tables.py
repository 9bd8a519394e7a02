"""Tables of a machine from the csv files: points kept, rules applied, and the errors of both."""

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.reference_profiles import facts
from benchmarks.reference_profiles.facts import Fact
from benchmarks.reference_profiles.thinning import BOUND, left_out, thinned
from moetune.domain.cluster import Machine
from moetune.domain.reference import (
    CollectiveTable,
    DispatcherTable,
    GemmTable,
    Rows,
    TransferPhase,
)
from moetune.domain.routing import reached
from moetune.domain.samples import CollectiveOp
from moetune.fit.curve import curve_through
from moetune.fit.gemm import Surface
from moetune.fit.pool import gemm_series, series_of

Curve = dict[float, float]
OPS: Mapping[str, CollectiveOp] = {
    "alltoall": "all_to_all",
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
}
AICONFIGURATOR = "aiconfigurator (Apache-2.0)"
COPY_SPREAD = 0.10
"""Assumed of what follows a rule from another machine's times."""
DEEPEP_HIDDEN, DEEPEP_TOP_K, DEEPEP_EXPERTS = 7168, 8, 256
WIDTHS: Mapping[TransferPhase, int] = {"dispatch": 1, "combine": 2}
"""Bytes of an element: rows travel to their experts in fp8, and back in bfloat16."""
ROW_BYTES: Mapping[TransferPhase, int] = {"dispatch": 1800, "combine": 0}
"""Of a row beside its elements (scales, experts, weights), fitted to DeepEP's rows of 2,048 to
7,168 elements on eight H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How well the kept points predict the others.

    Args:
        num_points, num_kept: given and kept.
        worst, median: |relative error| at the points left out; 0 without any.
    """

    operation: str
    num_points: int
    num_kept: int
    worst: float
    median: float


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of a csv file."""
    with (folder / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def gemm_tables(folder: Path, fact: Fact) -> tuple[list[GemmTable], list[Kept]]:
    """Return the GEMMs in bfloat16, and those in 8 bits by their rule."""
    curves: defaultdict[tuple[int, int], Curve] = defaultdict(dict)
    for row in rows_of(folder, "gemm_bf16.csv"):
        if row["device"] == fact.gemm:
            shape = (int(row["k"]), int(row["n"]))
            curves[shape][float(row["m"])] = float(row["us"]) * 1e-6
    kept, errors = _kept_gemms(dict(sorted(curves.items())))
    report = Kept(
        operation="gemm bfloat16",
        num_points=sum(map(len, curves.values())),
        num_kept=sum(map(len, kept.values())),
        worst=max(errors, default=0.0),
        median=statistics.median(errors) if errors else 0.0,
    )
    points = tuple(
        (rows, d_in, d_out, seconds)
        for (d_in, d_out), curve in kept.items()
        for rows, seconds in curve.items()
    )
    table = _of_device(points, fact)
    return [table, *_narrow(table, fact)], [report, _between_shapes(table)]


def _of_device(points: Rows, fact: Fact) -> GemmTable:
    """Return the points of a device, or by a rule those of another one."""
    table = GemmTable(
        label="published",
        source=f"{AICONFIGURATOR}, gemm_perf.parquet, {fact.gemm}",
        dtype="bfloat16",
        points=_rounded(points),
    )
    if fact.name == "h800-x8":
        rule = f"an H800 computes as an H100: {table.source}"
        return replace(table, label="modelled", source=rule, spread=COPY_SPREAD)
    if faster := facts.FASTER_GEMMS.get(fact.name):
        rule = f"times of {fact.gemm} / {faster}, the middle of both machines' tables"
        return replace(
            table,
            label="modelled",
            source=f"{rule}: {table.source}",
            spread=COPY_SPREAD,
            points=_rounded(_scaled(points, 1 / faster)),
        )
    return table


def _kept_gemms(
    curves: Mapping[tuple[int, int], Curve],
) -> tuple[dict[tuple[int, int], Curve], list[float]]:
    """Return the points to keep by shape, and the errors at those that are not."""
    kept = {shape: thinned(curve) for shape, curve in curves.items()}
    while True:
        surface = Surface(
            shapes={(1, *shape): series_of(curve.items()) for shape, curve in kept.items()},
            family="",
            alpha_seconds=0.0,
        )
        errors, missed = [], False
        for shape, curve in curves.items():
            series = surface.complete_series((1, *shape))
            predicted = curve_through(sizes=series.sizes, seconds=series.medians)
            for rows in curve.keys() - kept[shape].keys():
                error = abs(predicted.predict(rows).seconds / curve[rows] - 1)
                if error > BOUND:
                    kept[shape][rows], missed = curve[rows], True
                else:
                    errors.append(error)
        if not missed:
            return {shape: dict(sorted(curve.items())) for shape, curve in kept.items()}, errors


def _narrow(table: GemmTable, fact: Fact) -> Iterator[GemmTable]:
    """Yield the formats of 8 and 4 bits: rates of large matmuls, the same start-up."""
    startup = min(seconds for *_, seconds in table.points)
    beyond = f"the times in bfloat16 beyond {startup * 1e6:.3g} µs"
    for name, times in fact.rates.items():
        yield GemmTable(
            label="modelled",
            source=f"{beyond} over {times:g}, without rounding",
            dtype=name,
            spread=2 * COPY_SPREAD,
            points=_rounded(
                tuple(
                    (*shape, startup + (seconds - startup) / times)
                    for *shape, seconds in table.points
                )
            ),
        )


def collective_tables(folder: Path, fact: Fact) -> tuple[list[CollectiveTable], list[Kept]]:
    """Return the collectives inside a node, with sends by their rule."""
    curves: defaultdict[tuple[CollectiveOp, int], Curve] = defaultdict(dict)
    for row in rows_of(folder, "collectives.csv"):
        if (row["system"], row["nccl_or_stack"]) == (fact.nccl, fact.nccl_version):
            op, size = OPS[row["op"]], int(row["gpus"])
            # nccl-tests count an all-gather's bytes by its result.
            num_bytes = int(row["bytes"]) / (size if op == "all_gather" else 1)
            curves[op, size][num_bytes] = float(row["median_us"]) * 1e-6
    tables, report = [], []
    for op in OPS.values():
        sizes = sorted(size for name, size in curves if name == op)
        kept = {size: thinned(curves[op, size]) for size in sizes}
        report.append(_report(op, [(curves[op, size], kept[size]) for size in sizes]))
        tables += [_collective(fact, op, size, curve) for size, curve in kept.items()]
    pair = next(table for table in tables if (table.op, table.group_size) == ("all_to_all", 2))
    return [*tables, _send(pair)], report


def _collective(fact: Fact, op: CollectiveOp, size: int, curve: Curve) -> CollectiveTable:
    source = f"{AICONFIGURATOR}, nccl_perf.parquet, {fact.nccl}, NCCL {fact.nccl_version}"
    table = CollectiveTable(
        label="published",
        source=source,
        op=op,
        group_size=size,
        points=_rounded(tuple(curve.items())),
    )
    if fact.name != "h800-x8":
        return table
    startup = min(curve.values())
    slower = facts.NVLINK_H100 / facts.NVLINK_H800
    points = tuple(
        (num_bytes, startup + (seconds - startup) * slower) for num_bytes, seconds in curve.items()
    )
    rule = f"times of an H100 beyond {startup * 1e6:.3g} µs × 900/400, the rates of NVLink"
    return replace(
        table,
        label="modelled",
        source=f"{rule}: {source}",
        spread=COPY_SPREAD,
        points=_rounded(points),
    )


def _send(pair: CollectiveTable) -> CollectiveTable:
    """Return sends: an all-to-all of two ranks sends half of its input."""
    return replace(
        pair,
        label="modelled",
        source=f"an all-to-all of two ranks with twice the bytes: {pair.source}",
        op="send",
        spread=max(pair.spread, COPY_SPREAD),
        points=tuple((num_bytes / 2, seconds) for num_bytes, seconds in pair.points),
    )


def dispatcher_tables(folder: Path, fact: Fact) -> tuple[list[DispatcherTable], list[Kept]]:
    """Return DeepEP on H100 inside a node, and on H800 between nodes; elsewhere nothing."""
    if fact.name == "h100-x8":
        return _deepep_inside(folder)
    if fact.name == "h800-x8":
        return list(_deepep_between()), []
    return [], []


def _deepep_inside(folder: Path) -> tuple[list[DispatcherTable], list[Kept]]:
    curves: defaultdict[tuple[TransferPhase, int], Curve] = defaultdict(dict)
    wanted = (DEEPEP_HIDDEN, DEEPEP_TOP_K, DEEPEP_EXPERTS)
    for row in rows_of(folder, "deepep_h100_ep8.csv"):
        names = ("hidden_size", "num_topk", "num_experts")
        if tuple(int(row[name]) for name in names) == wanted:
            for phase, size, sms, micros in _transfers(row):
                curves[phase, sms][size] = micros * 1e-6
    tables, pairs = [], []
    for (phase, sms), curve in sorted(curves.items()):
        kept = thinned(curve)
        pairs.append((curve, kept))
        tables.append(
            DispatcherTable(
                label="published",
                source=f"{AICONFIGURATOR}, DeepEP on 8 H100, d_model 7168, top-8 of 256",
                dispatcher="deepep",
                phase=phase,
                group_size=8,
                num_sms=sms,
                points=_rounded(tuple(kept.items())),
            )
        )
    return tables, [_report("deepep", pairs)]


def _transfers(row: Mapping[str, str]) -> Iterator[tuple[TransferPhase, float, int, float]]:
    """Yield phase, bytes, multiprocessors and microseconds of a row."""
    for phase in WIDTHS:
        num_bytes = _transfer_bytes(phase, 8, int(row["num_token"]))
        yield phase, num_bytes, int(row[f"{phase}_sms"]), float(row[f"{phase}_transmit_us"])


def _transfer_bytes(phase: TransferPhase, ranks: int, tokens: float) -> float:
    """Return the bytes of one rank's rows: each token once for every rank that it reaches."""
    width = DEEPEP_HIDDEN * WIDTHS[phase] + ROW_BYTES[phase]
    return tokens * width * reached(DEEPEP_TOP_K, ranks)


def _deepep_between() -> Iterator[DispatcherTable]:
    """Yield DeepEP between nodes: published are rates, here of 4,096 tokens of 7,168 elements."""
    for ranks, rates in facts.DEEPEP_RATES.items():
        nodes = ranks // 8
        to_others = reached(DEEPEP_TOP_K, nodes) * (nodes - 1) / nodes
        for phase, rate in zip(WIDTHS, rates, strict=True):
            seconds = 4096 * DEEPEP_HIDDEN * WIDTHS[phase] * to_others / rate
            yield DispatcherTable(
                label="modelled",
                source="DeepEP docs/legacy.md, V1 on H800: its rate × the nodes that tokens reach",
                dispatcher="deepep",
                phase=phase,
                group_size=ranks,
                num_sms=facts.DEEPEP_V1_SMS,
                spread=COPY_SPREAD,
                points=((_transfer_bytes(phase, ranks, 4096), seconds),),
            )


def machine_of(fact: Fact) -> Machine:
    """Return one node, or one domain of NVLink."""
    return Machine(
        kind="cuda",
        device=fact.device,
        num_devices=fact.ranks,
        devices_per_node=fact.ranks,
        memory_bytes=fact.usable_bytes,
    )


def _between_shapes(table: GemmTable) -> Kept:
    """Return the errors of shapes left out, which the surface blends from the others."""
    shapes = {key.shape: series for key, series in gemm_series(table).items()}
    errors = Surface(shapes=shapes, family="", alpha_seconds=0.0).shape_errors()
    return Kept(
        operation="gemm bfloat16, a shape left out",
        num_points=len(errors),
        num_kept=len(table.points),
        worst=max(errors),
        median=statistics.median(errors),
    )


def _report(operation: str, pairs: list[tuple[Curve, Curve]]) -> Kept:
    errors = [error for curve, kept in pairs for error in left_out(curve, set(kept)).values()] or [
        0.0
    ]
    return Kept(
        operation=operation,
        num_points=sum(len(curve) for curve, _ in pairs),
        num_kept=sum(len(kept) for _, kept in pairs),
        worst=max(errors),
        median=statistics.median(errors),
    )


def _scaled(points: Rows, factor: float) -> Rows:
    return tuple((*sizes, seconds * factor) for *sizes, seconds in points)


def _rounded(points: Rows) -> Rows:
    """Return whole sizes as they are written, and seconds to four digits."""
    return tuple(
        (*(round(size) for size in sizes), float(f"{seconds:.4g}")) for *sizes, seconds in points
    )
