"""Words on a plan of either kind: its workload, speed, memory, and how sure it is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from moetune.app.subjects.layer import LayerSubject
from moetune.domain.any_plan import AnyPlan
from moetune.domain.plan import Confidence, Plan
from moetune.domain.profile import Profile, ProfileQuality, SuspectGroup
from moetune.domain.throughput import Throughput
from moetune.domain.units import format_bytes, format_flops
from moetune.report.section import EMPTY, Cell, Section, percent, plural, sentence

KINDS = "layer", "tensor", "training"
"""Of plans: of a layer, of one that tensor-parallel ranks share, of a model's training."""
LEAST_REGRET = 5e-4
_CERTAIN = 0.995
"""Share of refits from which a probability reads "over 99 %": agreement of all is not certainty."""


def plan_scope(plan: AnyPlan, *, profile: Profile | None = None) -> str:
    """Return what a plan is of: "64 experts over 64 GPUs · 8,192 tokens per GPU · bfloat16".

    Args:
        profile: tells whether a rank is a GPU.
    """
    device = device_word(profile)
    devices, dtype = plural(plan.inputs.world_size, device), plan.inputs.dtype
    if plan.kind == "training":
        batch = f"{plural(plan.inputs.global_batch, 'sequence')} of {plan.inputs.seq:,} tokens"
        return f"{devices} · {batch} · {dtype} · for {plan.inputs.runtime}"
    tokens, experts = plan.inputs.tokens_per_rank, plan.inputs.layer.num_experts
    each = f"on every {device}" if plan.kind == "tensor" else f"per {device}"
    if plan.workload.sequence_parallel:
        each = f"in shards, one per {device}"
    return (
        f"{plural(experts, 'expert')} over {devices} · {plural(tokens, 'token')} {each} · {dtype}"
    )


def speed_words(speed: Throughput, device: str = "device") -> str:
    """Return "423 TFLOP/s a GPU, MFU 42.8 %", or "no peak known" in place of MFU.

    Args:
        device: word for one; "" where it is said elsewhere.
    """
    rate = format_flops(speed.flops_per_second) + (f" a {device}" if device else "")
    return f"{rate}, {mfu_words(speed)}"


def mfu_words(speed: Throughput) -> str:
    """Return "MFU 42.8 %", or that the device's peak is not known."""
    return "no peak known" if speed.mfu is None else f"MFU {percent(speed.mfu)}"


def speed_cell(speed: Throughput | None) -> Cell:
    """Return the cell of model FLOPs a second of one device; an empty one for None."""
    if speed is None:
        return EMPTY
    return Cell(text=format_flops(speed.flops_per_second), value=speed.flops_per_second)


def tflops_cell(speed: Throughput | None) -> Cell:
    """Return the same in TFLOP/s, for a narrow column; the value stays in FLOP/s."""
    if speed is None:
        return EMPTY
    return Cell(text=f"{speed.flops_per_second / 1e12:.3g}", value=speed.flops_per_second)


def mfu_cell(speed: Throughput | None) -> Cell:
    """Return the cell of a share of the device's peak, which says where that is not known."""
    if speed is None:
        return EMPTY
    return replace(Cell.share(speed.mfu), text=mfu_words(speed).removeprefix("MFU "))


def suspect_words(profile: str, quality: ProfileQuality | None) -> Iterator[str]:
    """Yield what is suspect of a plan's profile, and what to do; nothing of a better one.

    Args:
        profile: its name.
    """
    if quality is None or quality.label != "suspect":
        return
    groups = ", ".join(_suspect_group(one) for one in quality.suspect)
    yield (
        f"The profile {profile!r} is suspect, and so is this plan: {groups}. Measure it again on "
        f"an idle machine; `moetune profiles show {profile}` says how."
    )


def largest_first(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the parts that are there, the largest first, whichever order a document has."""
    return sorted(((name, size) for name, size in parts.items() if size), key=lambda one: -one[1])


def trust_words(plan: AnyPlan) -> str:
    """Return "measured", or "measured, suspect" where the profile is."""
    return f"{plan.trust}, suspect" if plan.is_suspect else plan.trust


def _suspect_group(one: SuspectGroup) -> str:
    if one.median_error is None or one.p95_error is None:
        return f"{one.group} (times vary too much)"
    return (
        f"{one.group} (sizes left out are predicted {percent(one.median_error)} off in the "
        f"median, {percent(one.p95_error)} at p95)"
    )


def memory_words(subject: LayerSubject, num_bytes: int, parts: str) -> str:
    """Return the memory of one device, its limit, and its parts."""
    limit = subject.memory_limit_bytes
    of_limit = f" of {format_bytes(limit)}" if limit else ""
    device = device_word(subject.profile)
    used = f"Memory: {format_bytes(num_bytes)}{of_limit} per {device}: {parts}."
    return " ".join([used, *_headroom(subject)])


def _headroom(subject: LayerSubject) -> Iterator[str]:
    """Yield what the default limit leaves free of a GPU, and what for."""
    profile = subject.profile
    if profile is None or subject.plan.inputs.memory_limit_bytes is not None:
        return
    free = profile.machine.memory_bytes - profile.machine.plannable_bytes
    if free:
        share = percent(free / profile.machine.memory_bytes, digits=0)
        yield (
            f"The limit leaves {format_bytes(free)} ({share}) free for the CUDA context, NCCL and "
            "fragmentation; a memory limit sets another."
        )


def device_word(profile: Profile | None) -> str:
    """Return the word for a rank: "GPU" where the profile's machine has them."""
    return "GPU" if profile is not None and profile.machine.kind == "cuda" else "rank"


def routing_words(plan: Plan) -> Iterator[str]:
    """Yield how uneven a layer's routing is, and where its experts are."""
    if plan.experts and plan.placement is not None:
        yield sentence(f"Experts are placed by their loads: {plan.placement.why}")
        return
    mean = f"{plan.workload.skew.mean:.2f}"
    if mean == "1.00":
        return
    yield f"Routing is uneven: the fullest rank has {mean} × the mean rows, and the others wait."
    if plan.placement is not None:
        yield sentence(f"Experts keep their order: {plan.placement.why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """Sentences and sections of a plan; what a kind does not have is omitted.

    Args:
        words: on its routing and its experts' places.
        why: it is this choice.
        sure: how sure that is.
        pins: by their flags.
        terms: what time and memory consist of.
        notes: remarks on the alternatives.
        ranges: the choice for other sizes.
    """

    title: str
    scope: str
    words: tuple[str, ...]
    why: tuple[str, ...]
    sure: str
    pins: tuple[tuple[str, str], ...]
    terms: tuple[Section, ...]
    notes: tuple[str, ...] = ()
    ranges: tuple[Section, ...] = ()


def how_sure_of_layout(confidence: Confidence, what: str = "layout") -> str:
    """Return the probability and the regret of a model's layout.

    Args:
        what: it was chosen among.
    """
    return f"{sure_words(what, confidence.probability_best, confidence.expected_regret)}."


def probability_words(share: float) -> str:
    """Return "84 %", but never 100."""
    return "over 99 %" if share >= _CERTAIN else f"{100 * share:.0f} %"


def sure_words(what: str, probability: float, regret: float) -> str:
    """Return how probable it is that a choice is the best, and what is lost if not."""
    text = f"How sure: {probability_words(probability)} that no other {what} is better"
    if regret >= LEAST_REGRET:
        text += f"; on average {percent(regret)} slower than the best"
    return text
