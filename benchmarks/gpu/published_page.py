"""The page's section on plans of reference machines: steps planned from others' tables."""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.gpu.rows import Row
from moetune.domain.records import prediction_error


def published_section(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines of Markdown: a line for each layer and number of chunks."""
    if not rows:
        return
    known = [row for row in rows if row["predicted_seconds"]]
    errors = [abs(prediction_error(row["predicted_seconds"], _step(row))) for row in known]
    yield from ("", "## Layers on this GPU alone", "")
    yield (
        "No exchanges. The time of the host is until it has issued a phase."
        + (
            f" Predicted from the published profile {known[0]['machine']}, before anything was "
            f"measured here: median |error| {statistics.median(errors):.1%}."
            if known
            else ""
        )
    )
    yield ""
    yield (
        "| experts | of them | shape | tokens | chunks | kernel | predicted ms | measured ms "
        "| error | forward ms | of the host | backward ms | of the host | TFLOP/s |"
    )
    yield "|---:|---:|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        predicted, step = row["predicted_seconds"], _step(row)
        error = "–" if predicted is None else f"{prediction_error(predicted, step):+.1%}"
        yield (
            f"| {row['experts']} | {row['top_k']} | {row['d_model']} × {row['d_hidden']} "
            f"| {row['tokens']:,} | {row['degree']} | {row.get('kernel', 'usual')} "
            f"| {'–' if predicted is None else f'{predicted * 1e3:.2f}'} | {step * 1e3:.2f} "
            f"| {error} | {row['forward_seconds'] * 1e3:.2f} "
            f"| {row['host_forward_seconds'] * 1e3:.2f} | {row['backward_seconds'] * 1e3:.2f} "
            f"| {row['host_backward_seconds'] * 1e3:.2f} "
            f"| {2 * row['macs'] / step / 1e12:.0f} |"
        )


def _step(row: Row) -> float:
    return float(row["forward_seconds"] + row["backward_seconds"])
