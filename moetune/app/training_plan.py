"""A question on training a decoder, and conversions of its answers to a plan's document."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moetune.domain.budget import Budget
from moetune.domain.chips import peak_flops
from moetune.domain.document import digest, encode
from moetune.domain.errors import InputError
from moetune.domain.model import MODELS
from moetune.domain.plan import MAKE_PLAN
from moetune.domain.profile import Profile
from moetune.domain.records import Calibration, ObservedRun, decisions_of, factor_of
from moetune.domain.routing import ExpertLoads
from moetune.domain.routing_record import RecordedLayers
from moetune.domain.targets import Target, planned_target
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.domain.training_document import (
    Saving,
    TrainingAnswer,
    TrainingDocument,
    TrainingInputs,
    TrainingMemory,
    TrainingStep,
)
from moetune.huggingface.registry import ResolvedModel, find_decoder_model, is_decoder_name
from moetune.solve.model.alternatives import FasterLayout
from moetune.solve.model.calibration import Decided, calibration_of
from moetune.solve.model.search import PricedLayout
from moetune.solve.model.trained import flops_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """A question on the layout of a decoder's training.

    Args:
        target: the runtime to plan for.
        memory_limit_bytes: limit of a device; None for the machine's usable memory.
        budget: tokens and price of the whole training; None if they are not asked for.
        runs: runs observed with the profile, which calibrate the chosen layout.
        calibration: factor of observed runs on the steps; None for uncalibrated predictions.
    """

    job: TrainingJob
    pins: LayoutRequest
    target: Target
    memory_limit_bytes: int | None = None
    budget: Budget | None = None
    runs: tuple[ObservedRun, ...] = ()
    calibration: Calibration | None = None

    def calibrated(self, layout: FoldedLayout) -> "TrainingRequest":
        """Return the request with a layout's calibration by its runs, if it has runs."""
        if not self.runs:
            return self
        calibration = calibration_for(self.runs, self.job, layout, self.target)
        return replace(self, calibration=calibration)

    @property
    def factor(self) -> float:
        """The factor on predicted steps."""
        return factor_of(self.calibration)

    def inputs(self, profile: Profile, limit_bytes: int) -> TrainingInputs:
        """Return the question as the inputs of a plan's document."""
        job = self.job
        return TrainingInputs(
            model=job.decoder.name, world_size=job.world_size, global_batch=job.global_batch,
            seq=job.length, dtype=job.dtype, routing=job.routing.name, optimizer=job.optimizer,
            profile=profile.name, profile_fingerprint=profile.digest, pins=self.pins,
            target=self.target.name, target_version=self.target.number,
            memory_limit_bytes=limit_bytes, model_path=job.decoder.path,
            leaves_room=job.leaves_room, budget=self.budget, tuning=job.tuning,
            packing=job.packing,
        )  # fmt: skip


def calibration_for(
    runs: Iterable[ObservedRun], job: TrainingJob, layout: FoldedLayout, target: Target
) -> Calibration | None:
    """Return the calibration of a layout's steps; None without runs under its runtime."""
    words = decisions_of(job.world_size, job.length, job.dtype, layout.all_words)
    return calibration_of(runs, of=Decided(job.decoder.name, words), target=target)


def find_planned_model(inputs: TrainingInputs, *, given: str | None) -> ResolvedModel:
    """Return the given model, else the model of the plan's configuration or name.

    Raises:
        InputError: there is no such model, or its configuration is wrong or not understood.
    """
    path, name = inputs.model_path, inputs.model
    is_lost = not Path(path).is_file() if path else name not in MODELS and not is_decoder_name(name)
    if given is None and is_lost:
        raise InputError(
            f"the configuration of {name}, {path or 'which has no path in the plan'}, is not there",
            "name it with --model, such as --model path/to/config.json",
        )
    return find_decoder_model(given or path or name, world_size=inputs.world_size)


def planned_job(plan: TrainingDocument, *, given: str | None) -> tuple[ResolvedModel, TrainingJob]:
    """Return the model of a training plan and its job, with balanced routing.

    Raises:
        InputError: see `find_planned_model`; or the model is a layer.
    """
    inputs, model = plan.inputs, find_planned_model(plan.inputs, given=given)
    if model.decoder is None:
        what = f"plan {plan.id[:6]}: {inputs.model} is a layer, not a model"
        raise InputError(what, MAKE_PLAN)
    return model, TrainingJob(
        decoder=model.decoder, world_size=inputs.world_size, global_batch=inputs.global_batch,
        length=inputs.seq, dtype=inputs.dtype, optimizer=inputs.optimizer, tuning=inputs.tuning,
        packing=inputs.packing,
    )  # fmt: skip


def plan_id(inputs: TrainingInputs, request: TrainingRequest) -> str:
    """Return the digest of a plan's inputs, including the model and loads that they name."""
    plain: dict[str, Any] = encode(inputs)
    plain.pop("model_path", None)  # the decoder itself is part of the digest
    plain["pins"] = {**plain["pins"], "dispatcher_sms": None}  # ids count a pin that is gone
    if request.target == planned_target(request.target.name, ""):
        plain.pop("target_version", None)  # as in plans made before targets had versions
    if request.calibration is not None:
        plain["calibration"] = encode(request.calibration)
    job = request.job
    return digest({**plain, "decoder": job.decoder.identity, "loads": _loads(job.routing)})


def answer_of(
    priced: PricedLayout, job: TrainingJob, device: str, target: Target, *, factor: float = 1.0
) -> TrainingAnswer:
    """Return a layout with its step and memory in the form of a plan's document.

    Args:
        device: name of the machine's devices, whose peak FLOP/s give the MFU.
        factor: a calibration's factor on all times.
    """
    memory, step = priced.memory, priced.step
    tokens = job.tokens / (factor * step.seconds) / job.world_size
    rate = tokens * flops_per_token(job, target)
    peak = peak_flops(device, job.dtype)
    return TrainingAnswer(
        layout=priced.layout.explicit(job.decoder),
        predicted=TrainingStep(
            step_seconds=factor * step.seconds, parts=scaled_parts(step.parts, factor),
            tokens_per_second_per_device=tokens,
            model_tflops_per_device=rate / 1e12, model_flops_per_second_per_device=rate,
            mfu=None if peak is None else rate / peak,
            saved_by_overlap_seconds=factor * priced.saved_seconds,
            saved_by_graphs_seconds=factor * priced.saved_by_graphs_seconds,
            bound_by_host_seconds=factor * step.bound_by_host,
            bound_by_replicas_seconds=factor * step.bound_by_replicas,
            mean_parts=scaled_parts(priced.mean_parts, factor),
        ),
        memory=TrainingMemory(
            peak_bytes=round(memory.peak_bytes), host_bytes=round(memory.host_bytes),
            rank=memory.rank, parts={name: round(size) for name, size in memory.parts.items()},
            activations={name: round(size) for name, size in memory.activations.items() if size},
        ),
    )  # fmt: skip


def scaled_parts(parts: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return the seconds of each part times a factor."""
    return {name: factor * seconds for name, seconds in parts.items()}


def saving_of(saving: FasterLayout, factor: float) -> Saving:
    """Return a faster layout in the form of a plan's document; see `answer_of`."""
    priced, left_out = saving.priced, saving.left_out.words
    return Saving(
        change=f"leaving out {left_out}" if left_out else saving.change.words,
        layout=priced.layout.words, step_seconds=factor * priced.step.seconds,
        peak_bytes=round(priced.memory.peak_bytes),
    )  # fmt: skip


def _loads(routing: ExpertLoads | RecordedLayers) -> object:
    """Return a plan's expert loads; for recorded layers, the loads and spread of each."""
    if isinstance(routing, RecordedLayers):
        return [(layer.loads.loads, layer.spread) for layer in routing.layers]
    return routing.loads
