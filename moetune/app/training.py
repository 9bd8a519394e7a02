"""The plan of a decoder's training: the search for the fastest layout, or why nothing fits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from moetune.app.plan import sound_numbers
from moetune.app.training_plan import TrainingRequest, answer_of, plan_id, saving_of
from moetune.domain.budget import Spread
from moetune.domain.costs import Costs
from moetune.domain.errors import (
    InfeasiblePlanError,
    InputError,
    LayoutTooLargeError,
    MoetuneError,
    RefusedLayoutError,
)
from moetune.domain.plan import Confidence
from moetune.domain.profile import Profile
from moetune.domain.routing import BALANCED
from moetune.domain.routing_record import RecordedLayers
from moetune.domain.site import check_format, site_of
from moetune.domain.target_rules import model_rules
from moetune.domain.training import (
    FoldedLayout,
    LayoutRequest,
)
from moetune.domain.training_document import PlanOrigin, TrainingDocument
from moetune.domain.units import format_bytes, format_seconds
from moetune.fit.costs import costs_of
from moetune.fit.missing import check_numbers
from moetune.fit.quality import quality_of
from moetune.fit.variants import RESAMPLING_SEED, resample_costs
from moetune.report.doubts import uncounted_words
from moetune.report.model_warnings import (
    host_memory_words,
    loading_words,
    network_words,
    routing_words,
    stand_in_words,
    tight_words,
    unpublished_words,
)
from moetune.report.reasons import placement_reason
from moetune.solve.model.activations import ELEMENT
from moetune.solve.model.alternatives import Savings, memory_front, with_graphs
from moetune.solve.model.best import BestLayouts, with_room
from moetune.solve.model.memory import MemoryModel
from moetune.solve.model.model_chunks import chunks_of
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.placement import solve_placed
from moetune.solve.model.profiled import search_of, step_prices, usable_bytes
from moetune.solve.model.search import FoldedSearch, PricedLayout
from moetune.solve.model.step import StepPrices
from moetune.solve.model.trained import trained_of
from moetune.solve.model.uncertainty import confidence_of, drawn_ratios, public_ratios


def plan_training(
    request: TrainingRequest,
    profile: Profile,
    *,
    with_front: bool = False,
    with_savings: bool = False,
) -> TrainingDocument:
    """Return the fastest layout that the rules, the pins and the memory allow.

    Args:
        with_front: also compute the fastest layout for every other memory size.
        with_savings: also compute what single flags and all pins cost.

    Raises:
        InputError: the pins break a rule, or the profile lacks the dtype.
        InfeasiblePlanError: the runtime does not support the model.
        LayoutTooLargeError: nothing fits; the error has the smallest layout with its price.
        RefusedLayoutError: the runtime refuses the pins; the error has their price.
        ProfileError: the profile lacks an operation.
    """
    solved = _solve(request, profile)
    plan, pins, best = solved.plan, _of_layouts(request.pins), solved.best
    if not plan.fits:
        raise _too_large(solved, request)
    with sound_numbers(profile.name):
        if with_front:
            front = memory_front(
                replace(solved.search, error_share=0.0), pins, best.layout.cuda_graphs
            )
            device, target, factor = profile.machine.device, request.target, plan.factor
            answers = (answer_of(row, request.job, device, target, factor=factor) for row in front)
            plan = replace(plan, front=tuple(answers))
        if with_savings:
            savings = Savings(search=solved.search, pins=pins, best=best)
            free, factor = savings.free(), plan.factor
            plan = replace(
                plan, savings=tuple(saving_of(saving, factor) for saving in savings.of_flags()),
                free=None if free is None else saving_of(free, factor),
            )  # fmt: skip
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """A plan, which may not fit, with its layout and the search behind it."""

    plan: TrainingDocument
    best: PricedLayout
    search: FoldedSearch


def _solve(request: TrainingRequest, profile: Profile) -> _Solved:
    _check_placement_rule(request)
    check_format(profile, request.job.dtype)
    broken = next(model_rules(request.job.decoder, request.target), None)
    if broken is not None:
        raise InfeasiblePlanError(broken.what, broken.hint)
    check_numbers(profile, request.job, request.target)
    try:
        solved = _search(request, profile)
    except RefusedLayoutError as error:
        raise _with_price(error, request, profile) from None
    return solved if solved.plan.fits else _on_host(solved, request, profile)


_NUM_DRAWS = 20
_ON_HOST = LayoutRequest(tp=1, cp=1, pp=1, vpp=1, zero=3, offload_optimizer=1.0)
"""Pins of layouts that keep states in chunks in host memory, as `moetune.shard` does."""


def _on_host(solved: _Solved, request: TrainingRequest, profile: Profile) -> _Solved:
    """Return the plan with states in host memory if that fits, else the given plan."""
    wanted = _ON_HOST.pinned
    is_free = all(getattr(request.pins, name) in (None, size) for name, size in wanted.items())
    if not request.target.offloads_states or not is_free:
        return solved
    pinned = replace(request, pins=replace(request.pins, **wanted))
    try:
        on_host = _search(pinned, profile)
    except MoetuneError:
        return solved
    if not on_host.plan.fits:
        return solved
    inputs = replace(on_host.plan.inputs, pins=request.pins)
    request = request.calibrated(on_host.plan.layout)
    plan = replace(on_host.plan, id=plan_id(inputs, request), inputs=inputs)
    return replace(on_host, plan=plan)


def _check_placement_rule(request: TrainingRequest) -> None:
    """Raise InputError if an expert-placement rule lacks loads or the runtime places nothing."""
    rule, target = request.pins.expert_placement, request.target
    if rule is None:
        return
    if not isinstance(request.job.routing, RecordedLayers):
        raise InputError(
            f"--expert-placement {rule} needs loads of each layer's experts: without them none is "
            "placed",
            "omit --expert-placement, or give the record of the model's routing with --routing",
        )
    if rule != "natural" and not target.places_experts:
        raise InputError(
            f"--expert-placement {rule}: {target.name} keeps experts in the model's order",
            "omit --expert-placement, or plan with --target moetune",
        )


def _with_price(
    error: RefusedLayoutError, request: TrainingRequest, profile: Profile
) -> RefusedLayoutError:
    """Return the error with the price that the pins would have if the runtime ran them."""
    try:
        plan = _search(request, profile, asks_runtime=False).plan
    except MoetuneError:  # without known times
        return error
    step, peak = plan.predicted.step_seconds, plan.memory.peak_bytes
    price = f"as pinned a step would take {format_seconds(step)} and {format_bytes(peak)}"
    return RefusedLayoutError(
        error.what, f"{error.hint}; {price}", plan.document, field=error.field
    )


def _search(request: TrainingRequest, profile: Profile, *, asks_runtime: bool = True) -> _Solved:
    """Return the best layout's plan; without `asks_runtime`, also layouts the runtime refuses."""
    limit = request.memory_limit_bytes or usable_bytes(profile.machine)
    with sound_numbers(profile.name):
        costs = costs_of(profile, allow_modelled=True)
        prices = step_prices(request.job, request.target, profile, costs)
        search = search_of(prices, profile, limit_bytes=limit, asks_runtime=asks_runtime)
        pins, placement = _of_layouts(request.pins), None
        if limit == usable_bytes(profile.machine) and profile.machine.kind == "cuda":
            search = with_room(search, pins)
        if isinstance(request.job.routing, RecordedLayers):
            placed = solve_placed(search, request.pins)
            why = placement_reason(placed, target=search.target.name, zero=request.pins.zero)
            layouts, placement = placed.layouts, replace(placed.placement, why=why)
        else:
            layouts = BestLayouts.of(search, pins)
        search, best = layouts.search, layouts.best()
        ranked = (with_graphs(search, pins, best) or layouts).ranked()
        plan = _document(request, profile, search, ranked)
    return _Solved(plan=replace(plan, placement=placement), best=ranked[0], search=search)


def _document(
    request: TrainingRequest, profile: Profile, search: FoldedSearch, ranked: list[PricedLayout]
) -> TrainingDocument:
    """Return the plan of ranked layouts; the calibration of the first holds for all of them."""
    request = request.calibrated(ranked[0].layout)
    limit = request.memory_limit_bytes or usable_bytes(profile.machine)
    inputs, device = request.inputs(profile, limit), profile.machine.device
    facts, target = request.target, request.target.name
    chosen, *alternatives = (
        answer_of(row, request.job, device, facts, factor=request.factor) for row in ranked
    )  # fmt: skip
    price = partial(step_prices, search.wholes.job, search.target, profile)
    sure = confidence_of(
        [row.step.seconds for row in ranked], target=target,
        ratios=stand_in_ratios(price, profile, ranked[0]),
        calibration=request.calibration,
    )  # fmt: skip
    return TrainingDocument(
        id=plan_id(inputs, request), inputs=inputs, layout=chosen.layout,
        predicted=chosen.predicted, memory=chosen.memory, fits=search.fits(ranked[0].layout),
        confidence=sure, run=inputs.run(step_spread(chosen.predicted.step_seconds, sure)),
        trust=search.prices.device.trusts.least, profile_quality=quality_of(profile),
        warnings=(
            *uncounted_words(request.job.decoder),
            *_missing_words(
                price(costs_of(profile, allow_modelled=True)), profile, ranked[0].layout
            ),
            *_memory_words(request, ranked[0], search, profile, limit),
        ),
        alternatives=tuple(alternatives),
        origin=PlanOrigin(
            provenance=profile.provenance, device=device, public_ratios=public_ratios(target)
        ),
        chunks=chunks_of(request.job, ranked[0].layout) if target == "moetune" else None,
        calibration=request.calibration,
        trained=trained_of(request.job, facts),
    )  # fmt: skip


def stand_in_ratios(
    price: Callable[[Costs], StepPrices], profile: Profile, chosen: PricedLayout
) -> tuple[float, float]:
    """Return quantiles, 5 % and 95 %, of a step over its prediction from stand-ins alone.

    For published machines with a network, the record of public runs already has the error. Else
    the step is priced under drawn costs, as another link, another group or a reference machine may
    stand in, and samples have noise.
    """
    if profile.network is not None and profile.provenance == "published":
        return 1.0, 1.0
    drawn = resample_costs(profile, num=_NUM_DRAWS, seed=RESAMPLING_SEED, allow_modelled=True)
    return drawn_ratios(map(price, drawn), chosen)


def _missing_words(prices: StepPrices, profile: Profile, layout: FoldedLayout) -> Iterator[str]:
    """Yield what public runs and the profile lack of a layout, for prices of nothing else."""
    prices.step(layout)
    yield from unpublished_words(layout, prices.target)
    yield from network_words(prices.job.world_size, profile)
    yield from stand_in_words(prices.device.trusts.doubts)


def step_spread(seconds: float, sure: Confidence) -> Spread:
    """Return the seconds of a step with their range."""
    return Spread(p05=sure.p05_step_seconds, predicted=seconds, p95=sure.p95_step_seconds)


def _memory_words(
    request: TrainingRequest, best: PricedLayout, search: FoldedSearch, profile: Profile, limit: int
) -> Iterator[str]:
    """Yield what routing, loading, hosts and errors of the prediction need beyond what there is."""
    job, has_experts = request.job, bool(request.job.decoder.num_moe_layers)
    if has_experts and job.routing == BALANCED and not job.leaves_room:
        stages, roomy = DecoderStages(job.decoder), replace(job, leaves_room=True)
        memory = MemoryModel(job=roomy, stages=stages, target=request.target)
        if (need := memory.needs(best.layout)[0]) > limit:
            yield routing_words(need, limit)
    need = ELEMENT * round(job.decoder.parameters.total)
    if has_experts and job.tuning.base != "bfloat16" and need > limit:
        yield loading_words(need, limit)
    rank_bytes = round(best.memory.host_bytes)
    if rank_bytes and search.host_bytes == inf:
        sharers = min(search.job.world_size, site_of(profile).devices_per_node)
        yield host_memory_words(profile.name, rank_bytes * sharers)
    yield from tight_words(best.memory, usable_bytes(profile.machine))


def _of_layouts(pins: LayoutRequest) -> LayoutRequest:
    return pins if pins.expert_placement is None else replace(pins, expert_placement=None)


def _too_large(solved: _Solved, request: TrainingRequest) -> LayoutTooLargeError:
    """Return the error that says whether device or host memory binds, and what would help."""
    plan, best, search = solved.plan, solved.best, solved.search
    host_bytes, limit = best.memory.host_bytes, plan.inputs.memory_limit_bytes
    if host_bytes > search.host_bytes:
        need, share = format_bytes(round(host_bytes)), format_bytes(int(search.host_bytes))
        return LayoutTooLargeError(
            f"host memory binds: {need} for each device is more than its share of a host's, "
            f"{share}",
            "offload a smaller share, or recompute more",
            plan.document,
        )
    parts = best.memory.parts
    ways = ["take more ranks, or devices with more memory"]
    if parts.get("gathered", 0) > limit:  # whole, on however many ranks
        ways = ["take devices with more memory, or another --target"]
    if request.pins != LayoutRequest():
        ways.append("leave more of the layout to the solver")
    return LayoutTooLargeError(
        f"memory binds: {request.job.decoder.name} needs "
        f"{format_bytes(round(best.memory.peak_bytes))} per device with "
        f"{best.layout.words} (most of it {max(parts, key=parts.__getitem__)}), more than "
        f"the {format_bytes(limit)} there are",
        "; ".join(ways),
        plan.document,
    )
