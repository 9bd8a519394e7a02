"""An observed run as sections: its step against the prediction, what differs, and what to try."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from moetune.app.observe import REST, Observed
from moetune.domain.document import encode
from moetune.domain.records import ObservedRun
from moetune.domain.units import format_bytes, format_seconds, format_share
from moetune.logs.kineto import COLLECTIVES
from moetune.report.model_words import calibration_words
from moetune.report.section import Cell, Highlight, Section, Table, plural, seconds_span, sentence
from moetune.report.words import speed_words
from moetune.solve.model.calibration import FARTHEST

OBSERVE_SCHEMA = "moetune.observe/1"
_TIMERS: Mapping[str, str] = MappingProxyType({
    "megatron": "Megatron's --timing-log-level 2", "deepspeed": "wall_clock_breakdown",
    "bridge": "logger.timing_log_level = 2",
})  # fmt: skip
"""The setting that makes a runtime print its timers."""
_NEAR = 0.05
"""Parts that differ by a smaller share of the step get no sentence."""
_OTHER_FLOPS = 0.1
"""Largest relative difference of two FLOP counts without a sentence on it."""
_SCOPES = {
    "device": "all of the device", "reserved": "what the allocator reserved",
    "allocated": "tensors alone",
}  # fmt: skip
_TRY: Mapping[str, str] = MappingProxyType({
    "forward and backward passes": "fused kernels may be off (`moetune check` names their flags), "
    "or the machine is not the profile's: `moetune profile` measures it",
    "gradients and parameters, exposed": "their reduction may not be hidden (`moetune check` says "
    "so), or the network is slower than the profile's",
    "optimizer": "its states may be on the host, or not sharded: `moetune check` says what runs",
    "batches from the data loader": "the loader holds the step up: give it more workers",
    "matrix products": "formats, shapes or clocks are others than the profile's: `moetune profile` "
    "measures this machine",
    "attention": "its kernel is not the fastest there is, or sequences are longer",
    "other kernels": "fused kernels may be off: `moetune check` names their flags",
    COLLECTIVES[0]: "another dispatcher or overlap may hide them, or the network is slower",
    COLLECTIVES[1]: "their overlap may be off: `moetune check` says so",
    REST: "waits in the pipeline, on slow ranks or on the host: compare traces of ranks",
})  # fmt: skip


def observe_document(observed: Observed) -> dict[str, Any]:
    """Return the values that `moetune observe --json` prints."""
    expected, steps, log = observed.prediction.run, observed.steps, observed.log
    return {
        "schema": OBSERVE_SCHEMA,
        "source": expected.source,
        "plan": expected.plan_id,
        "run": encode(observed.run),
        "id": observed.number,
        "predicted": {
            "step_seconds": expected.seconds, "low_seconds": expected.low_seconds,
            "high_seconds": expected.high_seconds,
            "uncalibrated_seconds": expected.predicted_seconds,
        },
        "ratio": observed.ratio,
        "inside": observed.is_inside,
        "steps": None if steps is None else encode(steps),
        "log": None if log is None else {
            "file": log.file, "format": log.format, "first_line": log.first_line,
            "num_runs": log.num_runs, "tflops_per_device": log.tflops,
        },
        "trace": encode(observed.trace),
        "memory_scope": observed.scope,
        "parts": encode(observed.parts),
        "calibration": encode(observed.calibration),
    }  # fmt: skip


def observe_sections(observed: Observed) -> Iterator[Section]:
    """Yield the sections of an observed run, the answer first."""
    yield _answer(observed)
    if observed.parts:
        yield Section(
            name="parts", title="Where the difference is", paragraphs=tuple(_hidden(observed)),
            tables=(_parts(observed),),
        )  # fmt: skip
    yield Section(
        name="next", title="What follows", paragraphs=tuple(map(sentence, _next(observed)))
    )


def _answer(observed: Observed) -> Section:
    expected, run = observed.prediction.run, observed.run
    batch = plural(run.global_batch, "sequence")
    low, high = map(format_seconds, (expected.low_seconds, expected.high_seconds))
    return Section(
        name="answer", title=f"{run.model}, observed against {expected.source}",
        scope=f"{plural(run.world_size, 'GPU')} · {batch} of {run.seq:,} tokens · "
        f"{run.dtype} · {run.runtime} · profile {run.profile}",
        paragraphs=(*_step(observed), *_speed(observed), *_memory(observed), *_notes(observed)),
        highlights=(
            Highlight(
                "Observed step", Cell.seconds(run.seconds), f"{observed.ratio:.2f} × predicted"
            ),
            Highlight("Predicted step", Cell.seconds(expected.seconds), f"{low} to {high}"),
        ),
    )  # fmt: skip


def _step(observed: Observed) -> Iterator[str]:
    expected, run, steps = observed.prediction.run, observed.run, observed.steps
    took = format_seconds(run.seconds)
    if observed.trace is not None:
        took = f"{took}, the mean of {plural(observed.trace.num_steps, 'step')} of the trace"
    elif steps is not None:
        took = (
            f"{_span(run)}, the median of "
            f"{plural(steps.num_steps, 'logged step')} behind {steps.num_left_out} that warm up"
        )
    place = "inside" if observed.is_inside else "outside of"
    by = abs(observed.ratio - 1)
    than = "longer" if observed.ratio > 1 else "shorter"
    yield f"A step takes {took}. Predicted: {_span(expected)}."
    yield (
        f"That is {observed.ratio:.2f} times the prediction, {format_share(by)} {than}, and "
        f"{place} its range."
    )


def _speed(observed: Observed) -> Iterator[str]:
    predicted = observed.prediction.answer.predicted
    speed = predicted.throughput.over(observed.run.seconds, predicted.step_seconds)
    if speed is None or not speed.flops_per_second:
        return
    words = f"{speed_words(speed)}; predicted {speed_words(predicted.throughput, '')}"
    counted = observed.log and observed.log.tflops
    if counted and abs(counted * 1e12 / speed.flops_per_second - 1) > _OTHER_FLOPS:
        words += (
            f". The log says {counted:,.0f} TFLOP/s: it counts other operations, or runs another "
            "model than predicted"
        )
    yield f"{words}."


def _memory(observed: Observed) -> Iterator[str]:
    run, limit = observed.run, format_bytes(observed.prediction.memory_limit_bytes)
    if run.memory_bytes is None or not run.predicted_bytes:
        return
    ratio = run.memory_bytes / run.predicted_bytes
    yield (
        f"Memory of a device: {format_bytes(run.memory_bytes)}, predicted "
        f"{format_bytes(run.predicted_bytes)} ({_SCOPES[observed.scope]}, of {limit}): "
        f"{format_share(ratio - 1, sign=True)}."
    )


def _notes(observed: Observed) -> Iterator[str]:
    prediction, log = observed.prediction, observed.log
    if (used := prediction.calibration) is not None:
        factor = f"{used.factor:.2f} times what it is without runs of yours"
        yield f"The prediction is calibrated: {factor}."
    of_steps = observed.steps.notes if observed.steps else ()
    yield from map(sentence, (*prediction.notes, *of_steps))
    if log is not None and log.num_runs > 1:
        yield (
            f"The log has {log.num_runs} runs: this is the last with a step, from line "
            f"{log.first_line:,} on."
        )


def _hidden(observed: Observed) -> Iterator[str]:
    if (trace := observed.trace) is None:
        return
    for kind in COLLECTIVES:
        if busy := trace.busy[kind]:
            hidden = format_share(1 - trace.exposed[kind] / busy, digits=0)
            name = kind.removesuffix(", exposed")
            yield f"Of {format_seconds(busy)} of {name} in a step, {hidden} are hidden."


def _parts(observed: Observed) -> Table:
    return Table.of(
        "parts",
        observed.parts,
        {
            "part": lambda part: part.name,
            "observed": lambda part: Cell.seconds(part.seconds),
            "predicted": lambda part: Cell.seconds(part.predicted_seconds),
            "difference": lambda part: Cell.share(part.share, sign=True),
        },
        notes=(
            "Differences are shares of the step; timers are of the slowest rank that has them.",
        ),
    )


def _next(observed: Observed) -> Iterator[str]:
    prediction, run = observed.prediction, observed.run
    largest = next((part for part in observed.parts if part.share > _NEAR), None)
    if largest is not None:
        yield f"Most of the difference: {largest.name}; {_TRY.get(largest.name, _TRY[REST])}"
    elif run.seconds > prediction.run.high_seconds:
        timers = _TIMERS.get(run.target, "a profiler's trace")
        yield (
            f"Where it is, {timers} tells; `moetune check` says what the launch really runs, "
            "`moetune profile` measures this machine"
        )
    if observed.number is None:
        yield f"The run is not kept{'' if observed.is_kept else ': a profiler makes steps longer'}"
        return
    yield f"Kept as r{observed.number}"
    if not 1 / FARTHEST <= run.ratio <= FARTHEST:
        yield f"It is off by more than {FARTHEST:g} times, and calibrates nothing"
    if observed.calibration is not None and prediction.is_current:
        yield (
            f"Plans with profile {run.profile} for {run.target} follow it from now "
            f"on. {calibration_words(observed.calibration)}"
        )


def _span(run: ObservedRun) -> str:
    return seconds_span(run.seconds, run.low_seconds, run.high_seconds)
