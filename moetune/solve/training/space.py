"""Layouts of a job that the rules, the target and the pins allow, before prices and memory."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moetune.domain.errors import InputError
from moetune.domain.layout import BrokenRule, divisors
from moetune.domain.pipeline import SCHEDULES, Schedule, most_stages
from moetune.domain.targets import Target, target_rules
from moetune.domain.training import (
    FoldedLayout,
    LayoutRequest,
    Recompute,
    TokenDispatcher,
    TrainingJob,
    ZeroStage,
)
from moetune.domain.training_rules import broken_rules

_LARGEST_MICRO_BATCH = 8
_LARGEST_TP = 8
_LARGEST_CP, _SHARED = 16, 8192
"""Of unpinned context parallelism, and the tokens of a sequence for each of its ranks at least."""
_RECOMPUTES: tuple[tuple[Recompute, ...], ...] = (
    (), ("moe_act", "norm"), ("moe_act", "norm", "mlp", "shared_experts", "mla_up_proj"),
    ("moe", "norm"), ("full",),
)  # fmt: skip
"""From the least to the most that is computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSpace:
    """The layouts of a job for a target."""

    job: TrainingJob
    target: Target

    def shapes(self, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield every layout of the ranks that the rules allow, without recomputation.

        Micro-batches that are not pinned are powers of two, and experts are cut no further than
        attention is.
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
            etps = [pins.etp] if pins.etp else self._cuts_of_experts(tp)
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
                        offload_activations=pins.offload_activations or 0.0,
                        offload_optimizer=pins.offload_optimizer or 0.0,
                    )  # fmt: skip
                    layout = self._with_dispatcher(layout, pins)
                    if self.is_allowed(layout):
                        yield layout

    def _with_dispatcher(self, layout: FoldedLayout, pins: LayoutRequest) -> FoldedLayout:
        """Return the layout with the pinned multiprocessors, which need their dispatcher."""
        if pins.dispatcher_sms is None:
            return layout
        dispatcher = pins.dispatcher or layout.dispatcher
        return replace(layout, dispatcher=dispatcher, dispatcher_sms=pins.dispatcher_sms)

    def _cuts_of_experts(self, tp: int) -> Sequence[int]:
        """Return the numbers of ranks that may share an expert's width."""
        if not self.job.decoder.num_moe_layers:
            return (1,)
        most = min(tp, self.target.largest.get("etp", tp))
        return [one for one in divisors(tp) if one <= most]

    @property
    def _most_cp(self) -> int:
        """The most ranks that share a sequence: 1 up to a length that one rank can do with."""
        return max(1, min(self.target.largest.get("cp", _LARGEST_CP), self.job.length // _SHARED))

    def is_allowed(self, layout: FoldedLayout) -> bool:
        """Return whether a layout breaks no rule of the job or the target."""
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

    def recomputes(self, pins: LayoutRequest) -> Sequence[tuple[Recompute, ...]]:
        """Return the lists of modules that the runtime recomputes and the model has."""
        if pins.recompute is not None:
            return (pins.recompute,)
        able = [one for one in _RECOMPUTES if {*one} <= {*self.target.recompute}]
        has = self.job.decoder.modules
        return list(dict.fromkeys(tuple(module for module in one if module in has) for one in able))

    def dispatchers(self, shape: FoldedLayout, pins: LayoutRequest) -> Sequence[TokenDispatcher]:
        """Return the target's dispatchers; without other ranks they are one."""
        if pins.dispatcher:
            return (pins.dispatcher,)
        return self.target.dispatchers[: 1 if shape.ep == 1 else None]

    def impossible(self, pins: LayoutRequest) -> InputError:
        """Return the first broken rule of the layout that the pins come nearest to."""
        sizes: dict[str, Any] = {
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
            schedule=pins.schedule, stages=pins.stages,
            offload_activations=pins.offload_activations or 0.0,
            offload_optimizer=pins.offload_optimizer or 0.0,
            dispatcher_sms=pins.dispatcher_sms, **sizes,
        )  # fmt: skip
        none = BrokenRule("no layout obeys the rules", "pin less of it")
        rules = itertools.chain(
            broken_rules(layout, self.job), target_rules(layout, self.target, self.job)
        )
        broken = next(rules, none)
        return InputError(broken.what, broken.hint)
