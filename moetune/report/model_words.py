"""Sentences on a training plan: where its numbers come from, what binds, and what pins cost."""

from collections.abc import Iterator, Mapping
from math import fsum
from types import MappingProxyType

from moetune.domain.packing import Packing
from moetune.domain.profile import Provenance
from moetune.domain.records import Calibration
from moetune.domain.targets import TargetName
from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.domain.training_document import (
    PlanOrigin,
    Saving,
    TrainingAnswer,
    TrainingDocument,
    TrainingStep,
)
from moetune.domain.tuning import AdaptedParts, Trained, Tuning
from moetune.domain.units import format_bytes, format_seconds, format_share
from moetune.report.section import plural, sentence
from moetune.report.words import sure_words
from moetune.solve.model.uncertainty import RECORDED, UNRECORDED

_COMPUTATION, _REPLICAS = "computation", "collectives of gradients and parameters"
_BINDING: Mapping[str, str] = MappingProxyType({
    "launches": "the host's launches", "exchange": "exchanges of tokens",
    "tensor_comm": "tensor-parallel collectives", "context_comm": "exchanges of sequence parts",
    "gradients": _REPLICAS,
    "bubble and sends": "waits in the pipeline",
    "offload": "copies to the host", "optimizer": "the optimizer",
})  # fmt: skip
"""What bounds a part of a step; other parts are computation."""
_SINGULAR = frozenset({_COMPUTATION, "the optimizer"})
_REDUCED_EACH = 2
"""From this ZeRO stage on, gradients are reduced after each micro-batch, not once a step."""
_NAMED_SHARE = 0.1
"""Smallest share of a step from which the second bound is named."""
_MOST = 0.5
"""Launches bind from this share of a step on, though devices wait only for a part of them."""
_NAMED_SAVINGS = 3
_ADAPTED_RUNS = (
    "Five tuned public runs of adapters on a dense model took 0.8 to 1.1 times such a prediction, "
    "three untuned ones of MoE models 1.3 to 2.2 times."
)
"""Source: docs/fine-tuning.md, How far it was off."""
_FEW = 0.1
"""Smaller shares of parameters are printed with two decimals."""
_TIMES = 2.0
"""Ratios of steps below this are printed as percentages."""
_SOURCES: Mapping[Provenance, str] = MappingProxyType({
    "published": "published tables of {device}, no measurement of yours",
    "modelled": "a description of {device}, scaled from published tables; no measurement of yours",
    "measured": "your measurement of {device}",
})  # fmt: skip


def origin_words(plan: TrainingDocument) -> Iterator[str]:
    """Yield where a plan's numbers come from, and the error of such predictions so far."""
    profile, origin = plan.inputs.profile, plan.origin
    if origin is None:
        yield f"Numbers: profile {profile}, {plan.trust}."
        return
    source = _SOURCES[origin.provenance].format(device=origin.device)
    if plan.calibration is not None:
        yield f"Numbers: {source} (profile {profile}). {calibration_words(plan.calibration)}"
        return
    yield f"Numbers: {source} (profile {profile}). {_error_words(origin, plan.target)}"
    if plan.inputs.tuning.adapters is not None and plan.inputs.facts.core is not None:
        yield _ADAPTED_RUNS


def calibration_words(calibration: Calibration, *, flag: str = "--uncalibrated") -> str:
    """Return a calibration's runs and its effect, and the flag, if any, that leaves it out."""
    count, of_model = calibration.num_runs, calibration.num_of_model
    mine = "" if of_model == count else f" ({of_model or 'none'} of this model)"
    left_out = calibration.num_left_out
    more = f" {left_out} more, off by more than three times, left out." if left_out else ""
    return (
        f"Calibrated by {plural(count, 'run')} of yours{mine}: steps are taken to be "
        f"{calibration.factor:.2f} times their prediction.{more} The factor is the same for all "
        f"layouts, and leaves their order as it is{f'; {flag} leaves it out' if flag else ''}."
    )


def _error_words(origin: PlanOrigin, target: TargetName) -> str:
    low, high = (f"{ratio:.2f}" for ratio in origin.public_ratios)
    such = "such a prediction"
    if origin.provenance != "published":
        such = "a prediction from published tables"
    if target in UNRECORDED:
        return (
            f"Nobody has published steps of {target} with their batch: {low} to {high} times "
            f"{such} is a guess, twice as wide as torchtitan's error."
        )
    runs = f"public runs of {RECORDED.get(target, 'Megatron')}"
    return f"Nine in ten {runs} took {low} to {high} times {such}."


def binding_words(best: TrainingAnswer) -> str:
    """Return what takes most of the step, and what takes second most if that is much.

    Time of passes that collectives of gradients and parameters outlast counts as collectives:
    faster computation would not shorten it, as `sensitivity` also says.
    """
    host = best.predicted.bound_by_host_seconds / best.predicted.step_seconds
    if host >= _MOST:
        return (
            f"The host's launches bind: blocks that take as long as them are "
            f"{format_share(host, digits=0)} of the step."
        )
    shares = _shares(best.predicted)
    first, *rest = sorted(shares, key=lambda name: -shares[name])
    verb = "binds" if first in _SINGULAR else "bind"
    share = format_share(shares[first], digits=0)
    words = f"{first[:1].upper()}{first[1:]} {verb}: {share} of the step"
    if rest and shares[rest[0]] >= _NAMED_SHARE:
        words += f", then {rest[0]} with {format_share(shares[rest[0]], digits=0)}"
    if first != _REPLICAS:
        return f"{words}."
    hidden = best.predicted.bound_by_replicas_seconds / best.predicted.step_seconds
    more = "micro-batch" if best.layout.zero >= _REDUCED_EACH else "step"
    return (
        f"{words}. Computation hides {format_share(hidden, digits=0)} and ends first: more tokens "
        f"a {more} would hide more."
    )


def _shares(step: TrainingStep) -> dict[str, float]:
    """Return the shares of a step by what bounds them: `_BINDING`, or computation."""
    groups: dict[str, list[float]] = {}
    for name, seconds in step.parts.items():
        groups.setdefault(_BINDING.get(name, _COMPUTATION), []).append(seconds)
    if outlasted := step.bound_by_replicas_seconds:
        groups.setdefault(_REPLICAS, []).append(outlasted)
        groups.setdefault(_COMPUTATION, []).append(-outlasted)
    return {name: fsum(seconds) / step.step_seconds for name, seconds in groups.items()}


def saving_words(plan: TrainingDocument) -> Iterator[str]:
    """Yield what single flags would save, and what all pins cost."""
    step, limit = plan.predicted.step_seconds, plan.inputs.memory_limit_bytes
    fitting = [saving for saving in plan.savings if saving.peak_bytes <= limit]
    if fitting:
        first, *rest = [
            (saving.change, _saved(saving, step)) for saving in fitting[:_NAMED_SAVINGS]
        ]
        said = [f"{first[0]} would save {first[1]}", *(f"{flag} {share}" for flag, share in rest)]
        yield f"Changed alone, {', '.join(said)}."
    for saving in plan.savings:
        if saving.peak_bytes > limit:
            yield (
                f"Memory binds, too: {saving.change} would save {_saved(saving, step)}, and needs "
                f"{format_bytes(saving.peak_bytes)} of {format_bytes(limit)}."
            )
    if (free := plan.free) is not None:
        ratio = step / free.step_seconds
        cost = f"cost {format_share(ratio - 1, digits=0)}"
        if ratio >= _TIMES:
            cost = f"make a step {ratio:.1f} times as long"
        yield (
            f"The pins {cost}: without them it takes {format_seconds(free.step_seconds)}, with "
            f"{free.layout}."
        )


def _saved(saving: Saving, step: float) -> str:
    return format_share(1 - saving.step_seconds / step, digits=0)


def how_sure(plan: TrainingDocument) -> str:
    """Return the probability and the regret of a layout among those that its pins allow."""
    is_pinned = plan.inputs.pins != LayoutRequest()
    if is_pinned and not plan.alternatives:
        return "The pins leave no other sizes to choose among."
    what, sure = "layout with these pins" if is_pinned else "layout", plan.confidence
    return f"{sure_words(what, sure.probability_best, sure.expected_regret)}."


def placement_words(plan: TrainingDocument) -> Iterator[str]:
    """Yield whether the experts of a model's layers are placed by their loads, and why."""
    if plan.placement is not None:
        how = "are placed by their loads" if plan.is_placed else "keep their order"
        yield sentence(f"Experts {how}: {plan.placement.why}")


_TARGETS: Mapping[AdaptedParts, str] = MappingProxyType({
    "attention": "attention", "experts": "the routed experts", "all": "attention and all FFNs",
})  # fmt: skip


def tuning_words(tuning: Tuning, trained: Trained | None) -> Iterator[str]:
    """Yield which parameters of a model train; nothing if all of them do."""
    if trained is None:
        return
    share = format_share(trained.share, digits=2 if trained.share < _FEW else 1)
    words = f"It trains {share} of the parameters, {trained.parameters:,}"
    if tuning.adapters is None:
        yield f"{words}. Frozen: {', '.join(tuning.frozen)}."
        return
    adapters, shared = tuning.adapters, ""
    if adapters.targets != "attention" and adapters.experts == "shared":
        shared = ", which the experts of a rank share"
    yield (
        f"{words}: adapters of rank {adapters.rank} on {_TARGETS[adapters.targets]}{shared}. The "
        f"weights below are frozen in {tuning.base}."
    )
    if tuning.base != "bfloat16":
        yield "Dequantization is modelled by the bytes that it moves, not measured."


def packing_words(packing: Packing | None, length: int) -> Iterator[str]:
    """Yield the effect of packed documents on attention, and the assumption on their lengths."""
    if packing is None:
        return
    words = (
        f"Documents of {packing.mean:,.0f} tokens on the mean are packed into sequences of "
        f"{length:,}: attention reads as in sequences of {packing.attended:,.0f}"
    )
    if packing.file:
        useful = format_share(packing.useful)
        yield f"{words}. Packed by best fit, {useful} of the tokens are theirs."
    else:
        yield f"{words}, all documents as long; --seq-lengths FILE has real ones."


def host_words(layout: FoldedLayout) -> str:
    """Return "activations of 25 % of the blocks and 50 % of the optimizer"; "" for nothing."""
    shares = (
        (layout.offload_activations, "activations of {} of the blocks"),
        (layout.offload_optimizer, "{} of the optimizer"),
    )
    return " and ".join(
        words.format(format_share(share, digits=0)) for share, words in shares if share
    )


def decision_words(words: str, layout: FoldedLayout) -> str:
    """Return a layout's decisions in a sentence or two; `words` are its sizes."""
    again = ", ".join(layout.recompute) or "nothing"
    overlap = "no overlap" if layout.overlap == "none" else f"overlap by {layout.overlap}"
    offloaded = host_words(layout)
    on_host = f" Keep {offloaded} in host memory." if offloaded else ""
    sharded = f"with ZeRO {layout.zero}" if layout.zero else "without ZeRO"
    return (
        f"Lay it out as {words}, {sharded}; recompute {again}, exchange with "
        f"{layout.dispatcher} and {overlap}.{on_host}"
    )
