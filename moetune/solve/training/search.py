"""Search of a decoder's layouts: all that the rules and pins allow, those that fit, by time."""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetune.domain.errors import InputError
from moetune.domain.layout import BrokenRule, divisors
from moetune.domain.pipeline import SCHEDULES, Schedule, most_stages
from moetune.domain.targets import Target, target_rules
from moetune.domain.training import (
    TOKEN_DISPATCHERS,
    FoldedLayout,
    LayoutRequest,
    Recompute,
    TokenDispatcher,
    TrainingJob,
    ZeroStage,
    broken_rules,
)
from moetune.solve.training.memory import MemoryModel, RankMemory
from moetune.solve.training.step import StepPrices, StepSeconds

_LARGEST_MICRO_BATCH = 8
_LARGEST_TP = 8
_LARGEST_CP, _SHARED = 16, 8192
"""Of unpinned context parallelism, and the tokens of a sequence for each of its ranks at least."""
_RECOMPUTES: tuple[tuple[Recompute, ...], ...] = (
    (), ("moe_act", "norm"), ("moe_act", "norm", "mlp", "shared_experts", "mla_up_proj"),
    ("moe", "norm"), ("full",),
)  # fmt: skip
"""From the least to the most that is computed again."""
NUM_ALTERNATIVES = 5
NOISE = 0.01
"""Steps within it of each other tie: the simpler layout is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayout:
    """A layout with its step and its fullest pipeline rank."""

    layout: FoldedLayout
    step: StepSeconds
    memory: RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedSearch:
    """The layouts of a job.

    Args:
        limit_bytes: usable memory of a device.
        target: the runtime, which bounds the layouts.
    """

    job: TrainingJob
    prices: StepPrices
    memory: MemoryModel
    limit_bytes: float
    target: Target

    def priced(self, layout: FoldedLayout) -> PricedLayout:
        """Return a layout with its price and memory, whether it fits or not."""
        return PricedLayout(
            layout=layout,
            step=self.prices.step(layout),
            memory=self.memory.peak(layout),
        )

    def best(self, pins: LayoutRequest) -> list[PricedLayout]:
        """Return the fastest layouts that fit, best first; where none does, the smallest.

        Raises:
            InputError: the pins break a rule, or no layout obeys the rules.
        """
        every: list[FoldedLayout] = []
        smallest: tuple[float, FoldedLayout] | None = None
        for shape in self.shapes(pins):
            fitting, least = self._cheapest_fitting(shape, pins)
            if least is not None and (smallest is None or least[0] < smallest[0]):
                smallest = least
            every += fitting
        if smallest is None:
            raise self._impossible(pins)
        if not every:
            return [self.priced(smallest[1])]
        near = self._near_best(every)
        first = min(_tied([one for tied in near.values() for one in tied]), key=_complexity)
        del near[_ranks(first.layout)]
        others = (min(tied, key=_complexity) for tied in near.values())
        return [first, *heapq.nsmallest(NUM_ALTERNATIVES, others, key=_seconds)]

    def _near_best(
        self, layouts: Sequence[FoldedLayout]
    ) -> dict[tuple[int, ...], list[PricedLayout]]:
        """Return the fastest layouts of the sizes that lead, each with those that tie with it.

        Pipelines are played only where what no schedule beats is near the best; which sizes lead
        is certain all the same.
        """
        found: dict[tuple[int, ...], list[PricedLayout]] = {}
        bounded = [(self.prices.least(layout), at) for at, layout in enumerate(layouts)]
        for least, at in sorted(bounded):
            fastest = heapq.nsmallest(
                1 + NUM_ALTERNATIVES, (min(map(_seconds, tied)) for tied in found.values())
            )
            if len(fastest) > NUM_ALTERNATIVES and least > fastest[-1] * (1 + NOISE):
                break
            key = _ranks(layouts[at])
            if key in found and least > found[key][0].step.seconds * (1 + NOISE):
                continue
            tied = _tied([*found.get(key, ()), self.priced(layouts[at])])
            found[key] = sorted(tied, key=_seconds)
        return found

    def shapes(self, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield every layout of the ranks that the rules allow, without recomputation.

        Micro-batches that are not pinned are powers of two, and experts whole.
        """
        job, most_tp = self.job, max(_LARGEST_TP, pins.tp or 1)
        sizes = divisors(job.world_size)
        experts = divisors(job.decoder.layer.num_experts) if job.decoder.num_moe_layers else [1]
        tps = [pins.tp] if pins.tp else [one for one in sizes if one <= most_tp]
        cps = [one for one in sizes if one <= self._most_cp] if pins.cp is None else [pins.cp]
        pps = [pins.pp] if pins.pp else [one for one in sizes if one <= job.decoder.num_layers]
        for tp, cp, pp in itertools.product(tps, cps, pps):
            sharers = tp * cp * pp
            if job.world_size % sharers:
                continue
            dp = job.world_size // sharers
            stage_ranks = dp * cp * tp
            eps = [pins.ep] if pins.ep else [one for one in experts if stage_ranks % one == 0]
            etps = [pins.etp] if pins.etp else [1]
            batches = [pins.micro_batch] if pins.micro_batch else range(1, _LARGEST_MICRO_BATCH + 1)
            for ep, etp, batch in itertools.product(eps, etps, batches):
                if job.global_batch % (dp * batch) or (
                    batch & (batch - 1) and not pins.micro_batch
                ):
                    continue
                for vpp, schedule in self._pipelines(pins, pp):
                    layout = FoldedLayout(
                        dp=dp, cp=cp, tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, micro_batch=batch,
                        zero=self._zero(pins, pp), dispatcher=self.target.dispatchers[0],
                        cuda_graphs=pins.cuda_graphs or "none",
                        schedule=schedule, stages=pins.stages,
                    )  # fmt: skip
                    if self._is_allowed(layout):
                        yield layout

    @property
    def _most_cp(self) -> int:
        """The most ranks that share a sequence: 1 up to a length that one rank can do with."""
        return max(1, min(self.target.largest.get("cp", _LARGEST_CP), self.job.length // _SHARED))

    def _is_allowed(self, layout: FoldedLayout) -> bool:
        if next(broken_rules(layout, self.job), None) is not None:
            return False
        return next(target_rules(layout, self.target, self.job), None) is None

    def _zero(self, pins: LayoutRequest, pp: int) -> ZeroStage:
        """Return the pinned stage; else the lowest from 1 on that goes with the pipeline."""
        if pins.zero is not None:
            return pins.zero
        most = 3 if pp == 1 else self.target.zero_with_pp
        return next((one for one in self.target.zero if 1 <= one <= most), self.target.zero[0])

    def _pipelines(self, pins: LayoutRequest, pp: int) -> Iterator[tuple[int, Schedule | None]]:
        """Yield stages of a rank and schedules; those that a layout has anyway are None."""
        for vpp in self._stages_per_rank(pins, pp):
            if pins.schedule is not None or pp == 1:
                yield vpp, pins.schedule
                continue
            plain = FoldedLayout(pp=pp, vpp=vpp).order
            others = {*self.target.schedules} - {"1f1b", "interleaved"}
            if plain in self.target.schedules:
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
        return [
            1,
            *(
                one
                for one in range(2, most + 1)
                if -(-self.job.decoder.num_layers // pp) % one == 0
            ),
        ]

    def _cheapest_fitting(
        self, shape: FoldedLayout, pins: LayoutRequest
    ) -> tuple[list[FoldedLayout], tuple[float, FoldedLayout] | None]:
        """Return the shape's variants with the least recomputation that fits, and its smallest."""
        wanted = self._recomputes() if pins.recompute is None else (pins.recompute,)
        dispatchers = [pins.dispatcher] if pins.dispatcher else self._dispatchers(shape)
        overlaps = [pins.overlap] if pins.overlap else self.target.overlaps
        fitting = []
        smallest: tuple[float, FoldedLayout] | None = None
        for overlap in overlaps:
            for recompute in wanted:
                layout = replace(shape, recompute=recompute, overlap=overlap)
                able = [replace(layout, dispatcher=one) for one in dispatchers]
                able = [one for one in able if self._is_allowed(one)]
                if not able:
                    continue
                fits = False
                for cut in self._cuts(able[0], pins):
                    peak = self.memory.peak(cut).peak_bytes
                    if smallest is None or peak < smallest[0]:
                        smallest = (peak, cut)
                    if peak <= self.limit_bytes:
                        fits = True
                        fitting += [replace(one, stages=cut.stages) for one in able]
                if fits:
                    break
        return fitting, smallest

    def _cuts(self, layout: FoldedLayout, pins: LayoutRequest) -> list[FoldedLayout]:
        """Return the layout with equal stages, and with balanced ones where that is faster."""
        if layout.pp == 1 or pins.stages is not None:
            return [layout]
        balanced = self.prices.balanced(layout)
        faster = self.prices.least(balanced) * (1 + NOISE) < self.prices.least(layout)
        return [layout, balanced] if faster else [layout]

    def _recomputes(self) -> Sequence[tuple[Recompute, ...]]:
        """Return the lists of modules that the runtime recomputes and the model has."""
        able = [one for one in _RECOMPUTES if {*one} <= {*self.target.recompute}]
        has = self.job.decoder.modules
        return list(dict.fromkeys(tuple(module for module in one if module in has) for one in able))

    def _dispatchers(self, shape: FoldedLayout) -> Sequence[TokenDispatcher]:
        """Return the target's dispatchers; without other ranks they are one."""
        return self.target.dispatchers[: 1 if shape.ep == 1 else None]

    def _impossible(self, pins: LayoutRequest) -> InputError:
        """Return the first broken rule of the layout that the pins come nearest to."""
        sizes = {
            name: getattr(pins, name) or 1
            for name in ("cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch")
        }
        if pins.stages is not None:
            sizes["pp"] = pins.pp or max(1, len(pins.stages) // sizes["vpp"])
            sizes["vpp"] = pins.vpp or max(1, len(pins.stages) // sizes["pp"])
        sharers = sizes["cp"] * sizes["tp"] * sizes["pp"]
        layout = FoldedLayout(
            dp=max(1, self.job.world_size // sharers), recompute=pins.recompute or (),
            dispatcher=pins.dispatcher or self.target.dispatchers[0],
            overlap=pins.overlap or "none", zero=self._zero(pins, sizes["pp"]),
            cuda_graphs=pins.cuda_graphs or "none",
            schedule=pins.schedule, stages=pins.stages, **sizes,
        )  # fmt: skip
        none = BrokenRule("no layout obeys the rules", "pin less of it")
        rules = itertools.chain(
            broken_rules(layout, self.job), target_rules(layout, self.target, self.job)
        )
        broken = next(rules, none)
        return InputError(broken.what, broken.hint)


def _seconds(one: PricedLayout) -> float:
    return one.step.seconds


def _ranks(layout: FoldedLayout) -> tuple[int, ...]:
    """Return what layouts share that differ in stages, dispatcher, overlap and recomputation."""
    return layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, layout.micro_batch


def _tied(among: Sequence[PricedLayout]) -> list[PricedLayout]:
    """Return those within noise of the fastest."""
    limit = min(map(_seconds, among)) * (1 + NOISE)
    return [one for one in among if one.step.seconds <= limit]


def _complexity(one: PricedLayout) -> tuple[float, ...]:
    """Return how much a layout has that can be left out, the heaviest first; then its time."""
    layout = one.layout
    return (
        len(layout.recompute), layout.overlap != "none",
        TOKEN_DISPATCHERS.index(layout.dispatcher), SCHEDULES.index(layout.order), layout.vpp,
        layout.stages is not None,
        sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp)),
        one.step.seconds,
    )  # fmt: skip
