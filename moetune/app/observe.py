"""An observed run next to its prediction: step, memory, and the parts that a log has timers of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from moetune.app.predicted_runs import PredictedRun
from moetune.domain.errors import InputError
from moetune.domain.records import LONGEST_SECONDS, SHORTEST_SECONDS, Calibration, ObservedRun
from moetune.domain.targets import TargetName
from moetune.domain.training_document import TrainingMemory
from moetune.logs.formats import LABELS, LogFormat, MemoryScope
from moetune.logs.kineto import COLLECTIVES, TracedStep, read_trace
from moetune.logs.reading import LoggedRun, SteadySteps, check_sizes, read_log, steady_steps
from moetune.solve.model.calibration import calibration_of, decided
from moetune.solve.model.rank_memory import ROUTING

if TYPE_CHECKING:
    from moetune.store import SqlStore

_RUNTIMES: Mapping[LogFormat, frozenset[TargetName]] = MappingProxyType({
    "megatron": frozenset({"megatron", "bridge", "moetune", "deepspeed"}),
    "torchtitan": frozenset({"torchtitan", "moetune"}),
    "deepspeed": frozenset({"deepspeed", "transformers", "moetune"}),
    "transformers": frozenset({"transformers", "deepspeed", "moetune", "megatron", "bridge"}),
})  # fmt: skip
"""Runtimes whose logs have a format: Bridge and forks of Megatron print Megatron's format, too."""
_NOT_PASSES = ("gradients", "optimizer", "between steps", "bubble and sends")


class _Group(NamedTuple):
    """A part of a step for which logs have timers.

    Args:
        timers: groups of timers; the seconds are the sum of the first group that is complete.
        parts: predicted parts of the same work; None for all parts of the passes.
        is_inside: whether another part contains its seconds.
    """

    timers: tuple[tuple[str, ...], ...]
    parts: tuple[str, ...] | None = ()
    is_inside: bool = False


_GROUPS: Mapping[str, _Group] = MappingProxyType({
    "forward and backward passes": _Group(
        (("forward-compute", "backward-compute"), ("fwd", "bwd_inner"), ("fwd", "bwd"),
         ("forward", "backward_inner"), ("forward", "backward")), None),
    "gradients and parameters, exposed": _Group(
        (("all-grads-sync", "params-all-gather"), ("all-grads-sync",), ("bwd_allreduce",),
         ("backward_allreduce",), ("backward-params-all-reduce",)), ("gradients",)),
    "optimizer": _Group((("optimizer",), ("step",)), ("optimizer",)),
    "batches from the data loader": _Group((("batch-generator",),), is_inside=True),
})  # fmt: skip
REST, IDLE = "the rest of the step", "idle"
_KINDS: Mapping[str, str] = MappingProxyType({
    **dict.fromkeys(("attention", "mla_up_proj", "mlp", "experts", "shared_experts", "head"),
                    "matrix products"),
    "core_attn": "attention", "offload": "copies", "exchange": COLLECTIVES[0],
    **dict.fromkeys(("tensor_comm", "context_comm", "gradients"), COLLECTIVES[1]),
    "launches": IDLE, "between steps": IDLE,
})  # fmt: skip
"""Kinds of kernels in a trace, by the predicted part; recomputation has kernels of all kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPart:
    """A part of a step, measured and predicted.

    Args:
        share: seconds beyond the prediction, as a share of the measured step.
    """

    name: str
    seconds: float
    predicted_seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """An observed run next to its prediction.

    Args:
        steps: steps of its log or trace; None if the step's time was given.
        log, trace: None if the run was observed in another way.
        scope: memory that the observed peak counts.
        parts: parts of the step, the largest difference first.
        number: the run's number in the store; None if it is not kept.
        calibration: calibration of its model's next predictions; None if it is not kept.
    """

    prediction: PredictedRun
    run: ObservedRun
    steps: SteadySteps | None = None
    log: LoggedRun | None = None
    trace: TracedStep | None = None
    scope: MemoryScope = "device"
    parts: tuple[ObservedPart, ...] = ()
    number: int | None = None
    calibration: Calibration | None = None

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds of a step."""
        return self.run.seconds / self.prediction.run.seconds

    @property
    def is_kept(self) -> bool:
        """Whether the store keeps it: not a traced run, as a profiler makes steps longer."""
        return self.trace is None

    @property
    def is_inside(self) -> bool:
        """Whether the measured step is inside the predicted range."""
        expected = self.prediction.run
        return expected.low_seconds <= self.run.seconds <= expected.high_seconds


def observe(
    prediction: PredictedRun, *, step_seconds: float | None = None, log: Path | None = None,
    trace: Path | None = None, memory_bytes: int | None = None,
) -> Observed:  # fmt: skip
    """Return a run next to its prediction, without storing it.

    Args:
        step_seconds: measured seconds; None for those of the log or the trace.
        memory_bytes: all used memory of a device (`nvidia-smi`); None for the log's peak.

    Raises:
        InputError: not exactly a step, a log or a trace is given; no step can take the time; the
            log or the trace has no step, or the log is of another job.
    """
    if sum(given is not None for given in (step_seconds, log, trace)) != 1:
        raise InputError(
            "a run is observed by its step, its log or a trace",
            "give --step 19.7s, --log FILE or --trace FILE",
        )
    if memory_bytes is not None and memory_bytes <= 0:
        raise InputError(f"--memory {memory_bytes} B: no run takes that", field="memory")
    if log is not None:
        observed = _of_log(prediction, log)
    elif trace is not None:
        observed = _of_trace(prediction, trace)
    else:
        observed = _of_step(prediction, step_seconds or 0.0)
    return observed if memory_bytes is None else _with_memory(observed, memory_bytes, "device")


def keep(store: "SqlStore", observed: Observed) -> Observed:
    """Store an observed run, and return it with its model's next calibration."""
    number = store.add_observed_run(observed.run)
    run, target = observed.run, observed.prediction.target
    stored = store.observed_runs(profile_fingerprint=run.profile_fingerprint)
    calibration = calibration_of((row.value for row in stored), of=decided(run), target=target)
    return replace(observed, number=number, calibration=calibration)


def counted_bytes(memory: TrainingMemory, scope: MemoryScope) -> int:
    """Return the predicted bytes of the memory that an observed peak counts.

    "device" counts all except the room for uneven routing, which a run may not need. "reserved"
    also leaves out libraries, and "allocated" leaves out libraries and fragmentation.
    """
    left_out = {"device": (), "reserved": ("libraries",),
                "allocated": ("libraries", "fragmentation")}[scope]  # fmt: skip
    return memory.peak_bytes - sum(memory.parts.get(name, 0) for name in (ROUTING, *left_out))


def _of_step(prediction: PredictedRun, seconds: float) -> Observed:
    if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
        raise InputError(f"--step {seconds:g} s: no step takes that", field="step")
    run = replace(
        prediction.run, source="step", seconds=seconds, low_seconds=seconds, high_seconds=seconds
    )
    return Observed(prediction=prediction, run=run)


def _of_log(prediction: PredictedRun, path: Path) -> Observed:
    """Return a run from its log, with its memory; raise InputError for a log of another job."""
    log, expected = read_log(path), prediction.run
    if prediction.target.name not in _RUNTIMES[log.format]:
        raise InputError(
            f"{path}, line {log.steps[0].line}: the log is {LABELS[log.format]}, and the "
            f"prediction is for {expected.target}",
            "give the plan or the launch file that this run was started with",
        )
    check_sizes(log, prediction.sizes)
    tokens = expected.global_batch * expected.seq / expected.world_size
    steps = steady_steps(log, global_batch=expected.global_batch, tokens_per_rank=tokens)
    parts = _parts(prediction, log.timers, steps.seconds)
    observed = replace(_with_parts(prediction, steps, parts, path), log=log)
    if not log.memory:
        return observed
    scope: MemoryScope = "reserved" if "reserved" in log.memory else "allocated"
    return _with_memory(observed, round(log.memory[scope]), scope)


def _of_trace(prediction: PredictedRun, path: Path) -> Observed:
    """Return a run from a rank's trace, with kernels compared to the predicted parts by kind."""
    traced, answer = read_trace(path), prediction.answer
    expected: dict[str, float] = dict.fromkeys((*traced.exposed, IDLE), 0.0)
    for name, seconds in answer.predicted.parts.items():
        if name == "recompute":
            continue
        waits = IDLE if answer.layout.pp == 1 else COLLECTIVES[0]  # pipeline sends wait for peers
        kind = waits if name == "bubble and sends" else _KINDS.get(name, "other kernels")
        expected[kind] += seconds
    again = answer.predicted.parts.get("recompute", 0.0)
    computed = ("matrix products", "attention", "other kernels")
    whole = sum(expected[kind] for kind in computed)
    for kind in computed if whole else ():
        expected[kind] *= 1 + again / whole
    seen = {str(kind): seconds for kind, seconds in traced.exposed.items()} | {IDLE: traced.idle}
    steps = SteadySteps(
        seconds=traced.seconds, low_seconds=traced.seconds, high_seconds=traced.seconds,
        num_steps=traced.num_steps,
        notes=() if traced.is_marked else ("the trace marks no steps: it counts as a step",),
    )  # fmt: skip
    parts = [_part(name, seen[name], expected[name], traced.seconds) for name in seen]
    return replace(_with_parts(prediction, steps, parts, path), trace=traced)


def _with_parts(
    prediction: PredictedRun, steps: SteadySteps, parts: Sequence[ObservedPart], path: Path
) -> Observed:
    run = replace(
        prediction.run, source=path.name, seconds=steps.seconds, low_seconds=steps.low_seconds,
        high_seconds=steps.high_seconds, num_steps=steps.num_steps,
        parts={part.name: part.seconds for part in parts},
    )  # fmt: skip
    ordered = sorted(parts, key=lambda part: -abs(part.share))
    return Observed(prediction=prediction, run=run, steps=steps, parts=tuple(ordered))


def _with_memory(observed: Observed, size: int, scope: MemoryScope) -> Observed:
    predicted = counted_bytes(observed.prediction.answer.memory, scope)
    run = replace(observed.run, memory_bytes=size, predicted_bytes=predicted)
    return replace(observed, run=run, scope=scope)


def _parts(
    prediction: PredictedRun, timers: Mapping[str, float], step: float
) -> list[ObservedPart]:
    """Return the parts that timers measure, and the rest of the step; empty without timers."""
    predicted, parts = prediction.answer.predicted, list[ObservedPart]()
    passes = tuple(name for name in predicted.parts if name not in _NOT_PASSES)
    rest, predicted_rest = step, predicted.step_seconds
    for name, group in _GROUPS.items():
        names = next((some for some in group.timers if {*some} <= timers.keys()), None)
        if names is None:
            continue
        seconds = sum(timers[timer] for timer in names)
        wanted = passes if group.parts is None else group.parts
        expected = sum(predicted.parts.get(part, 0.0) for part in wanted)
        if not group.is_inside:
            rest, predicted_rest = rest - seconds, predicted_rest - expected
        parts.append(_part(name, seconds, expected, step))
    if any(not _GROUPS[part.name].is_inside for part in parts):
        parts.append(_part(REST, max(0.0, rest), max(0.0, predicted_rest), step))
    return parts


def _part(name: str, seconds: float, predicted: float, step: float) -> ObservedPart:
    share = (seconds - predicted) / step
    return ObservedPart(name=name, seconds=seconds, predicted_seconds=predicted, share=share)
