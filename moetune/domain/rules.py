"""Rules of layouts: rules of any training, and rows of a runtime's rules with what runs instead.

A row's texts have places, such as `{layout.tp}`, which the question fills in (`Asked`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd

from moetune.domain.architecture import Decoder
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.layout import BrokenRule, divisor_words, nearest_divisors, nearest_multiples
from moetune.domain.pipeline import STAGES_OF_V, V_SCHEDULES, most_stages, stage_words, wrong_stages
from moetune.domain.site import Site
from moetune.domain.targets import MegatronCore, Target
from moetune.domain.training import RECOMPUTES, FoldedLayout, TrainingJob


def broken_rules(layout: FoldedLayout, job: TrainingJob) -> Iterator[BrokenRule]:
    """Yield the rules that a layout breaks for a job, the most basic rule first."""
    yield from _rank_rules(layout, job)
    yield from _model_rules(layout, job.decoder)
    yield from _stage_rules(layout, job.decoder)
    yield from _batch_rules(layout, job)


def check_layout(layout: FoldedLayout, job: TrainingJob) -> None:
    """Raise InputError that names the first rule that the layout breaks, with the nearest sizes."""
    broken = next(broken_rules(layout, job), None)
    if broken is not None:
        raise InputError(broken.what, broken.hint)


def _rank_rules(layout: FoldedLayout, job: TrainingJob) -> Iterator[BrokenRule]:
    sharers = layout.cp * layout.tp * layout.pp
    if layout.world_size != job.world_size:
        ranks, near = job.world_size, divisor_words(job.world_size, sharers)
        what = f"cp·tp·pp ({sharers}) does not divide world_size ({ranks})"
        hint = f"use sizes whose product is {near}"
        if ranks % sharers == 0:
            what = f"dp·cp·tp·pp ({layout.world_size}) is not world_size ({ranks})"
            hint = f"use dp {ranks // sharers}, or {layout.world_size} ranks"
        yield BrokenRule(what, hint)
        return
    experts = layout.ep * layout.etp
    if layout.stage_ranks % experts:
        yield BrokenRule(
            f"ep·etp ({experts}) does not divide dp·cp·tp ({layout.stage_ranks})",
            _of_experts(layout, job.decoder.layer),
        )


def _of_experts(layout: FoldedLayout, layer: LayerShape) -> str:
    """Return the hint of an ep, an etp, or both, whose product divides dp·cp·tp.

    Where both are wrong, etp shrinks first: several runtimes cut experts by default.
    """
    ranks = layout.stage_ranks
    if ranks % layout.etp == 0 and (layout.etp == 1 or ranks % layout.ep):
        return f"use ep {divisor_words(gcd(ranks // layout.etp, layer.num_experts), layout.ep)}"
    if ranks % layout.ep == 0:
        return f"use etp {divisor_words(gcd(ranks // layout.ep, layer.d_hidden), layout.etp)}"
    etp = nearest_divisors(gcd(ranks, layer.d_hidden), layout.etp)[0]
    ep = nearest_divisors(gcd(ranks // etp, layer.num_experts), layout.ep)[0]
    return f"use ep {ep} and etp {etp}"


def _model_rules(layout: FoldedLayout, decoder: Decoder) -> Iterator[BrokenRule]:
    experts = decoder.layer.num_experts
    if decoder.num_moe_layers and experts % layout.ep:
        yield BrokenRule(
            f"num_experts ({experts}) does not divide by ep ({layout.ep})",
            f"use ep {divisor_words(experts, layout.ep)}",
        )
    if not decoder.num_moe_layers and layout.ep * layout.etp > 1:
        yield BrokenRule("the model is dense: there are no experts to share", "use ep 1 and etp 1")
    if decoder.layer.d_hidden % layout.etp:
        yield BrokenRule(
            f"the experts' width ({decoder.layer.d_hidden}) does not divide by etp ({layout.etp})",
            f"use etp {divisor_words(decoder.layer.d_hidden, layout.etp)}",
        )
    for count in decoder.head_counts:
        if count % layout.tp:
            yield BrokenRule(
                f"num_heads ({count}) does not divide by tp ({layout.tp})",
                f"use tp {divisor_words(gcd(*decoder.head_counts), layout.tp)}",
            )
    if not 0 <= layout.offload_activations < 1 or (
        layout.offload_activations and layout.offloaded_layers(decoder) >= decoder.num_layers
    ):
        yield BrokenRule(
            f"offload_activations {layout.offload_activations:g} is no share below all of "
            f"{decoder.num_layers} layers",
            f"use 0 to {1 - 1 / decoder.num_layers:.3f}",
        )
    if not 0 <= layout.offload_optimizer <= 1:
        yield BrokenRule(
            f"offload_optimizer {layout.offload_optimizer:g} is no share", "use 0 to 1"
        )
    yield from _recompute_rules(layout, decoder)


def _recompute_rules(layout: FoldedLayout, decoder: Decoder) -> Iterator[BrokenRule]:
    alone = [name for name in ("selective", "full") if name in layout.recompute]
    if alone and len(layout.recompute) > 1:
        yield BrokenRule(
            f"{alone[-1]} recomputation goes with no other", f"use --recompute {alone[-1]}"
        )
    for module in layout.recompute:
        if module not in decoder.modules:
            able = [recomputed for recomputed in RECOMPUTES if recomputed in decoder.modules]
            yield BrokenRule(
                f"{decoder.name} has no {module} to recompute", f"use some of {', '.join(able)}"
            )


def _stage_rules(layout: FoldedLayout, decoder: Decoder) -> Iterator[BrokenRule]:
    stages, most = layout.stages, most_stages(decoder.num_layers)
    if layout.pp == 1:
        what = "vpp above 1" if layout.vpp > 1 else f"schedule {layout.order}"
        if layout.order != "1f1b" or stages is not None:
            yield BrokenRule(
                f"{what} needs a pipeline" if stages is None else "stages need a pipeline",
                "use pp above 1, or omit it",
            )
        return
    if stages is not None and len(stages) != layout.num_stages:
        yield BrokenRule(
            f"{len(stages)} stages are given, and pp·vpp is {layout.num_stages}",
            f"give {layout.num_stages} stages, or use pp {divisor_words(len(stages), layout.pp)}",
        )
    elif stages is not None:
        wrong = wrong_stages(stages, decoder.num_layers, len(decoder.predictions))
        if wrong is not None:
            even = stage_words(layout.even_stages(decoder))
            yield BrokenRule(f"stages of {decoder.name}: {wrong}", f"write them such as {even!r}")
    elif layout.num_stages > most:
        yield BrokenRule(
            f"pp·vpp ({layout.num_stages}) is larger than the {decoder.num_layers} layers with "
            "embedding and head",
            f"use pp·vpp up to {most}",
        )
    yield from _schedule_rules(layout)


def _schedule_rules(layout: FoldedLayout) -> Iterator[BrokenRule]:
    if layout.order == "1f1b" and layout.vpp > 1:
        yield BrokenRule("schedule 1f1b has one stage a rank", "use vpp 1, or interleaved")
    if layout.order == "interleaved" and layout.vpp == 1:
        yield BrokenRule("schedule interleaved has several stages a rank", "use vpp 2 or more")
    if layout.order in V_SCHEDULES and layout.vpp != STAGES_OF_V:
        yield BrokenRule(f"schedule {layout.order} has two stages a rank", "use vpp 2")


def _batch_rules(layout: FoldedLayout, job: TrainingJob) -> Iterator[BrokenRule]:
    per_batch = layout.micro_batch * layout.dp
    if job.global_batch % per_batch:
        yield BrokenRule(
            f"micro_batch·dp ({per_batch}) does not divide global_batch ({job.global_batch})",
            _of_batch(layout, job),
        )
        return
    sharers = layout.cp * layout.tp
    if job.length % sharers:
        yield BrokenRule(
            f"sequences of {job.length} tokens do not divide by cp·tp ({sharers})",
            f"use cp·tp {divisor_words(job.length, sharers)}",
        )
    if layout.cp > 1 and job.length % (2 * layout.cp):
        yield BrokenRule(
            f"sequences of {job.length} tokens do not divide by 2·cp ({2 * layout.cp}): a rank has "
            "two chunks, so that all have as much of the causal mask",
            f"use cp {1 if job.length % 2 else divisor_words(job.length // 2, layout.cp)}",
        )
    yield from micro_batch_rules(layout, job.global_batch // per_batch)


def _of_batch(layout: FoldedLayout, job: TrainingJob) -> str:
    """Return micro-batches that divide each replica's sequences, else replicas and batches."""
    batches = " or ".join(map(str, nearest_multiples(job.global_batch, layout.dp)))
    share, rest = divmod(job.global_batch, layout.dp)
    if not rest:
        return f"use micro_batch {divisor_words(share, layout.micro_batch)}"
    replicas = divisor_words(gcd(job.global_batch, layout.world_size), layout.dp)
    return f"use global_batch {batches} with micro_batch 1, or cp, tp and pp with dp {replicas}"


def micro_batch_rules(layout: FoldedLayout, batches: int) -> Iterator[BrokenRule]:
    """Yield the rules that a step's number of micro-batches breaks in the schedule."""
    pp, per_batch = layout.pp, layout.micro_batch * layout.dp
    if layout.order in ("interleaved", "zero_bubble") and batches % pp:
        yield BrokenRule(
            f"{batches} micro-batches do not divide by pp ({pp}), as {layout.order} asks",
            f"use 1f1b with vpp 1, or global_batch {-(-batches // pp) * pp * per_batch}",
        )
    if layout.order == "dualpipe_v" and batches < layout.num_stages:
        yield BrokenRule(
            f"{batches} micro-batches are fewer than the {layout.num_stages} stages of dualpipe_v",
            f"use a global_batch from {layout.num_stages * per_batch}, or another schedule",
        )


FIRST_CORE: MegatronCore = (0, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The values that a rule is checked against.

    Args:
        job: None for rules that do not depend on the model and the batch.
        site: the machine; None where it is not known: rules that need it are then skipped.
    """

    target: Target
    layout: FoldedLayout
    job: TrainingJob | None = None
    site: Site | None = None

    @property
    def decoder(self) -> Decoder:
        """The job's model."""
        assert self.job is not None  # noqa: S101 - rows that read it are asked with a job
        return self.job.decoder

    @property
    def core(self) -> MegatronCore:
        """Version of Megatron-Core."""
        return self.target.core or FIRST_CORE


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One refusal of a runtime.

    Args:
        what: what is refused; places are `layout`, `job`, `decoder`, `site`, `target`, `cause`.
        instead: flags that the runtime runs, with the same places.
        source: the runtime's file with the refusal; "" for the target's `source`.
        breaks: returns the `cause` of a refusal for the texts; a false value for no refusal.
        since: first version of Megatron-Core that refuses it.
        before: first later version that runs it.
        target: the only target with these rows that refuses it; "" for all.
    """

    what: str
    instead: str
    source: str
    breaks: Callable[[Asked], object]
    since: MegatronCore = FIRST_CORE
    before: MegatronCore = (99, 0)
    target: str = ""

    def is_of(self, target: str, core: MegatronCore) -> bool:
        """Return whether the rule holds for the target and its version."""
        return self.target in ("", target) and self.since <= core < self.before


@cache
def _rules_of(rules: tuple[Rule, ...], target: str, core: MegatronCore) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules if rule.is_of(target, core))


def refused(rules: tuple[Rule, ...], asked: Asked) -> Iterator[BrokenRule]:
    """Yield the rules that are broken, in their order."""
    for rule in _rules_of(rules, asked.target.name, asked.core):
        if broken := rule.breaks(asked):
            places = {
                "layout": asked.layout, "job": asked.job, "site": asked.site, "cause": broken,
                "target": asked.target, "decoder": asked.job and asked.job.decoder,
            }  # fmt: skip
            texts = (text.format(**places) for text in (rule.what, rule.instead, rule.source))
            yield asked.target.refusal(*texts)


def indivisible(counts: Iterable[int], size: int) -> tuple[int, str] | None:
    """Return the first number that `size` does not divide, and the nearest sizes that do."""
    for count in counts:
        if count % size:
            return count, divisor_words(count, size)
    return None
