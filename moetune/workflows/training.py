"""Plans for training a decoder of the registry, or of a `config.json`, on a machine's ranks."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from moetune.domain.architecture import Decoder
from moetune.domain.costs import Costs
from moetune.domain.data_sheets import peak_flops
from moetune.domain.document import encode
from moetune.domain.errors import InputError, LayoutTooLargeError, ProfileError
from moetune.domain.optimizers import OPTIMIZERS, OptimizerName
from moetune.domain.pipeline import stage_words
from moetune.domain.plan import Confidence
from moetune.domain.profile import Profile, ProfileQuality
from moetune.domain.routing import ExpertLoads
from moetune.domain.targets import Target
from moetune.domain.throughput import Throughput
from moetune.domain.training import (
    DEFAULT_SMS,
    TRAINING_DTYPES,
    FoldedLayout,
    LayoutRequest,
    TrainingDtype,
    TrainingJob,
)
from moetune.domain.training_document import (
    TrainingAnswer,
    TrainingDocument,
    TrainingInputs,
    TrainingLayout,
    TrainingMemory,
    TrainingStep,
)
from moetune.domain.units import format_bytes
from moetune.fit.costs import costs_of
from moetune.fit.dispatchers import SmTimes
from moetune.solve.training.front import memory_front
from moetune.solve.training.memory import MemoryModel
from moetune.solve.training.search import FoldedSearch
from moetune.solve.training.stages import DecoderStages
from moetune.solve.training.step import StepPrices
from moetune.solve.training.ties import PricedLayout
from moetune.solve.training.uncertainty import confidence_of
from moetune.workflows.plan import host_memory_bytes, sound_numbers
from moetune.workflows.profile_quality import quality_of
from moetune.workflows.training_prices import StandIns, stand_ins_of, step_prices


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """A question for the layout of a decoder's training.

    Args:
        target: the runtime that it is for.
        memory_limit_bytes: of one device; None for the machine's usable memory.
    """

    job: TrainingJob
    pins: LayoutRequest
    target: Target
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The best layout of a request, with the next ones.

    Args:
        profile: its name; `profile_fingerprint` is its digest.
        trust: the least in any number behind the choice.
        found: the chosen layout first.
        host_bytes: memory of a node's host, as far as the profile has it.
        stand_ins: what the profile does not have of the chosen layout's operations.
        front: the fastest layout for each memory, least memory first; empty where not asked for.
        quality: of the profile; None where it says nothing of its errors.
        device: name of the machine's devices.
    """

    request: TrainingRequest
    profile: str
    profile_fingerprint: str
    limit_bytes: int
    trust: str
    found: tuple[PricedLayout, ...]
    stand_ins: StandIns
    quality: ProfileQuality | None = None
    device: str = ""
    host_bytes: float = inf
    ranks_per_node: int = 1
    front: tuple[PricedLayout, ...] = ()

    @property
    def best(self) -> PricedLayout:
        """The chosen layout."""
        return self.found[0]

    @property
    def fits(self) -> bool:
        """Whether the chosen layout fits into the memory."""
        return self.best.memory.peak_bytes <= self.limit_bytes and self.fits_host

    @property
    def fits_host(self) -> bool:
        """Whether a node's host has room for the activations of its devices."""
        return self.best.memory.host_bytes * self.ranks_per_node <= self.host_bytes

    @property
    def confidence(self) -> Confidence:
        """Confidence in the choice among the layouts found, by the record of public runs."""
        seconds = [one.step.seconds for one in self.found]
        return confidence_of(seconds, ratios=self.stand_ins.ratios)

    @property
    def id(self) -> str:
        """Digest of the inputs, with what their names stand for."""
        job = self.request.job
        return _id_of({**self.inputs, "decoder": repr(job.decoder), "loads": job.routing.loads})

    def tokens_per_second(self, one: PricedLayout) -> float:
        """Return the tokens a second of one device with a layout."""
        job = self.request.job
        return job.tokens / one.step.seconds / job.world_size

    def throughput(self, one: PricedLayout) -> Throughput:
        """Return the model FLOPs a second of one device with a layout, of the dtype's peak."""
        job = self.request.job
        found = self.tokens_per_second(one) * job.decoder.flops_per_token(job.length).total
        peak = peak_flops(self.device, job.dtype)
        return Throughput(flops_per_second=found, mfu=None if peak is None else found / peak)

    @property
    def inputs(self) -> dict[str, Any]:
        """The question, in plain values."""
        job = self.request.job
        return {
            "model": job.decoder.name,
            "world_size": job.world_size,
            "global_batch": job.global_batch,
            "seq": job.length,
            "dtype": job.dtype,
            "routing": job.routing.name,
            "optimizer": job.optimizer,
            "profile": self.profile,
            "profile_fingerprint": self.profile_fingerprint,
            "target": self.request.target.name,
            "pins": encode(self.request.pins),
            "memory_limit_bytes": self.limit_bytes,
        }

    @property
    def stored(self) -> TrainingDocument:
        """The plan as stores and files keep it."""
        best = self._answer(self.best)
        return TrainingDocument(
            id=self.id,
            inputs=TrainingInputs(**{**self.inputs, "pins": self.request.pins}),
            layout=best.layout,
            predicted=best.predicted,
            memory=best.memory,
            confidence=self.confidence,
            fits=self.fits,
            trust=self.trust,
            profile_quality=self.quality,
            warnings=self.stand_ins.words,
            alternatives=tuple(map(self._answer, self.found[1:])),
            front=tuple(map(self._answer, self.front)),
        )

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune plan`."""
        return self.stored.document

    def _answer(self, one: PricedLayout) -> TrainingAnswer:
        job, memory = self.request.job, one.memory
        speed = self.throughput(one)
        return TrainingAnswer(
            layout=_layout(one.layout, job),
            predicted=TrainingStep(
                step_seconds=one.step.seconds,
                parts=dict(one.step.parts),
                tokens_per_second_per_device=self.tokens_per_second(one),
                model_tflops_per_device=speed.flops_per_second / 1e12,
                model_flops_per_second_per_device=speed.flops_per_second,
                mfu=speed.mfu,
                saved_by_overlap_seconds=one.saved_seconds,
            ),
            memory=TrainingMemory(
                peak_bytes=round(memory.peak_bytes),
                host_bytes=round(memory.host_bytes),
                rank=memory.rank,
                parts={name: round(size) for name, size in memory.parts.items()},
                activations={
                    name: round(size) for name, size in memory.activations.items() if size
                },
            ),
        )


def memory_model(job: TrainingJob, target: Target, stages: DecoderStages) -> MemoryModel:
    """Return the memory of a job's layouts as the target runs them."""
    return MemoryModel(
        job=job,
        stages=stages,
        logit_bytes=target.logit_bytes,
        kept_by_experts=target.kept_by_experts,
    )


def search_of(
    request: TrainingRequest, prices: StepPrices, profile: Profile, *, limit_bytes: float
) -> FoldedSearch:
    """Return the search of a request's layouts, within a device's memory and the host's."""
    return FoldedSearch(
        job=request.job,
        prices=prices,
        memory=memory_model(request.job, request.target, prices.stages),
        limit_bytes=limit_bytes,
        target=request.target,
        host_bytes=host_memory_bytes(profile) or inf,
    )


def plan_training(
    request: TrainingRequest,
    profile: Profile,
    costs: Costs | None = None,
    *,
    with_front: bool = False,
) -> TrainingPlan:
    """Return the fastest layout that the rules, the pins and the memory allow.

    Args:
        costs: the profile's, where they are known already.
        with_front: find the fastest layout for every other memory, too.

    Raises:
        InputError: the pins break a rule, or the profile's dtype is not there.
        LayoutTooLargeError: nothing fits; the smallest layout is priced all the same.
        ProfileError: the profile lacks an operation, or times of so many multiprocessors.
    """
    plan, search = search_training(request, profile, costs)
    if not with_front:
        return plan
    with sound_numbers(profile.name):
        return replace(plan, front=memory_front(search, request.pins))


def search_training(
    request: TrainingRequest, profile: Profile, costs: Costs | None = None
) -> tuple[TrainingPlan, FoldedSearch]:
    """Return a plan without its front, and the search that found it.

    Raises:
        InputError, LayoutTooLargeError, ProfileError: as of `plan_training`.
    """
    _check_sms(request.pins, profile)
    limit = request.memory_limit_bytes or profile.machine.plannable_bytes
    with sound_numbers(profile.name):
        costs = costs or costs_of(profile, allow_modelled=True)
        prices = step_prices(request.job, request.target, profile, costs)
        search = search_of(request, prices, profile, limit_bytes=limit)
        found = search.best(request.pins)
        plan = TrainingPlan(
            request=request, profile=profile.name, profile_fingerprint=profile.digest,
            limit_bytes=limit,
            trust=prices.device.trusts.least, found=tuple(found), host_bytes=search.host_bytes,
            ranks_per_node=min(request.job.world_size, profile.machine.devices_per_node),
            quality=quality_of(profile), device=profile.machine.device,
            stand_ins=stand_ins_of(request.job, request.target, profile, found[0], costs),
        )  # fmt: skip
    if not plan.fits:
        raise _too_large(plan)
    return plan, search


def _check_sms(pins: LayoutRequest, profile: Profile) -> None:
    """Raise ProfileError unless the profile has times around the dispatcher's multiprocessors."""
    sms, dispatcher = pins.dispatcher_sms, pins.dispatcher
    if sms is None or dispatcher is None or sms == DEFAULT_SMS.get(dispatcher, sms):
        return  # rules of the layout refuse other dispatchers
    usual, known = DEFAULT_SMS[dispatcher], SmTimes(profile=profile).known(dispatcher)
    if not known or not known[0] <= usual <= known[-1]:
        raise ProfileError(
            f"profile {profile.name!r} has no times of {dispatcher} by its multiprocessors",
            f"use --dispatcher-sms {usual}, {dispatcher}'s own number, or another --profile",
        )
    if not known[0] <= sms <= known[-1]:
        raise ProfileError(
            f"--dispatcher-sms {sms}: profile {profile.name!r} has times of {dispatcher} with "
            f"{known[0]} to {known[-1]} multiprocessors",
            f"use {known[0]} to {known[-1]}; {usual} is {dispatcher}'s own number",
        )


def training_job(
    decoder: Decoder, *, world_size: int | None, global_batch: int | None, length: int | None,
    dtype: str | None, routing: ExpertLoads, optimizer: str, profile: Profile,
) -> TrainingJob:  # fmt: skip
    """Return the job, with the profile's devices where no ranks are named.

    Raises:
        InputError: the batch or the length is missing, or there is no such dtype or optimizer.
    """
    missing = [
        flag
        for flag, value in (("--global-batch", global_batch), ("--seq", length))
        if value is None
    ]
    if global_batch is None or length is None:
        raise InputError(
            f"a plan for {decoder.name} lacks {' and '.join(missing)}",
            "give the sequences of a step and the tokens of a sequence, "
            "such as --global-batch 1024 --seq 4096",
        )
    known_dtype, known_optimizer = check_names(dtype or "bfloat16", optimizer)
    return TrainingJob(
        decoder=decoder, world_size=world_size or profile.machine.num_devices,
        global_batch=global_batch, length=length, dtype=known_dtype,
        routing=routing, optimizer=known_optimizer,
    )  # fmt: skip


def check_names(dtype: str, optimizer: str) -> tuple[TrainingDtype, OptimizerName]:
    """Return the names of a dtype and an optimizer.

    Raises:
        InputError: whole models have no such one.
    """
    if dtype not in TRAINING_DTYPES:
        raise InputError(
            f"dtype {dtype!r} is not for whole models", f"use {', '.join(TRAINING_DTYPES)}"
        )
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer {optimizer!r} is unknown", f"use {', '.join(OPTIMIZERS)}")
    return dtype, optimizer


def _layout(layout: FoldedLayout, job: TrainingJob) -> TrainingLayout:
    return TrainingLayout(
        dp=layout.dp, cp=layout.cp, tp=layout.tp, pp=layout.pp, vpp=layout.vpp, ep=layout.ep,
        etp=layout.etp, edp=layout.edp, micro_batch=layout.micro_batch,
        recompute=layout.recompute or ("none",), dispatcher=layout.dispatcher,
        overlap=layout.overlap, zero=layout.zero, cuda_graphs=layout.cuda_graphs,
        offload_activations=layout.offload_activations,
        offload_optimizer=layout.offload_optimizer, schedule=layout.order,
        stages=stage_words(layout.stages_of(job.decoder)) if layout.pp > 1 else None,
        degree=layout.degree, dispatcher_sms=layout.dispatcher_sms or None,
    )  # fmt: skip


def _id_of(inputs: Mapping[str, object]) -> str:
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _too_large(plan: TrainingPlan) -> LayoutTooLargeError:
    peak, layout = plan.best.memory.peak_bytes, plan.best.layout
    if not plan.fits_host:
        each = format_bytes(round(plan.best.memory.host_bytes))
        node = format_bytes(int(plan.host_bytes))
        return LayoutTooLargeError(
            f"host memory binds: {each} for each of {plan.ranks_per_node} devices is more than "
            f"the {node} of a node",
            "offload a smaller share, or recompute more",
            plan.document,
        )
    largest = max(plan.best.memory.parts, key=plan.best.memory.parts.__getitem__)
    return LayoutTooLargeError(
        f"memory binds: {plan.request.job.decoder.name} needs "
        f"{format_bytes(round(peak))} per device with {layout_words(layout)} (most of it "
        f"{largest}), more than the {format_bytes(plan.limit_bytes)} there are",
        "take more ranks, or leave more of the layout to the solver"
        if "full" in layout.recompute
        else "take more ranks, leave more of the layout to the solver, or recompute more",
        plan.document,
    )


def layout_words(layout: FoldedLayout) -> str:
    """Return "dp 8 · tp 2 · pp 4 · vpp 2 · ep 8 · micro-batch 1", sizes of 1 omitted."""
    names = ("dp", "cp", "tp", "pp", "vpp", "ep", "etp")
    sizes = [f"{name} {getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    return " · ".join([*sizes, f"micro-batch {layout.micro_batch}"])
