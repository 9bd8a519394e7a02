"""The page of results, from whatever rows there are."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Outcome
from benchmarks.gpu.published_page import published_section
from benchmarks.gpu.rows import Row, Rows
from benchmarks.gpu.uneven_page import uneven_section
from moetune.domain.records import prediction_error

_MIB, _GIB = 2**20, 2**30
_NONE = "–"


def page(folder: Path, outcomes: Sequence[Outcome], *, machine: str) -> str:
    """Return the whole page as Markdown.

    Args:
        machine: the device and the software, in words.
    """
    names = ("tests", "profile", "layers", "reuse", "published", "uneven", "chunks")
    tables = {name: list(Rows(folder, name)) for name in names}
    peak = _peak(tables["profile"])
    lines = ["# On a GPU", "", machine, ""]
    lines += _parts(outcomes, tables["tests"])
    lines += _profile(tables["profile"])
    lines += _layers(tables["layers"], peak)
    lines += _reuse(tables["reuse"])
    lines += published_section(tables["published"])
    lines += uneven_section(tables["uneven"])
    lines += _chunks(tables["chunks"])
    return "\n".join(lines) + "\n"


def _parts(outcomes: Sequence[Outcome], tests: Sequence[Row]) -> Iterator[str]:
    yield from ("| part | estimated | took | |", "|---|---:|---:|---|")
    for outcome in outcomes:
        yield (
            f"| {outcome.part} | {outcome.estimated_seconds:.0f} s | {outcome.seconds:.0f} s "
            f"| {outcome.failure or 'done'} |"
        )
    for row in tests:
        yield from ("", f"Tests: {'passed' if row['passed'] else 'FAILED'}; {row['words']}")


def _peak(rows: Sequence[Row]) -> float | None:
    """Return the best product's rate in the dtype that the layers have: the fastest one's."""
    return max((row["macs_per_second"] for row in rows if row["kind"] == "gemm"), default=None)


def _profile(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield from ("", "## Operations", "")
    for row in rows:
        if row["kind"] == "gemm":
            yield f"- best {row['dtype']} product: {2 * row['macs_per_second'] / 1e12:.1f} TFLOP/s"
        elif row["kind"] == "interference":
            yield f"- speeds beside others: {_speeds(row)}"
        elif row["kind"] == "failure":
            yield f"- not measured: {row['point']}: {row['error']}"
    copies = [row for row in rows if row["kind"] == "copy"]
    if copies:
        yield from ("", "| copy | bytes | GB/s |", "|---|---:|---:|")
    for row in sorted(_largest(copies), key=lambda row: str(_copy_name(row))):
        rate = row["num_bytes"] / row["seconds"] / 1e9
        yield f"| {_copy_name(row)} | {row['num_bytes']:,} | {rate:.1f} |"


def _speeds(row: Row) -> str:
    return ", ".join(
        f"{victim} {speed:.2f} with {other}"
        for victim in ("comp", "comm", "mem")
        for other, speed in row[victim].items()
    )


def _copy_name(row: Row) -> str:
    kind = "page-locked" if row["pinned"] else "pageable"
    return f"{row['direction']}, {kind}{', both ways' if row['both_ways'] else ''}"


def _largest(copies: Sequence[Row]) -> list[Row]:
    best: dict[str, Row] = {}
    for row in copies:
        name = _copy_name(row)
        if name not in best or row["num_bytes"] > best[name]["num_bytes"]:
            best[name] = row
    return list(best.values())


def _layers(rows: Sequence[Row], peak: float | None) -> Iterator[str]:
    if not rows:
        return
    known = [row for row in rows if row["predicted_seconds"]]
    errors = [abs(prediction_error(row["predicted_seconds"], row["seconds"])) for row in known]
    yield from ("", "## Degrees", "")
    yield (
        "One expert of each model of MPipeMoE's Table III, as one of 64 ranks sees it; one rank "
        "sends over the loopback. The share is that of the six products of a step in the best "
        "product measured."
        + (f" Median |error| {statistics.median(errors):.1%}." if errors else "")
    )
    yield ""
    yield (
        "| model | tokens | ranks | degree | predicted ms | measured ms | error | × one chunk "
        "| share |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    one_chunk = {_case(row): row["seconds"] for row in rows if row["degree"] == 1}
    for row in rows:
        seconds, first = row["seconds"], one_chunk.get(_case(row))
        share = row["macs"] / seconds / peak if peak else None
        yield (
            f"| {row['model']} | {row['tokens']:,} | {row['ranks']} | {row['degree']} "
            f"| {_ms(row['predicted_seconds'])} | {_ms(seconds)} "
            f"| {_error(row['predicted_seconds'], seconds)} "
            f"| {_NONE if first is None else f'{first / seconds:.2f}'} "
            f"| {_NONE if share is None else f'{share:.0%}'} |"
        )


def _case(row: Row) -> tuple[Any, ...]:
    return row["model"], row["tokens"], row["ranks"]


def _reuse(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield from ("", f"## Memory reuse, {rows[0]['model']}, {rows[0]['tokens']:,} tokens", "")
    yield _choices([row for row in rows if row["strategy"] != "none"])
    yield ""
    yield (
        "| strategy | degree | predicted ms | measured ms | error | peak forward MiB "
        "| backward MiB | Eq. 4 to 6 MiB | hidden ms | Eq. 10 ms |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        predicted, seconds = row.get("predicted_seconds"), row["seconds"]
        alone = row.get("alone_seconds")
        sizes = (
            row[name] for name in ("forward_peak_bytes", "backward_peak_bytes", "formula_bytes")
        )
        yield (
            f"| {row['strategy']} | {row['degree']} | {_ms(predicted)} | {_ms(seconds)} "
            f"| {_error(predicted, seconds)} | "
            + " | ".join(f"{size / _MIB:.0f}" for size in sizes)
            + f" | {_ms(None if alone is None else alone - seconds)} "
            f"| {_ms(row.get('paper_seconds'))} |"
        )


def _choices(reused: Sequence[Row]) -> str:
    said = []
    for who, name in (
        ("the timeline takes", "predicted_seconds"), ("Eq. 10 takes", "paper_seconds"),
        ("fastest was", "seconds"),
    ):  # fmt: skip
        known = {float(row[name]): row["strategy"] for row in reused if name in row}
        if known:
            said.append(f"{who} {known[min(known)]}")
    return (
        f"Of S1 to S4 {', '.join(said)}. Peaks are of one step beyond weights, input and what the "
        "layer keeps; hidden is what overlap saves of all operations as they were measured alone."
    )


def _chunks(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield from ("", "## Model states in chunks, 40 GB of the GPU's memory", "")
    yield "| model | parameters | way | step | TFLOP/s | relative | peak on the device |"
    yield "|---|---:|---|---:|---:|---:|---:|"
    plain = max((_flops(row) for row in rows if row["way"] == "plain"), default=0.0)
    for row in rows:
        if "failure" in row:
            yield f"| {row['name']} | | {row['way']} | {row['failure']} | | | |"
            continue
        relative = f"{_flops(row) / plain:.0%}" if plain else _NONE
        yield (
            f"| {row['name']} | {row['parameters'] / 1e9:.2f}B | {row['way']} "
            f"| {_ms(row['seconds'])} ms | {_flops(row) / 1e12:.1f} | {relative} "
            f"| {row['peak_bytes'] / _GIB:.1f} GiB |"
        )


def _flops(row: Mapping[str, Any]) -> float:
    """Return FLOP a second (Elixir, Eq. 1); 0 where the job failed."""
    if "failure" in row:
        return 0.0
    return float(6 * row["met_parameters"] * row["tokens"] / row["seconds"])


def _ms(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{seconds * 1e3:.2f}"


def _error(predicted: float | None, seconds: float) -> str:
    return _NONE if predicted is None else f"{prediction_error(predicted, seconds):+.1%}"
