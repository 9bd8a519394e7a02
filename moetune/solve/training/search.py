"""Search of a decoder's layouts: all that the rules and pins allow, those that fit, by time."""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layout import divisors
from moetune.domain.training import (
    FoldedLayout,
    LayoutRequest,
    Recompute,
    TokenDispatcher,
    TrainingJob,
    broken_rules,
    check_layout,
)
from moetune.solve.training.memory import RankMemory, peak_memory
from moetune.solve.training.step import StepPrices, StepSeconds

_LARGEST_MICRO_BATCH = 8
_LARGEST_TP = 8
_RECOMPUTES: tuple[tuple[Recompute, ...], ...] = (
    (), ("moe_act", "norm"), ("moe_act", "norm", "mlp", "shared_experts", "mla_up_proj"),
    ("moe", "norm"), ("full",),
)  # fmt: skip
"""From the least to the most that is computed again."""
_DISPATCHERS: tuple[TokenDispatcher, ...] = ("all_to_all",)
NUM_ALTERNATIVES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayout:
    """A layout with its step and its fullest pipeline rank."""

    layout: FoldedLayout
    step: StepSeconds
    memory: RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSearch:
    """The layouts of a job.

    Args:
        limit_bytes: usable memory of a device.
        dispatchers: to choose among.
    """

    job: TrainingJob
    prices: StepPrices
    limit_bytes: float
    dispatchers: tuple[TokenDispatcher, ...] = _DISPATCHERS

    def priced(self, layout: FoldedLayout) -> PricedLayout:
        """Return a layout with its price and memory, whether it fits or not."""
        return PricedLayout(
            layout=layout,
            step=self.prices.step(layout),
            memory=peak_memory(self.job, layout, skew=self.prices.skew),
        )

    def best(self, pins: LayoutRequest) -> list[PricedLayout]:
        """Return the fastest layouts that fit, best first; where none does, the smallest.

        Raises:
            InputError: the pins break a rule.
            InfeasiblePlanError: no layout obeys the rules.
        """
        found: list[PricedLayout] = []
        smallest: tuple[float, FoldedLayout] | None = None
        for shape in self.shapes(pins):
            fitting, least = self._cheapest_fitting(shape, pins)
            if smallest is None or least[0] < smallest[0]:
                smallest = least
            found += [self.priced(layout) for layout in fitting]
            found = heapq.nsmallest(NUM_ALTERNATIVES + 1, found, key=lambda one: one.step.seconds)
        if smallest is None:
            raise self._impossible(pins)
        return found or [self.priced(smallest[1])]

    def shapes(self, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield every layout of the ranks that the rules allow, without recomputation."""
        job, most_tp = self.job, max(_LARGEST_TP, pins.tp or 1)
        sizes = divisors(job.world_size)
        experts = divisors(job.decoder.layer.num_experts) if job.decoder.num_moe_layers else [1]
        tps = [pins.tp] if pins.tp else [one for one in sizes if one <= most_tp]
        cps = [pins.cp] if pins.cp else [1]
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
                if job.global_batch % (dp * batch) or (batch & (batch - 1) and not pins.micro_batch):
                    continue
                for vpp in self._stages_per_rank(pins, pp):
                    layout = FoldedLayout(
                        dp=dp, cp=cp, tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, micro_batch=batch,
                        zero=1 if pins.zero is None else pins.zero,
                    )  # fmt: skip
                    if next(broken_rules(layout, job), None) is None:
                        yield layout

    def _stages_per_rank(self, pins: LayoutRequest, pp: int) -> list[int]:
        if pins.vpp:
            return [pins.vpp]
        if pp == 1:
            return [1]
        most = self.job.decoder.num_layers // pp
        return [1, *(one for one in range(2, most + 1) if -(-self.job.decoder.num_layers // pp) % one == 0)]

    def _cheapest_fitting(
        self, shape: FoldedLayout, pins: LayoutRequest
    ) -> tuple[list[FoldedLayout], tuple[float, FoldedLayout]]:
        """Return the shape's variants with the least recomputation that fits, and its smallest."""
        wanted = _RECOMPUTES if pins.recompute is None else (pins.recompute,)
        dispatchers = [pins.dispatcher] if pins.dispatcher else self.dispatchers
        overlaps = [pins.overlap] if pins.overlap else ["none", "batch"]
        fitting = []
        smallest: tuple[float, FoldedLayout] | None = None
        for overlap in overlaps:
            if overlap == "batch" and pins.overlap is None and not _may_overlap(shape):
                continue
            for recompute in wanted:
                if overlap == "batch" and {"full", "moe"} & set(recompute):
                    continue
                layout = replace(shape, recompute=recompute, overlap=overlap)  # type: ignore[arg-type]
                peak = peak_memory(self.job, layout, skew=self.prices.skew).peak_bytes
                if smallest is None or peak < smallest[0]:
                    smallest = (peak, layout)
                if peak <= self.limit_bytes:
                    fitting += [replace(layout, dispatcher=one) for one in dispatchers]
                    break
        assert smallest is not None  # noqa: S101 - there is at least one overlap and recomputation
        return fitting, smallest

    def _impossible(self, pins: LayoutRequest) -> Exception:
        """Return the first broken rule of the layout that the pins come nearest to."""
        sizes = {name: getattr(pins, name) or 1 for name in ("cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch")}
        sharers = sizes["cp"] * sizes["tp"] * sizes["pp"]
        layout = FoldedLayout(dp=max(1, self.job.world_size // sharers), **sizes)
        check_layout(layout, self.job)
        return InfeasiblePlanError(
            f"no layout of {self.job.world_size} ranks obeys the rules with a global batch of "
            f"{self.job.global_batch}",
            "take a global batch that more numbers of replicas divide",
        )


def _may_overlap(layout: FoldedLayout) -> bool:
    """Return whether Megatron-Core hides exchanges: several expert ranks; stages interleaved."""
    return layout.ep > 1 and (layout.pp == 1 or layout.vpp > 1)
