"""Layouts of a job that the rules, the target and the pins allow, and those that fit into memory.

Offloading to host memory never saves time, so it is tried only if a layout does not fit with less.

Before pipelines are cut there are bounds. Of L blocks on p pipeline ranks, some rank has at least
⌈L/p⌉. With equal and balanced cuts, a rank between the ends has at least ⌈L/p⌉ − 1, because a block
goes to the rank with the least work (`balanced_stages`). Which blocks these are is not known, so
the model's smallest blocks are assumed.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.cluster import HEADROOM
from moetune.domain.layout import divisors
from moetune.domain.once import Tables, once, once_for
from moetune.domain.pipeline import (
    SCHEDULES,
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
from moetune.solve.model.memory import FRAGMENTATION, OPTIMIZER_SHARES, MemoryModel
from moetune.solve.model.rank_memory import LIBRARY_BYTES

_MICRO_BATCHES = (1, 2, 4, 8)
_LARGEST_TP = 8
_LARGEST_CP, _SHARED = 16, 8192
"""Largest context parallelism unless pinned, and the least tokens of a sequence on a rank."""
_RECOMPUTES: tuple[tuple[Recompute, ...], ...] = (
    (), ("moe_act", "norm"), ("moe_act", "norm", "mlp", "shared_experts", "mla_up_proj"),
    ("moe", "norm"), ("selective",), ("full",),
)  # fmt: skip
"""Lists of modules, from the least to the most recomputation."""
_RULED = attrgetter(
    "cp", "tp", "pp", "vpp", "ep", "etp", "recompute", "dispatcher", "overlap", "zero",
    "cuda_graphs", "schedule", "stages", "offload_activations", "offload_optimizer",
)  # fmt: skip
"""Fields that a runtime's rules read; they also read whether micro-batches are fewer than `pp`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSpace(Tables):
    """The layouts of a job for a target.

    Args:
        site: the machine; None skips the rules that need it.
        asks_runtime: whether to leave out layouts that the runtime would refuse.
    """

    job: TrainingJob
    target: Target
    site: Site | None = None
    asks_runtime: bool = True

    def shapes(self, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield the allowed layouts without recomputation, at the lowest ZeRO stage."""
        for sizes in self.sizes(pins):
            yield from filter(self.is_allowed, self.pipelines(sizes, pins))

    def sizes(self, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield every size of ranks and micro-batches for which some pipeline is allowed."""
        job, target, ranks = self.job, self.target, divisors(self.job.world_size)
        has_experts = job.decoder.num_moe_layers > 0
        most_tp = _LARGEST_TP if {*target.tp_dispatchers} & {*target.dispatchers} else 1
        most_cp = min(target.largest.get("cp", _LARGEST_CP), job.length // _SHARED)
        most_pp = min(job.decoder.num_layers, target.largest.get("pp", job.world_size))
        tps, pps = _pinned(pins.tp, ranks, most_tp), _pinned(pins.pp, ranks, most_pp)
        cps = _pinned(pins.cp, ranks, max(1, most_cp))  # 1 for short sequences
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

    def with_overlaps(self, sizes: FoldedLayout, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield a layout with each overlap, without recomputation."""
        first = self.recomputes(pins)[0]
        for overlap in [pins.overlap] if pins.overlap else self.target.overlaps:
            if (sizes.overlap, sizes.recompute) == (overlap, first):
                yield sizes
            elif overlap == "none" or sizes.ep > 1 or pins.overlap:
                yield sizes.changed(recompute=first, overlap=overlap)

    def pipelines(self, sizes: FoldedLayout, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield the sizes with each number of stages and schedule that suits their overlap."""
        for vpp, schedule in self.schedules(pins, sizes.pp):
            is_plain = vpp == sizes.vpp and schedule is None
            layout = sizes if is_plain else sizes.changed(vpp=vpp, schedule=schedule)
            if layout.overlap == "none" or self.obeys(OVERLAP, layout):
                yield layout

    def first_dispatcher(self, pins: LayoutRequest, tp: int) -> TokenDispatcher:
        """Return the plainest dispatcher that suits tp, and graphs of whole steps if pinned."""
        able: Sequence[TokenDispatcher] = self.target.dispatchers
        if tp > 1:
            able = [name for name in able if name in self.target.tp_dispatchers] or able
        needs_static = pins.cuda_graphs == "full" and self.job.decoder.num_moe_layers > 0
        return "hybrid_ep" if needs_static and "hybrid_ep" in able else able[0]

    def is_allowed(self, layout: FoldedLayout) -> bool:
        """Return whether a layout obeys all rules of the job and the target."""
        if next(broken_rules(layout, self.job), None) is not None:
            return False
        is_short = self.job.micro_batches(layout) < layout.pp
        return not self.asks_runtime or self._is_run(layout, is_short)

    @once(lambda layout, is_short: (_RULED(layout), is_short))
    def _is_run(self, layout: FoldedLayout, is_short: bool) -> bool:  # noqa: ARG002, FBT001 - of the key
        return next(target_rules(layout, self.target, self.job, self.site), None) is None

    @once(lambda rules, layout: (rules, _RULED(layout)))
    def obeys(self, rules: tuple[Rule, ...], layout: FoldedLayout) -> bool:
        """Return whether a layout obeys the given rules of the runtime."""
        asked = Asked(target=self.target, layout=layout, job=self.job, site=self.site)
        return not self.asks_runtime or next(refused(rules, asked), None) is None

    @once_for("zero")
    def zeros(self, pins: LayoutRequest, pp: int, tp: int) -> Sequence[ZeroStage]:
        """Return the pinned stage, or the possible stages without 0, which saves nothing."""
        if pins.zero is not None:
            return (pins.zero,)
        most = 3 if pp == 1 else max(self.target.zero_with_pp, self.target.zero[0])
        if tp > 1:
            most = min(most, self.target.zero_with_tp)
        able = self.target.zeros(self.job.tuning)
        least = 1 if 1 in able else 0
        return [stage for stage in able if least <= stage <= most] or able[:1]

    @once_for("vpp", "stages", "schedule")
    def schedules(self, pins: LayoutRequest, pp: int) -> Sequence[tuple[int, Schedule | None]]:
        """Return pairs of stages per rank and schedule; None stands for the usual schedule."""
        if pins.schedule is not None or pp == 1:
            return [(vpp, pins.schedule) for vpp in self._stages_per_rank(pins, pp)]
        able: list[tuple[int, Schedule | None]] = []
        for vpp in self._stages_per_rank(pins, pp):
            special = {*self.target.schedules} - {"1f1b", "interleaved"}
            if vpp != STAGES_OF_V:
                special -= V_SCHEDULES
            if usual_schedule(vpp) in self.target.schedules:
                able.append((vpp, None))
            able += [(vpp, schedule) for schedule in SCHEDULES if schedule in special]
        return able

    def _stages_per_rank(self, pins: LayoutRequest, pp: int) -> list[int]:
        if pins.vpp:
            return [pins.vpp]
        if pins.stages is not None:
            return [] if len(pins.stages) % pp else [len(pins.stages) // pp]
        if pp == 1:
            return [1]
        most = most_stages(self.job.decoder.num_layers) // pp
        blocks = -(-self.job.decoder.num_layers // pp)
        return [1, *(vpp for vpp in range(2, most + 1) if blocks % vpp == 0)]

    @once_for("recompute")
    def recomputes(self, pins: LayoutRequest) -> Sequence[tuple[Recompute, ...]]:
        """Return the lists of modules that the runtime recomputes and the model has."""
        if pins.recompute is not None:
            return (pins.recompute,)
        has, able = self.job.decoder.modules, {*self.target.recompute}
        if not self.target.kept_by_experts.activations:
            has -= {"moe_act"}  # always computed again
        lists = (tuple(module for module in modules if module in has) for modules in _RECOMPUTES)
        return [modules for modules in dict.fromkeys(lists) if {*modules} <= able]

    def dispatchers(self, layout: FoldedLayout, pins: LayoutRequest) -> list[TokenDispatcher]:
        """Return the dispatchers that suit a layout; without other ranks only the first counts."""
        names: Sequence[TokenDispatcher] = self.target.dispatchers
        if layout.ep == 1:
            names = names[:1]
        if pins.dispatcher:
            names = (pins.dispatcher,)
        rules = (*DISPATCHERS, *FAMILIES)
        return [name for name in names if self.obeys(rules, layout.changed(dispatcher=name))]


def _pinned(pin: int | None, able: Sequence[int], most: float = math.inf) -> Sequence[int]:
    """Return the pinned size, else the possible sizes up to the largest."""
    return (pin,) if pin else [size for size in able if size <= most]


_BEYOND = np.array([[[0.0]], [[-1.0]]])
"""Least blocks, relative to ⌈L/p⌉, of the fullest rank and of a rank between the ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Layouts that fit into memory.

    Args:
        limit_bytes: usable memory of a device.
        host_bytes: host memory of one rank.
    """

    space: LayoutSpace
    memory: MemoryModel
    limit_bytes: float
    host_bytes: float

    def fits(self, layout: FoldedLayout) -> bool:
        """Return whether a layout fits into the memory of the devices and of their host."""
        peak_bytes, host_bytes = self.memory.needs(layout)
        return peak_bytes <= self.limit_bytes and host_bytes <= self.host_bytes

    def is_roomy(self, layout: FoldedLayout) -> bool:
        """Return whether a layout leaves memory free and does without host memory."""
        most = self.limit_bytes * (1 - HEADROOM)
        return not layout.on_host and self.memory.needs(layout)[0] <= most

    def least_of_states(self, sizes: FoldedLayout, pins: LayoutRequest) -> float:
        """Return a lower bound on the bytes of the states on the fullest device."""
        ways = self.ways(sizes, pins)
        return min(self.memory.least(layout, on_host=share) for layout, share in ways)

    def ways(self, sizes: FoldedLayout, pins: LayoutRequest) -> list[tuple[FoldedLayout, float]]:
        """Return the ways with the smallest states: most sharded, or on the host, least sharded."""
        pinned = pins.offload_optimizer
        zero = self.space.zeros(pins, sizes.pp, sizes.tp)[-1]
        highest = sizes if zero == sizes.zero else sizes.changed(zero=zero)
        ways = [(highest, pinned or 0.0)]
        if pinned is None and self.space.target.offloads_optimizer:
            ways.append((sizes, 1.0))
        return ways

    def with_most_offload(self, layout: FoldedLayout, pins: LayoutRequest) -> FoldedLayout:
        """Return a layout with the most blocks whose activations may be in host memory."""
        able = self.space.target.offloads_activations and layout.pp == 1 and not layout.recompute
        if not able or pins.offload_activations is not None:
            return layout
        num = self.space.job.decoder.num_layers
        return layout.changed(offload_activations=(num - 1) / num)

    def fitting_layouts(self, layout: FoldedLayout, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield a layout if it fits, else its versions that fit with the help of host memory."""
        if self.fits(layout):
            yield layout
            return
        target = self.space.target
        if target.offloads_optimizer or target.offloads_activations:
            most = self.with_most_offload(layout, pins)
            if self.memory.needs(most, on_host=1.0)[0] <= self.limit_bytes:
                yield from self.with_least_offload(layout, pins)

    def shares(self, layout: FoldedLayout, pins: LayoutRequest) -> Sequence[float]:
        """Return the shares of the optimizer that the host may keep."""
        if pins.offload_optimizer is not None:
            return (pins.offload_optimizer,)
        shared = layout.changed(offload_optimizer=OPTIMIZER_SHARES[0])
        return (0.0, *OPTIMIZER_SHARES) if self.space.obeys(HOST, shared) else (0.0,)

    def with_least_offload(
        self, layout: FoldedLayout, pins: LayoutRequest
    ) -> Iterator[FoldedLayout]:
        """Yield a layout with the fewest blocks in host memory that make it fit.

        There is a layout for each share of the optimizer on the host: a larger share needs fewer
        blocks. The first share that fits without any block is the last.
        """
        for share in self.shares(layout, pins):
            plain = layout.changed(offload_optimizer=share)
            counts = self._blocks_on_host(plain, pins)
            fewest = bisect_left(
                counts, -self.limit_bytes,
                key=lambda count: -self.memory.needs(self._with_blocks(plain, count))[0],
            )  # fmt: skip
            fitting = self._with_blocks(plain, min(fewest, counts[-1]))
            is_fitting = self.fits(fitting)
            if is_fitting and self.space.is_allowed(fitting):
                yield fitting
            if is_fitting and not fewest:
                return

    def least_offloaded(self, layout: FoldedLayout, pins: LayoutRequest) -> float:
        """Return the least bytes of a device, with the most allowed in host memory."""
        most = self.with_most_offload(layout, pins)
        return self.memory.needs(most, on_host=self.shares(layout, pins)[-1])[0]

    def with_each_offload(
        self, layout: FoldedLayout, share: float, pins: LayoutRequest
    ) -> Iterator[FoldedLayout]:
        """Yield a layout with a share of the optimizer and each number of offloaded blocks."""
        shared = layout.changed(offload_optimizer=share) if share else layout
        for count in self._blocks_on_host(shared, pins):
            yield self._with_blocks(shared, count)

    def _blocks_on_host(self, layout: FoldedLayout, pins: LayoutRequest) -> range:
        """Return the numbers of blocks whose activations may be in host memory."""
        most = self.with_most_offload(layout, pins)
        able = most is not layout and self.space.obeys(HOST, most)
        return range(self.space.job.decoder.num_layers if able else 1)

    def _with_blocks(self, layout: FoldedLayout, count: int) -> FoldedLayout:
        num = self.space.job.decoder.num_layers
        return layout.changed(offload_activations=count / num) if count else layout

    def least_bytes(
        self,
        pipelines: Sequence[FoldedLayout],
        recomputes: Sequence[tuple[Recompute, ...]],
        pins: LayoutRequest,
    ) -> tuple[Floats, Floats]:
        """Return two lower bounds on the fullest device's bytes, both [pipeline, recomputation].

        Pipelines are cut equally or balanced, and states are kept in the smallest way. The second
        bound allows only pinned shares in host memory.

        Args:
            pipelines: layouts of equal sizes that differ in overlap, vpp and schedule.
        """
        if pins.stages is not None:
            nothing: Floats = np.zeros((len(pipelines), len(recomputes)))
            return nothing, nothing
        first, memory, loss = pipelines[0], self.memory, 1 + FRAGMENTATION
        usual, most = map(memory.device_share, (first, self.with_most_offload(first, pins)))
        able = self.ways(first, pins)
        ways, of_able = [able[0], *able], [usual if modules else most for modules in recomputes]
        shares = np.array([[usual] * len(recomputes), *[of_able] * len(able)])[:, :, None]
        counts = np.array(memory.stages.whole.counts, dtype=float)
        blocks = memory.sizes_of_blocks(first, recomputes)
        activations = loss * shares * np.array([[kind.total for kind in kinds] for kinds in blocks])
        workspace = np.array([min(block.workspace for block in kinds) for kinds in blocks])
        live = np.array([*map(self._live, pipelines)])[:, :, None, None]
        states = loss * np.array([memory.states_of_blocks(to, on_host=share) for to, share in ways])
        num = -(-self.space.job.decoder.num_layers // first.pp)
        sizes = states[:, None, None, None] + live * activations[:, None, None]
        fullest: Floats = cheapest(_BEYOND + num, counts, sizes).max(axis=2)
        if first.pp == 1:  # one rank has all blocks and both ends
            whole = [memory.least(to, on_host=share) - LIBRARY_BYTES for to, share in ways]
            fullest += (np.array(whole) - states @ counts)[:, None, None]
        fullest += loss * workspace + LIBRARY_BYTES
        return fullest.min(axis=0), fullest[0]

    def _live(self, layout: FoldedLayout) -> tuple[float, float]:
        """Return the least micro-batches in work on any rank, and the most between the ends."""
        live = self.memory.live(layout)
        middle = live[1:] if layout.order in V_SCHEDULES else live[1:-1]
        return min(live), max(middle, default=0.0)


def cheapest(num: Floats, counts: Floats, sizes: Floats) -> Floats:
    """Return the bytes of the smallest n blocks, [way, pipeline, rank, recomputation].

        min Σ x_k·s_k  for  Σ x_k = n, 0 ≤ x_k ≤ c_k  is  max_j (n·s_j − Σ c_k·max(0, s_j − s_k))

    Args:
        num: n, number of blocks, [rank, 1, 1].
        counts: c, number of the model's blocks of each kind.
        sizes: s, bytes of one block, [way, pipeline, rank, recomputation, kind].
    """
    if len(counts) == 1:
        return (num * sizes)[..., 0]
    saved = np.maximum(sizes[..., :, None] - sizes[..., None, :], 0.0) @ counts
    least: Floats = (num * sizes - saved).max(axis=-1)
    return least
