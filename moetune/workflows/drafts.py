"""Drafts: plans with all that a page draws of them, made while somebody changes what is asked.

Nothing is stored. A process that makes one after the other keeps the costs of the last profiles.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from threading import get_ident
from typing import Any

from moetune.domain.architecture import Decoder
from moetune.domain.costs import Costs
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Alternative, Plan
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.domain.routing import BALANCED
from moetune.domain.site import site_of
from moetune.domain.targets import TARGETS, Target, TargetName, find_target
from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.fit.costs import costs_of
from moetune.huggingface.pasted import PastedConfig
from moetune.report.plan_figures import Option
from moetune.solve.joint.front import LARGE, SAVING, SLOW, front_within
from moetune.solve.joint.graphs import with_and_without_graphs
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.joint.ties import PricedLayout
from moetune.solve.layer.budget import MemoryBudget
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.timeline import Timeline
from moetune.solve.predict import plan_timelines
from moetune.solve.training.memory import RankMemory
from moetune.workflows.explain import Explanation, explain_plan
from moetune.workflows.export import PlanExport, export_training
from moetune.workflows.models import find_decoder_model
from moetune.workflows.options import layer_options
from moetune.workflows.plan import KnownCosts, plan_of, solve_layer, sound_numbers
from moetune.workflows.profiles import FoundProfile
from moetune.workflows.training import add_savings, search_training, training_job
from moetune.workflows.training_plan import TrainingPlan, TrainingRequest
from moetune.workflows.training_step import DrawnStep, draw_step

_MOST_PASSES = 320
"""Of a drawn pipeline: more are too thin to be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDraft:
    """A layer's plan that is not stored, without the chunks for other numbers of tokens.

    Args:
        options: other ways to run it, by time and memory.
        alternative_bytes: of a device with each of the plan's alternatives.
    """

    explanation: Explanation
    forward: Timeline
    backward: Timeline
    options: tuple[Option, ...]
    alternative_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuestion:
    """A question for a decoder's layout, before its model is read.

    Args:
        model: a name of the registry, or a configuration.
        world_size, memory_limit_bytes, dtype: None for the profile's, and for bfloat16.
    """

    model: str | PastedConfig
    target: TargetName
    global_batch: int
    length: int
    world_size: int | None = None
    dtype: str | None = None
    memory_limit_bytes: int | None = None
    pins: LayoutRequest = field(default_factory=LayoutRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetExport:
    """A plan as a runtime reads it, or the reason why it cannot.

    Args:
        problem: "" where there is an export.
    """

    target: Target
    export: PlanExport | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDraft:
    """A decoder's plan that is not stored.

    Args:
        title: of the model.
        ranks: memory of each pipeline rank.
    """

    plan: TrainingPlan
    title: str
    ranks: tuple[RankMemory, ...]
    step: DrawnStep
    exports: tuple[TargetExport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDraft:
    """The front of a decoder's layouts: the fastest for each memory.

    Args:
        front: within `SLOW` times the plan's step and `LARGE` times its limit of memory, least
            memory first; in host memory only of what the plan has there: with the optimizer the
            search takes twice as long.
    """

    plan: TrainingPlan
    front: tuple[PricedLayout, ...]


def draft_layer(request: PlanRequest, found: FoundProfile) -> LayerDraft:
    """Return the plan of a layer.

    Raises:
        InputError: the request is of a whole model, or its experts do not divide by the ranks.
        InfeasiblePlanError, ProfileError: as of `make_plan`.
    """
    profile = found.profile
    request.check_sizes()
    inputs = request.inputs_for(profile, fingerprint=found.digest)
    with sound_numbers(profile.name):
        costs = _layer_costs(
            _Known(digest=found.digest, profile=profile), (inputs.layer, inputs.world_size),
            get_ident(), allow_modelled=inputs.pinned.allow_modelled,
        )  # fmt: skip
        plan = plan_of(solve_layer(inputs, profile, costs, has_ranges=False), profile)
        explanation = explain_plan(plan, profile=profile)
        forward, backward = plan_timelines(plan=plan, costs=costs.own)
        return LayerDraft(
            explanation=explanation, forward=forward, backward=backward,
            options=layer_options(explanation, costs.own),
            alternative_bytes=tuple(_needed(one, plan, costs.own) for one in plan.alternatives),
        )  # fmt: skip


def draft_model(question: ModelQuestion, found: FoundProfile) -> ModelDraft:
    """Return the plan of a decoder.

    Raises:
        InputError: the model is unknown, its configuration is not understood, or a size is wrong.
        LayoutTooLargeError, ProfileError: as of `plan_training`.
    """
    profile = found.profile
    with sound_numbers(profile.name):
        known = _Known(digest=found.digest, profile=profile)
        return _drawn(_solved(known, question, get_ident()), profile)


def plan_model(question: ModelQuestion, found: FoundProfile) -> TrainingPlan:
    """Return the plan of a decoder as `moetune plan` makes it, with what its pins cost.

    Raises:
        InputError, LayoutTooLargeError, ProfileError: as of `draft_model`.
    """
    profile = found.profile
    with sound_numbers(profile.name):
        solved = _solved(_Known(digest=found.digest, profile=profile), question, get_ident())
        return add_savings(solved.plan, solved.search)


def draft_front(question: ModelQuestion, found: FoundProfile) -> FrontDraft:
    """Return the front beside the plan of a decoder.

    Raises:
        InputError, LayoutTooLargeError, ProfileError: as of `draft_model`.
    """
    profile = found.profile
    with sound_numbers(profile.name):
        solved = _solved(_Known(digest=found.digest, profile=profile), question, get_ident())
        plan = solved.plan
        front_of = partial(
            front_within, solved.search, slowest_seconds=SLOW * plan.best.step.seconds,
            most_bytes=LARGE * plan.limit_bytes, saving=SAVING,
        )  # fmt: skip
        hosting = _hosting_as(plan.best.layout, plan.request.pins)
        front = with_and_without_graphs(hosting, plan.best.layout, front_of)
    return FrontDraft(plan=plan, front=front)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A profile that is told from others by its digest alone."""

    digest: str
    profile: Profile = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Solved:
    """A decoder's plan, and the search that found it.

    Args:
        title, source, config: of the model.
    """

    title: str
    source: str
    plan: TrainingPlan
    search: FoldedSearch
    config: Mapping[str, Any]


@lru_cache(maxsize=1)
def _solved(known: _Known, question: ModelQuestion, thread: int) -> _Solved:
    """Return the plan of a question, and keep it for the front that is asked for next."""
    profile = known.profile
    title, source, decoder, config = _decoder(question.model)
    target = find_target(question.target)
    request = TrainingRequest(
        job=training_job(
            decoder, world_size=question.world_size, global_batch=question.global_batch,
            length=question.length, dtype=question.dtype, routing=BALANCED,
            optimizer=target.optimizers[0], profile=profile, leaves_room=True,
        ),
        pins=question.pins, target=target, memory_limit_bytes=question.memory_limit_bytes,
    )  # fmt: skip
    plan, search = search_training(request, profile, _model_costs(known, decoder, thread))
    return _Solved(title=title, source=source, plan=plan, search=search, config=config)


@lru_cache(maxsize=4)
def _layer_costs(
    known: _Known, group: tuple[LayerShape, int], thread: int, *, allow_modelled: bool
) -> KnownCosts:
    """Return costs that no other thread uses, and that no other layer or group makes larger."""
    del group, thread
    return KnownCosts.of(known.profile, allow_modelled=allow_modelled)


@lru_cache(maxsize=2)
def _model_costs(known: _Known, model: Decoder, thread: int) -> Costs:
    """Return costs that no other thread uses, and that no other model makes larger."""
    del model, thread
    return costs_of(known.profile, allow_modelled=True)


def _hosting_as(layout: FoldedLayout, pins: LayoutRequest) -> LayoutRequest:
    """Return pins that keep on the devices what a layout has there."""
    return replace(
        pins, offload_activations=pins.offload_activations if layout.offload_activations else 0.0,
        offload_optimizer=pins.offload_optimizer if layout.offload_optimizer else 0.0,
    )  # fmt: skip


def _needed(one: Alternative, plan: Plan, costs: Costs) -> int:
    """Return the peak of a step on one device with an alternative."""
    layer = layer_costs(workload=plan.workload, costs=costs)
    budget = MemoryBudget.of(workload=plan.workload, costs=layer, limit_bytes=0)
    degrees = one.forward_degree, one.backward_degree
    return budget.peak(strategy=one.strategy, degrees=degrees).device_bytes


def _decoder(model: str | PastedConfig) -> tuple[str, str, Decoder, Mapping[str, Any]]:
    if isinstance(model, PastedConfig):
        decoder = model.decoder()
        return f"Pasted {decoder.family}", "", decoder, json.loads(model.text)
    named = find_decoder_model(model, world_size=1)
    if named.decoder is None:
        raise InputError(f"{model} is a layer, not a model", "choose it under a layer")
    return named.title, named.source, named.decoder, named.config


def _drawn(solved: _Solved, profile: Profile) -> ModelDraft:
    plan = solved.plan
    layout = plan.best.layout
    return ModelDraft(
        plan=plan, title=solved.title, ranks=solved.search.memory.of_every_rank(layout),
        step=draw_step(solved.search.prices, layout, most_passes=_MOST_PASSES),
        exports=tuple(_exports(solved, profile)),
    )  # fmt: skip


def _exports(solved: _Solved, profile: Profile) -> Iterator[TargetExport]:
    """Yield the export of each runtime, the plan's own first."""
    plan = solved.plan
    own = plan.request.target.name
    for name in (own, *(one for one in TARGETS if one != own)):
        target = plan.request.target if name == own else find_target(name)
        try:
            made = export_training(
                plan, to=target, source=solved.source, site=site_of(profile), config=solved.config
            )
        except MoetuneError as error:
            yield TargetExport(target=target, export=None, problem=error.what)
            continue
        yield TargetExport(target=target, export=made)
