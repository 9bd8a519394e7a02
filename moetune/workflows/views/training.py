"""A training plan as sections: the layout, its time by part, its memory, and the next layouts."""

from collections.abc import Iterator

from moetune.report.section import Cell, Section, Table, facts
from moetune.solve.training.search import PricedLayout
from moetune.workflows.training import TrainingPlan, layout_words


def training_sections(plan: TrainingPlan) -> Iterator[Section]:
    """Yield the sections of a training plan."""
    job, best = plan.request.job, plan.best
    per_device = job.tokens / best.step.seconds / job.world_size
    flops = job.decoder.flops_per_token(job.length).total
    layout = best.layout
    yield Section(
        name="layout",
        title=f"{job.decoder.name} on {job.world_size} ranks: {layout_words(layout)}",
        tables=(
            facts(
                "layout",
                [
                    ("step", Cell.seconds(best.step.seconds).text),
                    ("tokens per second and device", f"{per_device:,.0f}"),
                    ("model TFLOP/s per device", f"{per_device * flops / 1e12:.0f}"),
                    ("memory per device", _memory(plan)),
                    ("recompute", ", ".join(layout.recompute) or "none"),
                    ("dispatcher", layout.dispatcher),
                    ("overlap of exchanges", layout.overlap),
                    ("optimizer", f"{job.optimizer}, ZeRO-{layout.zero}"),
                    ("numbers", plan.trust),
                ],
                header=("layout", ""),
            ),
        ),
    )
    yield Section(name="time", title="Time of a step, on the slowest pipeline rank",
                  tables=(_time(best),))  # fmt: skip
    yield Section(name="memory", title=f"Memory of pipeline rank {best.memory.rank}",
                  tables=tuple(_memory_parts(best)))  # fmt: skip
    if len(plan.found) > 1:
        yield Section(name="alternatives", title="The next layouts", tables=(_others(plan),))


def _memory(plan: TrainingPlan) -> str:
    peak = Cell.size(round(plan.best.memory.peak_bytes)).text
    return f"{peak} of {Cell.size(plan.limit_bytes).text}"


def _time(best: PricedLayout) -> Table:
    parts = sorted(best.step.parts.items(), key=lambda item: -item[1])
    return Table(
        name="time",
        header=("part", "seconds", "share"),
        rows=tuple(
            (Cell.words(name), Cell.seconds(seconds), Cell.share(seconds / best.step.seconds))
            for name, seconds in parts
            if seconds > 0
        ),
    )


def _memory_parts(best: PricedLayout) -> Iterator[Table]:
    memory = best.memory
    for name, first, sizes in (
        ("memory", "part", memory.parts), ("activations", "activations of", memory.activations),
    ):  # fmt: skip
        yield Table(
            name=name,
            header=(first, "bytes"),
            rows=tuple(
                (Cell.words(one), Cell.size(round(size))) for one, size in sizes.items() if size > 0
            ),
        )


def _others(plan: TrainingPlan) -> Table:
    best = plan.best.step.seconds
    return Table(
        name="alternatives",
        header=("layout", "recompute", "overlap", "step", "slower", "memory"),
        rows=tuple(
            (
                Cell.words(layout_words(one.layout)),
                Cell.words(", ".join(one.layout.recompute) or "none"),
                Cell.words(one.layout.overlap),
                Cell.seconds(one.step.seconds),
                Cell.share(one.step.seconds / best - 1, sign=True),
                Cell.size(round(one.memory.peak_bytes)),
            )
            for one in plan.found[1:]
        ),
    )
