"""A training plan as sections: the layout, its time by part, its memory, and the next layouts."""

from collections.abc import Iterator

from moetune.domain.pipeline import stage_words
from moetune.domain.training import FoldedLayout
from moetune.domain.units import format_bytes
from moetune.report.section import Cell, Section, Table, facts, percent, seconds_span
from moetune.solve.training.search import PricedLayout
from moetune.workflows.training import TrainingPlan, layout_words
from moetune.workflows.views.words import how_sure_of_layout, speed_cell, speed_words, suspect_words

_MUCH = 0.1
"""Of a step, that is worth a hint."""


def training_sections(plan: TrainingPlan) -> Iterator[Section]:
    """Yield the sections of a training plan."""
    job, best = plan.request.job, plan.best
    per_device = job.tokens / best.step.seconds / job.world_size
    layout, sure = best.layout, plan.confidence
    yield Section(
        name="layout",
        title=f"{job.decoder.name} on {job.world_size} ranks: {layout_words(layout)}",
        paragraphs=(
            *suspect_words(plan.profile, plan.quality),
            how_sure_of_layout(sure),
            *map(_sentence, plan.stand_ins.words),
        ),
        tables=(
            facts(
                "layout",
                [
                    (
                        "step",
                        seconds_span(
                            best.step.seconds, sure.p05_step_seconds, sure.p95_step_seconds
                        ),
                    ),
                    ("tokens per second and device", f"{per_device:,.0f}"),
                    ("model FLOP/s per device", speed_words(plan.throughput(best), "")),
                    ("memory per device", _memory(plan)),
                    ("recompute", ", ".join(layout.recompute) or "none"),
                    ("dispatcher", _dispatcher(layout)),
                    ("overlap of exchanges", _overlap(best)),
                    ("in host memory", _offloaded(plan)),
                    ("CUDA graphs", _graphs(plan)),
                    ("optimizer", f"{job.optimizer}, ZeRO-{layout.zero}"),
                    *_pipeline(plan),
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


def _dispatcher(layout: FoldedLayout) -> str:
    of = f" with {layout.sms} multiprocessors" if layout.dispatcher_sms else ""
    return f"{layout.dispatcher}{of}"


def _overlap(best: PricedLayout) -> str:
    overlap, degree = str(best.layout.overlap), best.layout.degree
    if degree is not None:
        overlap += f" ({degree.forward} forward, {degree.backward} backward)"
    if best.saved_seconds <= 0:
        return overlap
    saved = percent(best.saved_seconds / (best.step.seconds + best.saved_seconds))
    return f"{overlap}: saves {Cell.seconds(best.saved_seconds).text}, {saved} of the step"


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _graphs(plan: TrainingPlan) -> str:
    """Return the choice, and what another one may save where the host holds the devices up."""
    best = plan.best
    share = best.step.parts.get("launches", 0.0) / best.step.seconds
    can_replay = "partial" in plan.request.target.cuda_graphs
    if best.layout.cuda_graphs != "none" or share < _MUCH or not can_replay:
        return best.layout.cuda_graphs
    return f"none: launches are {share:.0%} of the step, see --cuda-graphs partial"


def _offloaded(plan: TrainingPlan) -> str:
    layout, decoder = plan.best.layout, plan.request.job.decoder
    blocks = layout.offloaded_layers(decoder)
    what = [f"activations of {blocks} of {decoder.num_layers} blocks"] if blocks else []
    if layout.offload_optimizer:
        what.append(f"{percent(layout.offload_optimizer, digits=0)} of the optimizer")
    if not what:
        return "nothing"
    return f"{' and '.join(what)}, {format_bytes(round(plan.best.memory.host_bytes))} a device"


def _pipeline(plan: TrainingPlan) -> list[tuple[str, str]]:
    layout = plan.best.layout
    if layout.pp == 1:
        return []
    stages = stage_words(layout.stages_of(plan.request.job.decoder))
    return [("schedule", layout.order), ("stages", stages)]


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
        header=("layout", "recompute", "overlap", "schedule", "step", "slower", "FLOP/s", "memory"),
        rows=tuple(
            (
                Cell.words(layout_words(one.layout)),
                Cell.words(", ".join(one.layout.recompute) or "none"),
                Cell.words(one.layout.overlap),
                Cell.words(one.layout.order),
                Cell.seconds(one.step.seconds),
                Cell.share(one.step.seconds / best - 1, sign=True),
                speed_cell(plan.throughput(one)),
                Cell.size(round(one.memory.peak_bytes)),
            )
            for one in plan.found[1:]
        ),
        wide=("FLOP/s",),
    )
