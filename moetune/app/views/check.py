"""A checked launch as sections: whether it starts and fits, its problems, and what is better."""

from collections.abc import Iterator
from typing import Any

from moetune.app.launch_check import Better, Checked
from moetune.app.views.memory import memory_section
from moetune.domain.document import encode
from moetune.domain.units import format_bytes, format_seconds
from moetune.launches.reading import Problem, Row
from moetune.report.doubts import uncounted_words
from moetune.report.model_words import calibration_words
from moetune.report.section import Cell, Highlight, Section, Table, plural, seconds_span
from moetune.report.words import parts_table, run_highlights, run_words, speed_words

CHECK_SCHEMA = "moetune.check/1"
_NAMES = {
    "micro_batch": "micro-batch", "global_batch": "batch", "length": "sequence",
    "zero": "ZeRO stage", "narrow": "dtype", "cuda_graphs": "CUDA graphs",
    "offload_activations": "host activations", "offload_optimizer": "host optimizer",
}  # fmt: skip


def check_document(checked: Checked) -> dict[str, Any]:
    """Return the values that `moetune check --json` prints."""
    reading, answer = checked.reading, checked.answer
    return {
        "schema": CHECK_SCHEMA,
        "file": checked.file,
        "inputs": {
            "model": reading.decoder.name, "world_size": reading.job.world_size,
            "global_batch": reading.job.global_batch, "seq": reading.job.length,
            "dtype": reading.job.dtype, "optimizer": reading.job.optimizer,
            "target": reading.target.spec, "profile": checked.profile.name,
            **({} if checked.budget is None else {"budget": encode(checked.budget)}),
        },
        "starts": checked.starts,
        "layout": encode(reading.layout.explicit(reading.decoder)),
        "settings": [encode(row) for row in reading.rows],
        "problems": [encode(problem) for problem in checked.problems],
        "predicted": None if answer is None else encode(answer.predicted),
        "step_seconds": None if checked.seconds is None else encode(checked.seconds),
        "run": None if checked.run is None else encode(checked.run),
        "memory": None if answer is None else encode(answer.memory),
        "memory_limit_bytes": checked.limit_bytes,
        "better": [_better_document(better) for better in checked.better],
        "best": None if checked.best is None else _better_document(checked.best),
        "calibration": encode(checked.calibration),
    }  # fmt: skip


def _better_document(better: Better) -> dict[str, Any]:
    return {
        "change": better.change, "keys": encode(dict(better.keys)),
        "layout": encode(better.answer.layout),
        "step_seconds": better.answer.predicted.step_seconds,
        "peak_bytes": better.answer.memory.peak_bytes, "seconds_saved": better.seconds_saved,
    }  # fmt: skip


def check_sections(checked: Checked) -> Iterator[Section]:
    """Yield the sections of a checked launch, the answer first."""
    yield _answer(checked)
    if checked.problems:
        yield Section(name="problems", title="What stops it, costs time or surprises",
                      paragraphs=tuple(map(_problem, checked.problems)))  # fmt: skip
    if checked.better or checked.best:
        yield Section(name="better", title="What would be better", tables=(_better(checked),))
    yield Section(name="settings", title="What runs, defaults among it",
                  tables=(_settings(checked),))  # fmt: skip
    answer = checked.answer
    if answer is None:
        return
    parts = parts_table("time", ("part", "time"), answer.predicted.parts, Cell.seconds)
    yield Section(name="terms", title="Time of a step", tables=(parts,))
    peak = format_bytes(answer.memory.peak_bytes)
    title = f"Memory of pipeline rank {answer.memory.rank}: {peak}"
    yield memory_section(answer.memory, title=title)


def _answer(checked: Checked) -> Section:
    reading, job, answer = checked.reading, checked.reading.job, checked.answer
    stops = [problem for problem in checked.problems if problem.severity == "stops"]
    fits = "It starts and fits." if answer else "Nothing known stops it, or says that it fits."
    verdict = f"As it is, {stops[0].what}." if stops else fits
    if stops and not stops[0].what.startswith("it runs out"):
        verdict = f"It does not start as it is: {stops[0].what}."
    highlights: tuple[Highlight, ...] = ()
    if answer is not None:
        limit = format_bytes(checked.limit_bytes)
        step = Cell.seconds(answer.predicted.step_seconds)
        highlights = (
            Highlight("One step", step, speed_words(answer.predicted.throughput)),
            Highlight("Memory of a device", Cell.size(answer.memory.peak_bytes), f"of {limit}"),
            *run_highlights(checked.run),
        )
    ranks, batch = plural(job.world_size, "GPU"), plural(job.global_batch, "sequence")
    return Section(
        name="answer", title=checked.file,
        scope=f"{ranks} · {batch} of {job.length:,} tokens · {job.dtype} · {reading.target.label}",
        paragraphs=(
            f"{reading.model_words}: {reading.layout.words}.", verdict, *_price(checked),
            *uncounted_words(reading.decoder),
        ),
        highlights=highlights,
    )  # fmt: skip


def _price(checked: Checked) -> Iterator[str]:
    answer = checked.answer
    if answer is None or checked.seconds is None:
        return
    seconds, peak = checked.seconds, answer.memory.peak_bytes
    step = seconds_span(seconds.predicted, seconds.p05, seconds.p95)
    yield (
        f"One step: {step}, {speed_words(answer.predicted.throughput)}; "
        f"{format_bytes(peak)} of {format_bytes(checked.limit_bytes)} of a device's memory. "
        f"Numbers: profile {checked.profile.name}."
    )
    if checked.calibration is not None:
        yield calibration_words(checked.calibration, flag="")
    yield from run_words(checked.budget, checked.run)


def _problem(problem: Problem) -> str:
    """Return "Stops, line 12: …" with its fix and its source."""
    place = (
        "" if problem.line is None else f", line {problem.line}" if problem.line else ", behind --"
    )
    saves = f" That saves {format_seconds(problem.seconds_saved)}." if problem.seconds_saved else ""
    fix = f" Instead: {problem.fix}.{saves}" if problem.fix else ""
    why = f" [{problem.why}]" if problem.why else ""
    return f"{problem.severity.capitalize()}{place}: {problem.what}.{fix}{why}"


def _better(checked: Checked) -> Table:
    rows = [(str(number), better) for number, better in enumerate(checked.better, start=1)]
    note = "Each is the only change, and all else stays as it is."
    if checked.best is not None:
        rows, note = [*rows, ("best", checked.best)], f"{note} best: all that it names."
    return Table.of(
        "better",
        rows,
        {
            "take": lambda row: row[0],
            "step": lambda row: Cell.seconds(row[1].answer.predicted.step_seconds),
            "saves": lambda row: Cell.seconds(row[1].seconds_saved),
            "memory": lambda row: Cell.size(row[1].answer.memory.peak_bytes),
            "change": lambda row: row[1].change,
        },
        prose=("change",),
        notes=(note,),
    )  # fmt: skip


def _place_cell(row: Row) -> Cell:
    """Return the line that sets a value, the file that the launch names for it, or "default"."""
    if row.line:
        return Cell.count(row.line)
    return Cell.words("default" if row.line is None else row.file or "behind --")


def _settings(checked: Checked) -> Table:
    return Table.of(
        "settings",
        checked.reading.rows,
        {
            "setting": lambda row: _NAMES.get(row.name, row.name),
            "value": lambda row: f"{float(row.value):.3g}" if "offload" in row.name else row.value,
            "key": lambda row: row.key,
            "line": _place_cell,
        },
    )
