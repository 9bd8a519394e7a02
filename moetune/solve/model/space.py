"""Layouts of a job that the rules, the target and the pins allow, before prices and memory."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moetune.domain.layout import divisors
from moetune.domain.megatron_rules import RECOMPUTED
from moetune.domain.pipeline import (
    SCHEDULES,
    SPLITTING,
    STAGES_OF_V,
    V_SCHEDULES,
    Schedule,
    most_stages,
    usual_schedule,
)
from moetune.domain.rules import Asked, Rule, broken_rules, refused
from moetune.domain.site import Site
from moetune.domain.target_rules import DISPATCHERS, FAMILIES, HOST, OVERLAP, target_rules
from moetune.domain.targets import Target
from moetune.domain.training import (
    FoldedLayout,
    LayoutRequest,
    Recompute,
    TokenDispatcher,
    TrainingJob,
    ZeroStage,
)

_MICRO_BATCHES = (1, 2, 4, 8)
_LARGEST_TP = 8
_LARGEST_CP, _SHARED = 16, 8192
"""Of unpinned context parallelism, and the tokens of a sequence for each of its ranks at least."""
_RECOMPUTES: tuple[tuple[Recompute, ...], ...] = (
    (), ("moe_act", "norm"), ("moe_act", "norm", "mlp", "shared_experts", "mla_up_proj"),
    ("moe", "norm"), ("selective",), ("full",),
)  # fmt: skip
"""From the least to the most that is computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSpace:
    """The layouts of a job for a target.

    Args:
        site: the machine; None where it is not known, and rules that need it are not asked.
        asks_runtime: whether layouts that the runtime would refuse are left out.
    """

    job: TrainingJob
    target: Target
    site: Site | None = None
    asks_runtime: bool = True

    def shapes(self, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield every layout of the ranks that the rules allow, without recomputation.

        Micro-batches that are not pinned are powers of two, experts are cut no further than
        attention is, and the ZeRO stage is the lowest.
        """
        for sizes in self.sizes(pins):
            yield from filter(self.is_allowed, self.pipelines(sizes, pins))

    def sizes(self, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield every size of the ranks and micro-batches that some pipeline goes with."""
        job, target, ranks = self.job, self.target, divisors(self.job.world_size)
        has_experts = job.decoder.num_moe_layers > 0
        most_tp = _LARGEST_TP if {*target.tp_dispatchers} & {*target.dispatchers} else 1
        most_cp = min(target.largest.get("cp", _LARGEST_CP), job.length // _SHARED)
        most_pp = min(job.decoder.num_layers, target.largest.get("pp", job.world_size))
        tps, pps = _pinned(pins.tp, ranks, most_tp), _pinned(pins.pp, ranks, most_pp)
        cps = _pinned(pins.cp, ranks, max(1, most_cp))  # 1 up to a length that one rank can do with
        eps = _pinned(pins.ep, divisors(job.decoder.layer.num_experts) if has_experts else (1,))
        batches = _pinned(pins.micro_batch, _MICRO_BATCHES)
        for tp, cp, pp in itertools.product(tps, cps, pps):
            sharers = tp * cp * pp
            if job.world_size % sharers:
                continue
            dp = job.world_size // sharers
            most_etp = min(tp, target.largest.get("etp", tp)) if has_experts else 1
            etps = _pinned(pins.etp, divisors(tp), most_etp)
            for ep, etp, batch in itertools.product(eps, etps, batches):
                if job.global_batch % (dp * batch) or dp * cp * tp % (ep * etp):
                    continue
                layout = FoldedLayout(
                    dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, etp=etp, micro_batch=batch,
                    zero=self.zeros(pins, pp, tp)[0],
                    dispatcher=self.first_dispatcher(pins, tp),
                    cuda_graphs=pins.cuda_graphs or "none", stages=pins.stages,
                    offload_activations=pins.offload_activations or 0.0,
                    offload_optimizer=pins.offload_optimizer or 0.0,
                )  # fmt: skip
                if any(map(self.is_allowed, self.pipelines(layout, pins))):
                    yield layout

    def overlapped(self, sizes: FoldedLayout, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield a layout with each overlap, nothing recomputed."""
        first = self.recomputes(pins)[0]
        for overlap in [pins.overlap] if pins.overlap else self.target.overlaps:
            if (sizes.overlap, sizes.recompute) == (overlap, first):
                yield sizes
            elif overlap == "none" or sizes.ep > 1 or pins.overlap:
                yield sizes.changed(recompute=first, overlap=overlap)

    def pipelines(self, sizes: FoldedLayout, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield sizes with each number of stages and each schedule that their overlap goes with."""
        for vpp, schedule in self.schedules(pins, sizes.pp):
            is_plain = vpp == sizes.vpp and schedule is None
            one = sizes if is_plain else sizes.changed(vpp=vpp, schedule=schedule)
            if one.overlap == "none" or self._obeys(OVERLAP, one):
                yield one

    def first_dispatcher(self, pins: LayoutRequest, tp: int) -> TokenDispatcher:
        """Return the plainest dispatcher that goes with tp, and with graphs of whole steps."""
        able: Sequence[TokenDispatcher] = self.target.dispatchers
        if tp > 1:
            able = [one for one in able if one in self.target.tp_dispatchers] or able
        needs_static = pins.cuda_graphs == "full" and self.job.decoder.num_moe_layers > 0
        return "hybrid_ep" if needs_static and "hybrid_ep" in able else able[0]

    def is_allowed(self, layout: FoldedLayout) -> bool:
        """Return whether a layout breaks no rule of the job or the target."""
        if next(broken_rules(layout, self.job), None) is not None:
            return False
        rules = target_rules(layout, self.target, self.job, self.site)
        return not self.asks_runtime or next(rules, None) is None

    def may_use_host(self, layout: FoldedLayout) -> bool:
        """Return whether what an allowed layout has in host memory breaks no rule either."""
        return self._obeys(HOST, layout)

    def _obeys(self, rules: tuple[Rule, ...], layout: FoldedLayout) -> bool:
        asked = Asked(target=self.target, layout=layout, job=self.job, site=self.site)
        return not self.asks_runtime or next(refused(rules, asked), None) is None

    def zeros(self, pins: LayoutRequest, pp: int, tp: int) -> Sequence[ZeroStage]:
        """Return the pinned stage, or those that go with the sizes, ascending.

        Stage 0 takes no less time than stage 1 and more memory: only a pin asks for it where the
        target has others.
        """
        if pins.zero is not None:
            return (pins.zero,)
        most = 3 if pp == 1 else max(self.target.zero_with_pp, self.target.zero[0])
        if tp > 1:
            most = min(most, self.target.zero_with_tp)
        return [one for one in self.target.zero if 1 <= one <= most] or self.target.zero[:1]

    def schedules(self, pins: LayoutRequest, pp: int) -> Iterator[tuple[int, Schedule | None]]:
        """Yield stages of a rank and schedules; those that a layout has anyway are None."""
        for vpp in self._stages_per_rank(pins, pp):
            if pins.schedule is not None or pp == 1:
                yield vpp, pins.schedule
                continue
            others = {*self.target.schedules} - {"1f1b", "interleaved"}
            if vpp != STAGES_OF_V:
                others -= V_SCHEDULES
            if usual_schedule(vpp) in self.target.schedules:
                yield vpp, None
            yield from ((vpp, one) for one in SCHEDULES if one in others)

    def _stages_per_rank(self, pins: LayoutRequest, pp: int) -> list[int]:
        if pins.vpp:
            return [pins.vpp]
        if pins.stages is not None:
            return [] if len(pins.stages) % pp else [len(pins.stages) // pp]
        if pp == 1:
            return [1]
        most = most_stages(self.job.decoder.num_layers) // pp
        blocks = -(-self.job.decoder.num_layers // pp)
        return [1, *(one for one in range(2, most + 1) if blocks % one == 0)]

    def recomputes(self, pins: LayoutRequest) -> Sequence[tuple[Recompute, ...]]:
        """Return the lists of modules that the runtime recomputes and the model has."""
        if pins.recompute is not None:
            return (pins.recompute,)
        has, able = self.job.decoder.modules, {*self.target.recompute}
        if not self.target.kept_by_experts.activations:
            has -= {"moe_act"}  # which are computed again in any case
        lists = (tuple(module for module in one if module in has) for one in _RECOMPUTES)
        return [one for one in dict.fromkeys(lists) if {*one} <= able]

    def keeps_all(self, layout: FoldedLayout) -> bool:
        """Return whether no recomputation goes with a layout's schedule."""
        return not self.target.splits_recomputed and layout.order in SPLITTING

    def may_overlap(self, layout: FoldedLayout) -> bool:
        """Return whether what a layout recomputes goes with its overlap."""
        return self._obeys(RECOMPUTED, layout)

    def dispatchers(self, layout: FoldedLayout, pins: LayoutRequest) -> list[TokenDispatcher]:
        """Return the dispatchers that go with a layout; without other ranks they are one."""
        every: Sequence[TokenDispatcher] = self.target.dispatchers
        if layout.ep == 1:
            every = every[:1]
        if pins.dispatcher:
            every = (pins.dispatcher,)
        rules = (*DISPATCHERS, *FAMILIES)
        return [one for one in every if self._obeys(rules, layout.changed(dispatcher=one))]


def _pinned(pin: int | None, able: Sequence[int], most: float = math.inf) -> Sequence[int]:
    """Return the pinned size, else those that are able up to the largest."""
    return (pin,) if pin else [one for one in able if one <= most]
