"""A plan for training a decoder of the registry, or of a `config.json`, and what was asked for."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from moetune.domain.data_sheets import peak_flops
from moetune.domain.document import decode, encode
from moetune.domain.model_plan import Chunks, Confidence
from moetune.domain.pipeline import read_stages, stage_words
from moetune.domain.placement import ModelPlacement
from moetune.domain.profile import ProfileQuality, Provenance
from moetune.domain.recorded_layers import RecordedLayers
from moetune.domain.routing import ExpertLoads
from moetune.domain.targets import Target, planned_target
from moetune.domain.throughput import Throughput
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.domain.training_document import (
    PlanOrigin,
    Saving,
    TrainingAnswer,
    TrainingDocument,
    TrainingInputs,
    TrainingLayout,
    TrainingMemory,
    TrainingStep,
)
from moetune.domain.units import format_bytes
from moetune.solve.chunks.choose import chunks_of
from moetune.solve.joint.savings import FoundSaving
from moetune.solve.joint.ties import PricedLayout
from moetune.solve.joint.uncertainty import confidence_of, public_ratios
from moetune.workflows.training_prices import StandIns


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
        host_bytes: host memory of one rank, as far as the profile has it.
        ranks_per_host: that share a host's memory.
        stand_ins: what the profile does not have of the chosen layout's operations.
        front: the fastest layout for each memory, least memory first; empty where not asked for.
        placement: of experts whose layers were recorded; None where nothing was to be placed.
        quality: of the profile; None where it says nothing of its errors.
        device: name of the machine's devices.
        natural_bytes: of a device under natural routing, where the plan has no room for it.
        provenance: of the profile.
        savings: faster layouts with one flag changed; `free`: without pins.
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
    ranks_per_host: int = 1
    front: tuple[PricedLayout, ...] = ()
    placement: ModelPlacement | None = None
    natural_bytes: float | None = None
    provenance: Provenance = "published"
    savings: tuple[FoundSaving, ...] = ()
    free: FoundSaving | None = None

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
        """Whether a host has room for what is in its memory."""
        return self.best.memory.host_bytes <= self.host_bytes

    @property
    def warnings(self) -> tuple[str, ...]:
        """Towers that are not counted, what the profile does not have, and natural routing."""
        words = (
            *self.request.job.decoder.uncounted_words, *self.stand_ins.words, *self._routing_words
        )  # fmt: skip
        rank_bytes = round(self.best.memory.host_bytes)
        if not rank_bytes or self.host_bytes < inf:
            return words
        needed = f"{format_bytes(rank_bytes * self.ranks_per_host)} more than its system's"
        return (
            *words,
            f"profile {self.profile} does not know its hosts' memory: each host needs {needed}",
        )

    @property
    def confidence(self) -> Confidence:
        """Confidence in the choice among the layouts found, by the record of public runs."""
        seconds = [one.step.seconds for one in self.found]
        name = self.request.target.name
        return confidence_of(seconds, ratios=self.stand_ins.ratios, target=name)

    @property
    def id(self) -> str:
        """Digest of the inputs, with what their names stand for."""
        job, inputs = self.request.job, self.inputs
        inputs.pop("model_path", None)  # the decoder itself is part of the digest
        inputs["pins"] = {**inputs["pins"], "dispatcher_sms": None}  # as while there was such a pin
        if self.request.target == planned_target(self.request.target.name, ""):
            inputs.pop("target_version", None)  # as in plans of before versions were told apart
        loads = _loads(job.routing)
        return _id_of({**inputs, "decoder": job.decoder.identity, "loads": loads})

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
        version = self.request.target.number
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
            **({"target_version": version} if version else {}),
            **({"model_path": job.decoder.path} if job.decoder.path else {}),
            **({"leaves_room": True} if job.leaves_room else {}),
        }

    @property
    def _chunks(self) -> Chunks | None:
        is_own = self.request.target.name == "moetune"
        return chunks_of(self.request.job, self.best.layout) if is_own else None

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
            warnings=self.warnings,
            alternatives=tuple(map(self._answer, self.found[1:])),
            front=tuple(map(self._answer, self.front)),
            placement=self.placement,
            origin=PlanOrigin(
                provenance=self.provenance, device=self.device,
                public_ratios=public_ratios(self.request.target.name),
            ),
            chunks=self._chunks,
            savings=tuple(map(_saving, self.savings)),
            free=None if self.free is None else _saving(self.free),
        )  # fmt: skip

    @property
    def _routing_words(self) -> tuple[str, ...]:
        """Say what natural routing would need of a plan for balanced one alone, if it is more."""
        need = self.natural_bytes
        if need is None or need <= self.limit_bytes:
            return ()
        there = format_bytes(self.limit_bytes)
        needed = f"natural routing would need {format_bytes(round(need))} per device"
        return (f"{needed}, more than the {there} there are; without --routing a plan leaves room",)

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
                saved_by_graphs_seconds=one.saved_by_graphs_seconds,
                hidden_by_shared_experts_seconds=one.step.beside,
                bound_by_host_seconds=one.step.bound_by_host,
                bound_by_replicas_seconds=one.step.bound_by_replicas,
                mean_parts=dict(one.mean_parts),
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


def layout_words(layout: FoldedLayout) -> str:
    """Return "dp 8 · tp 2 · pp 4 · vpp 2 · ep 8 · micro-batch 1", sizes of 1 omitted."""
    names = ("dp", "cp", "tp", "pp", "vpp", "ep", "etp")
    sizes = [f"{name} {getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    return " · ".join([*sizes, f"micro-batch {layout.micro_batch}"])


def _saving(one: FoundSaving) -> Saving:
    return Saving(
        change=one.change, layout=layout_words(one.found.layout),
        step_seconds=one.found.step.seconds, peak_bytes=round(one.found.memory.peak_bytes),
    )  # fmt: skip


def _layout(layout: FoldedLayout, job: TrainingJob) -> TrainingLayout:
    return TrainingLayout(
        dp=layout.dp, cp=layout.cp, tp=layout.tp, pp=layout.pp, vpp=layout.vpp, ep=layout.ep,
        etp=layout.etp, edp=layout.edp, micro_batch=layout.micro_batch,
        recompute=layout.recompute or ("none",), dispatcher=layout.dispatcher,
        overlap=layout.overlap, zero=layout.zero, cuda_graphs=layout.cuda_graphs,
        offload_activations=layout.offload_activations,
        offload_optimizer=layout.offload_optimizer, schedule=layout.order,
        stages=stage_words(layout.stages_of(job.decoder)) if layout.pp > 1 else None,
        degree=layout.degree,
    )  # fmt: skip


def _loads(routing: ExpertLoads | RecordedLayers) -> object:
    """Return the loads that a plan is for; of each layer with its spread where it has its own."""
    if isinstance(routing, RecordedLayers):
        return [(one.loads.loads, one.spread) for one in routing.layers]
    return routing.loads


def _id_of(inputs: Mapping[str, object]) -> str:
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def folded_layout(layout: TrainingLayout) -> FoldedLayout:
    """Return the layout in a plan's document.

    Raises:
        InputError: a module or a letter is unknown.
    """
    same = (
        "dp", "cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch", "dispatcher", "overlap", "zero",
        "cuda_graphs", "offload_activations", "offload_optimizer", "schedule", "degree",
    )  # fmt: skip
    recompute = () if layout.recompute == ("none",) else layout.recompute
    stages = None if layout.stages is None else read_stages(layout.stages)
    return decode(
        FoldedLayout,
        {name: encode(getattr(layout, name)) for name in same}
        | {"recompute": recompute, "stages": stages},
        "layout",
    )
