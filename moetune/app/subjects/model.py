"""The plan of a model's training, priced again with its profile."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, inf
from typing import Any, ClassVar, Literal

from moetune.app.routing_files import read_routing
from moetune.app.subjects.model_pins import asked_of_training, degree_texts, layout_texts
from moetune.app.subjects.values import (
    GIB,
    Asked,
    Instead,
    LostChoice,
    Neighbour,
    PricedPlan,
    Timelines,
    WhyNot,
)
from moetune.app.training import plan_training
from moetune.app.training_plan import TrainingRequest, plan_id, planned_job, scaled_parts
from moetune.domain.any_plan import plan_from_document
from moetune.domain.costs import Costs
from moetune.domain.document import encode
from moetune.domain.errors import InfeasiblePlanError, InputError, LayoutTooLargeError, ProfileError
from moetune.domain.training_document import TrainingAnswer, TrainingDocument
from moetune.domain.units import format_chunks, format_seconds, format_share
from moetune.fit.costs import costs_of
from moetune.fit.speeds import ATTENTION, GEMM_RATE, PARTS, Slowdown, slowed
from moetune.report.why_not import ComparedChoice, Refusal, difference_of
from moetune.solve.model.alternatives import as_graphed
from moetune.solve.model.best import BestLayouts
from moetune.solve.model.placement import placed_job, placing
from moetune.solve.model.profiled import search_of, step_prices, usable_bytes
from moetune.solve.model.rank_memory import ERROR_SHARE, is_tight
from moetune.solve.model.search import NOISE, FoldedSearch
from moetune.solve.model.step import StepPrices
from moetune.solve.model.uncertainty import confidence_of
from moetune.solve.trace import num_drawn, rank_spans

EXPLANATION_SCHEMA = "moetune.training-explanation/1"
LAUNCHES, POSTED = "launches", "posted messages"
_EXPLAINED = (
    "step_seconds", "saved_by_overlap_seconds",
    "model_tflops_per_device", "mfu", "parts",
)  # fmt: skip
_MOVED = ("tp", "cp", "pp", "ep", "micro_batch")
_COMMUNICATION = frozenset({"exchange", "tensor_comm", "context_comm", "gradients"})
_WAITING = frozenset({"launches", "bubble and sends", "between steps"})
_RULE = (
    f"Of layouts within {format_share(NOISE, digits=0)} of each other the plan takes a layout "
    "that leaves memory free, then the simpler layout. The search does not try faster layouts "
    "unless they are pinned: plan again with these pins to take it"
)


@dataclass(frozen=True, kw_only=True)
class ModelSubject(PricedPlan):
    """A training plan that is priced again.

    Args:
        model: the `config.json` that the plan was made for; None to look the model up by name.
    """

    plan: TrainingDocument
    model: str | None
    kind: ClassVar[Literal["training"]] = "training"

    @property
    def memory_limit_bytes(self) -> int:
        """Memory of a device that the layout may take."""
        return self.plan.inputs.memory_limit_bytes

    @property
    def kinds(self) -> dict[str, float]:
        """Seconds of computation, exposed communication and waiting, which add up to the step."""
        return kinds_of(self.plan.predicted.parts)

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune explain` and of the service."""
        plan, step = self.plan, self.plan.predicted
        return {
            "schema": EXPLANATION_SCHEMA, "plan": plan.id,
            "confidence": encode(plan.confidence),
            "profile_quality": encode(plan.profile_quality),
            "kinds": self.kinds,
            **{name: encode(getattr(step, name)) for name in _EXPLAINED},
            "memory": {
                "peak_bytes": plan.memory.peak_bytes, "limit_bytes": self.memory_limit_bytes,
                "parts": dict(plan.memory.parts),
            },
            "alternatives": [
                {
                    "layout": encode(row.layout), "step_seconds": row.predicted.step_seconds,
                    "differences": difference_of(self.choice, _choice(row)).parts,
                }
                for row in plan.alternatives
            ],
            **({} if plan.placement is None else {"placement": encode(plan.placement)}),
        }  # fmt: skip

    @property
    def choice(self) -> ComparedChoice:
        """The plan's layout, with the range of its step."""
        return _choice_of(self.plan)

    @property
    def alternatives(self) -> Sequence[LostChoice]:
        """The layouts that the plan was compared with."""
        return [LostChoice(_choice(row)) for row in self.plan.alternatives]

    @property
    def rule(self) -> str:
        """The rule by which a plan may prefer a slower layout."""
        return _RULE

    def asked(self, question: WhyNot) -> Asked:
        """Return the layout or the chunks of the question; raise InputError for wrong values."""
        return asked_of_training(question, self.plan)

    def instead(self, asked: Asked) -> Instead:
        """Return the best plan with these pins, or the smallest with a refusal if none fits."""
        if "degree" in asked.pins:
            return self._in_chunks(asked)
        try:
            plan = self._planned(asked)
        except LayoutTooLargeError as error:
            refused = self._blocking(asked) or Refusal.of(error)
            smallest = plan_from_document(encode(error.plan)).as_model()
            return Instead(choice=_choice_of(smallest), refused=refused)
        except (InputError, InfeasiblePlanError) as error:
            return Instead(refused=Refusal.of(error))
        choice = _choice_of(plan)
        is_piped = max(plan.layout.pp, self.plan.layout.pp) > 1
        mean = ("Parts are on the mean of the pipeline ranks",) if is_piped else ()
        warnings = [warning for warning in plan.warnings if warning not in self.plan.warnings]
        return Instead(
            choice=choice, probability_faster=self._chance(choice), notes=(*mean, *warnings)
        )

    @property
    def parts(self) -> tuple[str, ...]:
        """The machine's parts, and the host's, that can change a training step."""
        return (*PARTS, LAUNCHES, POSTED)

    def seconds(self, slowdown: Slowdown | None = None) -> float:
        """Return the seconds of the plan's layout on its machine or on a slower machine."""
        return self.plan.factor * self._slow_prices(slowdown).step(self.plan.layout).seconds

    def neighbours(self) -> Iterator[Neighbour]:
        """Yield the best layouts with half and twice each size, and with 1 GiB more memory."""
        for name in _MOVED:
            size = getattr(self.plan.layout, name)
            moved = [2 * size] if size % 2 else [size // 2, 2 * size]
            yield from (self._neighbour(name, moved_size) for moved_size in moved)
        search = self._search(self.memory_limit_bytes + GIB)
        roomy = BestLayouts(search, self._priced.pins).best()
        words = f"1 GiB more memory: {roomy.layout.words}"
        yield Neighbour("memory-limit", words, self.plan.factor * roomy.step.seconds)

    def timelines(self) -> Timelines:
        """Return every pipeline rank's passes in the order of its schedule."""
        layout, pipeline = self.plan.layout, self._prices.pipeline(self.plan.layout)
        num, ranks = pipeline.num_micro_batches, range(layout.pp)
        shown = num_drawn(pipeline)
        by_rank = rank_spans(
            pipeline, self._prices.step(layout).parts, shown,
            tokens=layout.micro_batch * self._request.job.length // layout.cp,
        )  # fmt: skip
        notes = [f"Passes of the first {shown:,} of {num:,} micro-batches."] if shown < num else []
        if self.plan.calibration is not None:
            notes.append("Times are without the factor of the plan's calibration.")
        return Timelines(
            [(f"predicted, pipeline rank {rank}", by_rank[rank]) for rank in ranks],
            notes=tuple(notes),
        )

    @cached_property
    def _request(self) -> TrainingRequest:
        return _planned_request(self.plan, self.model)

    @cached_property
    def _priced(self) -> TrainingRequest:
        """The request to price layouts with: with the plan's CUDA graphs and placed experts."""
        request = self._request
        request = replace(request, pins=as_graphed(request.pins, self.plan.layout))
        if not self.plan.is_placed:
            return request
        return replace(request, job=placed_job(request.job), target=placing(request.target))

    @cached_property
    def _costs(self) -> Costs:
        return costs_of(self.machine, allow_modelled=True)

    @cached_property
    def _prices(self) -> StepPrices:
        return step_prices(self._priced.job, self._priced.target, self.machine, self._costs)

    def _planned(self, asked: Asked, *, drop: Sequence[str] = ()) -> TrainingDocument:
        """Return the plan with the asked pins, and without those of its pins that `drop` names."""
        pins = replace(self._request.pins.without(drop), **asked.pins)
        return plan_training(replace(self._request, pins=pins), self.machine)

    def _blocking(self, asked: Asked) -> Refusal | None:
        """Return which of the plan's pins leaves no room for the asked layout, else None."""
        pins = self._request.pins
        names = [name for name in pins.pinned if name not in asked.pins]
        for some in (*([name] for name in names), names):
            try:
                best = self._planned(asked, drop=some).best
            except (InputError, InfeasiblePlanError):
                continue
            step = format_seconds(best.predicted.step_seconds)
            return Refusal(
                what=f"the plan's {pins.only(*some).words} leaves no room for it",
                hint=f"without that pin it fits: {best.words}, {step} a step",
            )
        return None

    def _in_chunks(self, asked: Asked) -> Instead:
        """Return the plan's layout with other chunks; raise InputError if it has no chunks."""
        if self.plan.layout.overlap != "chunks":
            target = "" if self.plan.target == "moetune" else " and --target moetune"
            raise InputError(
                f"the plan's layout hides exchanges by overlap {self.plan.layout.overlap}, not in "
                "chunks",
                f"ask with --layout, or plan with --overlap chunks{target}",
            )
        layout = replace(self.plan.layout, **asked.pins)
        degrees = asked.pins["degree"]
        choice = replace(
            _choice(self.plan.best),
            name=f"{format_chunks(degrees.forward, degrees.backward)}, layout {layout.words}",
            decision={**self.choice.decision, **asked.texts},
            step_seconds=self.plan.factor * self._prices.step(layout).seconds,
            parts=scaled_parts(self._prices.mean_parts(layout), self.plan.factor),
        )
        return Instead(choice=choice, probability_faster=self._chance(choice))

    def _chance(self, choice: ComparedChoice) -> float:
        """Return the probability that another layout is faster, by the record of public runs."""
        steps = [self.choice.step_seconds, choice.step_seconds]
        return 1.0 - confidence_of(steps).probability_best

    def _neighbour(self, name: str, size: int) -> Neighbour:
        """Return the best layout with a size moved and the plan's other sizes kept."""
        knob = name.replace("_", "-")
        sizes = {moved: getattr(self.plan.layout, moved) for moved in (*_MOVED, "etp")}
        sizes[name] = size
        sizes["etp"] = min(sizes["etp"], sizes["tp"])
        search = self._search(self.memory_limit_bytes)
        try:
            best = BestLayouts(search, replace(self._priced.pins, **sizes)).best()
        except (InputError, InfeasiblePlanError, ProfileError) as error:
            return Neighbour(knob, f"{knob} {size}", None, error.what)
        words = f"{knob} {size}: {best.layout.words}"
        note = "" if search.fits(best.layout) else "does not fit"
        return Neighbour(knob, words, self.plan.factor * best.step.seconds, note)

    def _search(self, limit_bytes: int) -> FoldedSearch:
        is_default = self.memory_limit_bytes == usable_bytes(self.machine.machine)
        leaves_room = is_default and not is_tight(self.plan.memory, self.memory_limit_bytes)
        limit = limit_bytes or inf
        return search_of(
            self._prices,
            self.machine,
            limit_bytes=limit,
            error_share=ERROR_SHARE if leaves_room else 0.0,
        )

    def _slow_prices(self, slowdown: Slowdown | None) -> StepPrices:
        """Return the prices of steps on a machine with a slower or faster part."""
        if slowdown is None:
            return self._prices
        job, target = self._priced.job, self._priced.target
        if slowdown.part == LAUNCHES:
            slow = replace(target, launches=target.launches * slowdown.factor)
            return step_prices(job, slow, self.machine, self._costs)
        prices = step_prices(job, target, self.machine, slowed(self._costs, slowdown))
        device, factor = prices.device, slowdown.factor
        # Attention is a separate part and does not follow the GEMMs.
        slow_factors: dict[str, dict[str, Any]] = {
            POSTED: {"posted_chunk_seconds": factor * device.posted_chunk_seconds},
            ATTENTION: {"attention_factor": factor}, GEMM_RATE: {"gemm_factor": factor},
        }  # fmt: skip
        changes = slow_factors.get(slowdown.part, {})
        return replace(prices, device=replace(device, **changes))


def _planned_request(plan: TrainingDocument, model: str | None) -> TrainingRequest:
    """Return the request of a plan; raise InputError if its model or routing has changed."""
    inputs, name = plan.inputs, f"plan {plan.id[:6]}"
    _, job = planned_job(plan, given=model)
    decoder, routing = read_routing(inputs.routing, job.decoder)
    request = TrainingRequest(
        job=replace(job, decoder=decoder, routing=routing, leaves_room=inputs.leaves_room),
        pins=inputs.pins, target=inputs.facts, memory_limit_bytes=inputs.memory_limit_bytes,
        calibration=plan.calibration,
    )  # fmt: skip
    if plan_id(inputs, request) != plan.id:
        raise InputError(
            f"{name}: its model, routing or version of moetune has changed",
            "make the plan again; where its model is a config.json, name it with --model",
        )
    return request


def kinds_of(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of all parts' seconds of computation, exposed communication and waiting."""
    named = {"communication": _COMMUNICATION, "waiting": _WAITING}
    named = {"computation": frozenset(parts) - _COMMUNICATION - _WAITING, **named}
    return {  # fsum does not depend on the order of the parts
        kind: fsum(seconds for name, seconds in parts.items() if name in names)
        for kind, names in named.items()
    }


def _choice_of(plan: TrainingDocument) -> ComparedChoice:
    return replace(
        _choice(plan.best),
        p05_step_seconds=plan.confidence.p05_step_seconds,
        p95_step_seconds=plan.confidence.p95_step_seconds,
    )


def _choice(answer: TrainingAnswer) -> ComparedChoice:
    degree = answer.layout.degree
    values = {
        name: value
        for name, value in encode(answer.layout).items()
        if value is not None and name != "degree"
    }
    return ComparedChoice(
        name=answer.words,
        decision=layout_texts(values) | ({} if degree is None else degree_texts(degree)),
        step_seconds=answer.predicted.step_seconds,
        parts=answer.mean_parts,
        needed_bytes=answer.memory.peak_bytes,
    )
