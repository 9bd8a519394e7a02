"""Layouts that fit into memory, as sections: a table of all, and the parts of the plainest."""

from moetune.domain.document import encode
from moetune.domain.training import FoldedLayout
from moetune.domain.training_document import TrainingMemory
from moetune.domain.units import format_bytes
from moetune.report.doubts import uncounted_words
from moetune.report.model_words import host_words, tuning_words
from moetune.report.section import Cell, Highlight, Section, Table, plural
from moetune.report.words import parts_table
from moetune.solve.model.fits import FittedLayout, MemoryAnswer
from moetune.solve.model.memory import RankMemory
from moetune.solve.model.trained import trained_of

SCHEMA = "moetune.memory/1"


def memory_document(answer: MemoryAnswer) -> dict[str, object]:
    """Return the values that `moetune memory --json` prints."""
    question, job = answer.question, answer.job
    trained = trained_of(job, question.target)
    return {
        "schema": SCHEMA,
        "inputs": {
            "model": job.decoder.name, "world_size": job.world_size, "seq": job.length,
            "global_batch": job.global_batch, "dtype": job.dtype, "optimizer": job.optimizer,
            "target": question.target.name, "device_bytes": question.device_bytes,
            **({} if job.tuning.trains_all else {"train": job.tuning.words}),
        },
        "limit_bytes": question.limit_bytes,
        "fits": answer.fits,
        "num_fitting": answer.num_fitting,
        **({} if trained is None else {"trained": encode(trained)}),
        "layouts": [_layout_document(fitted) for fitted in answer.layouts],
    }  # fmt: skip


def memory_sections(answer: MemoryAnswer) -> tuple[Section, ...]:
    """Return the answer in words, the table of layouts, and the parts of the first layout."""
    question, job, first = answer.question, answer.job, answer.layouts[0]
    gpus = plural(job.world_size, "GPU")
    peak, limit = format_bytes(first.memory.peak_bytes), format_bytes(question.limit_bytes)
    count = plural(answer.num_fitting, "layout") if answer.fits else "No layout"
    fit = "fit" if answer.num_fitting > 1 else "fits"
    what = f"{count} of {job.decoder.name} on {gpus} {fit}"
    device = format_bytes(question.device_bytes)
    words = (
        f"{what} into {limit}: the {device} that a process has of each, and its libraries; "
        f"{'room' if question.error_share else 'no room'} is left for errors. "
        f"The {'plainest' if answer.fits else 'smallest'} takes {peak}: "
        f"{first.layout.words}, ZeRO-{first.layout.zero}{_host(first.layout)}."
    )
    fewest = "the fewest" if question.world_size is None and answer.fits else ""
    size = Cell.size(round(first.memory.peak_bytes))
    return (
        Section(
            name="answer",
            paragraphs=(
                words, *tuning_words(job.tuning, trained_of(job, question.target)),
                *uncounted_words(job.decoder),
            ),
            highlights=(
                Highlight("GPUs", Cell.count(job.world_size), fewest),
                Highlight("Memory", size, f"of {limit}"),
            ),
        ),
        Section(
            name="layouts",
            title="What fits, the plainest first" if answer.fits else "The smallest layout",
            tables=(_layouts(answer),),
        ),
        memory_section(first.memory, title="Where it goes"),
    )  # fmt: skip


def memory_section(memory: RankMemory | TrainingMemory, *, title: str) -> Section:
    """Return the parts of a device's memory and of its activations."""
    return Section(
        name="memory",
        title=title,
        tables=(
            parts_table("memory", ("part", "memory"), memory.parts),
            parts_table("activations", ("activations of", "memory"), memory.activations),
        ),
    )


def _host(layout: FoldedLayout) -> str:
    """Return what a layout keeps in host memory, after a comma; "" for nothing."""
    words = host_words(layout)
    return f", on the host {words}" if words else ""


def _layouts(answer: MemoryAnswer) -> Table:
    return Table.of(
        "layouts",
        answer.layouts,
        {
            "layout": lambda fitted: fitted.layout.words + _host(fitted.layout),
            "zero": lambda fitted: Cell.count(fitted.layout.zero),
            "recompute": lambda fitted: fitted.layout.recompute_words,
            "memory": lambda fitted: Cell.size(round(fitted.memory.peak_bytes)),
            "states": lambda fitted: Cell.size(
                round(sum(map(fitted.memory.parts.__getitem__, _STATES)))
            ),
            "activations": lambda fitted: Cell.size(round(fitted.memory.parts["activations"])),
        },
        num_more=max(0, answer.num_fitting - len(answer.layouts)),
    )


_STATES = ("parameters", "gradients", "optimizer")
_DECISIONS = ("dp", "cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch", "zero", "recompute",
              "offload_activations", "offload_optimizer")  # fmt: skip


def _layout_document(fitted: FittedLayout) -> dict[str, object]:
    layout, memory = fitted.layout, fitted.memory
    values = {name: getattr(layout, name) for name in _DECISIONS}
    return {
        "layout": values | {"recompute": list(layout.recompute or ("none",))},
        "host_bytes": round(memory.host_bytes),
        "peak_bytes": round(memory.peak_bytes),
        "parts": {name: round(size) for name, size in memory.parts.items()},
        "activations": {name: round(size) for name, size in memory.activations.items() if size},
    }
