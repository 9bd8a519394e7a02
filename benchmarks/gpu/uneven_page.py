"""The page's section on uneven loads: how much longer products take, and what is predicted."""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.gpu.rows import Row
from moetune.domain.records import prediction_error


def uneven_section(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines of Markdown: a line for each shape, number of rows and law."""
    if not rows:
        return
    error, taken_as_even = (
        statistics.median(abs(prediction_error(row[name], row["seconds"])) for row in rows)
        for name in ("predicted_seconds", "even_seconds")
    )
    yield from ("", "## Uneven loads", "")
    yield (
        "Times of one kernel for all experts over those of even loads: forward, gradients of the "
        "input, gradients of the weights. In parentheses what `moetune` takes them for, from even "
        f"loads and one expert with half of the rows. Median |error| {error:.1%}; with all loads "
        f"taken as even {taken_as_even:.1%}."
    )
    yield from ("", "| experts | shape | rows | loads | forward | input | weights |")
    yield "|---:|---|---:|---|---:|---:|---:|"
    cases: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        case = row["num_experts"], row["d_in"], row["d_out"], row["rows"], row["law"]
        cases.setdefault(case, {})[row["form"]] = row
    for (experts, d_in, d_out, num_rows, law), forms in cases.items():
        each = (_ratio(forms[form]) for form in ("forward", "grad_input", "grad_weight"))
        yield f"| {experts} | {d_in} × {d_out} | {num_rows} | {law} | {' | '.join(each)} |"


def _ratio(row: Row) -> str:
    even = row["even_seconds"]
    return f"{row['seconds'] / even:.2f} ({row['predicted_seconds'] / even:.2f})"
