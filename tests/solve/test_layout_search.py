"""The search against brute force with costs and memory written apart from it."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise, product

import pytest

from moetune.domain.constraints import Bounds, LayoutPins
from moetune.domain.cost_keys import CollectiveKey, CostKey
from moetune.domain.costs import Estimate
from moetune.domain.layer import ExpertParallel, LayerShape
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.samples import CollectiveOp
from moetune.solve.layout.candidates import SearchResult
from moetune.solve.layout.search import LayoutSearch, try_all
from moetune.solve.layout.space import find_layouts, whole_batch
from moetune.solve.model.prices import Prices
from moetune.solve.runtime import MOETUNE, TargetRuntime
from tests.solve.costs_by_hand import GEMM, LinearCosts

WORLD, PER_NODE, TOKENS = 16, 4, 256
MODEL = Transformer(
    moe=LayerShape(d_model=128, d_hidden=512, num_experts=8, top_k=2), num_layers=6, num_heads=4,
    length=64, vocab_size=1001,
)  # fmt: skip
M, H, E, V, L, B = 128, 512, 8, 1001, 64, 4
ROWS = {
    "gelu": 1e-11, "gelu_backward": 2e-11, "norm": 3e-11, "norm_backward": 5e-11,
    "gather": 2e-11, "scatter_add": 3e-11, "gate": 4e-11, "gate_backward": 1e-11,
    "cross_entropy": 6e-11, "cross_entropy_backward": 8e-11, "adam": 7e-11, "attention": 2e-12,
    "accumulate": 5e-11,
}  # fmt: skip
FACTORS: dict[CollectiveOp, float] = {
    "all_to_all": 1.0, "all_reduce": 2.0, "reduce_scatter": 1.1, "all_gather": 0.9, "send": 0.5,
}  # fmt: skip


def wire(op: CollectiveOp, size: int, num_bytes: float, nodes: int) -> float:
    """A collective by hand: dearer by op, by ranks and by nodes."""
    if size == 1:
        return 0.0
    return FACTORS[op] * (1 + nodes) * (1e-5 * size + num_bytes * 1e-10)


class PlacedCosts(LinearCosts):
    def seconds(self, key: CostKey, size: float) -> Estimate:
        if not isinstance(key, CollectiveKey):
            return super().seconds(key, size)
        assert key.in_flight >= 1
        seconds = wire(key.op, key.group_size, size, key.num_nodes)
        return Estimate(seconds=seconds, trust="measured")


Key = tuple[ExpertParallel, int, int, int, int]


def _backward(sent: list[tuple[int, float]], num: int, each: float) -> float:
    """The end of blocks, from the last one, and of buckets behind the first of their blocks."""
    clock = 0.0
    for first, seconds in reversed(sent):
        clock = max(clock, (num - first) * each) + seconds
    return max(clock, num * each)


def _forward(sent: list[tuple[int, float]], num: int, each: float, exchanged: float) -> float:
    """The end of blocks that wait for their buckets, which have half of the link in exchanges."""
    clock = arrived = 0.0
    for block in range(num + 1):
        wanted = sum(seconds for first, seconds in sent if first <= block)
        clock, arrived = clock + max(0.0, wanted - arrived), max(arrived, wanted)
        left = sum(seconds for _, seconds in sent) - arrived
        if block < num:
            beside = min(1.0, left / (each + exchanged))
            clock += each + exchanged + beside * exchanged
            arrived += beside * (each + exchanged)
    return clock


@dataclass
class ByHand:
    """One choice, its seconds and its bytes, as plain as can be."""

    kind: ExpertParallel
    dp: int
    ep: int
    tp: int
    pp: int
    b: int
    zero: bool
    again: bool
    at_end: bool = False
    sends: bool = True

    def sent(self, op: CollectiveOp, size: int, num_bytes: float, nodes: int) -> float:
        return self.sends * wire(op, size, num_bytes, nodes)

    @property
    def m(self) -> int:
        return WORLD * TOKENS // L // self.dp // self.b

    @property
    def words(self) -> int:
        """The first ranks have one more where the vocabulary does not divide."""
        return math.ceil(V / self.tp)

    def nodes(self, stride: int, size: int) -> int:
        """All sizes are powers of two, so every group lies like the first."""
        found = len({index * stride // PER_NODE for index in range(size)})
        return 0 if found <= math.ceil(size / PER_NODE) else found

    def gemm(self, rows: float, d_in: int, d_out: int, *, back: bool) -> float:
        return (1 + back) * GEMM.seconds(rows * d_in * d_out)

    def block(self, *, moe: bool, back: bool) -> float:
        t, tp, way = self.b * L, self.tp, "_backward" if back else ""
        pair = self.sent("all_reduce", tp, t * M * B, self.nodes(1, tp))
        seconds = 2 * ROWS[f"norm{way}"] * t * M + pair
        seconds += self.gemm(t, M, 3 * M // tp, back=back) + self.gemm(t, M // tp, M, back=back)
        heads = 4 // tp
        seconds += (1 + back) * self.b * L * L * heads * (M // 4) * ROWS["attention"]
        if not moe:
            seconds += self.gemm(t, M, H // tp, back=back) + self.gemm(t, H // tp, M, back=back)
            return seconds + ROWS[f"gelu{way}"] * t * (H // tp) + pair
        return seconds + self.experts(back=back)

    def experts(self, *, back: bool) -> float:
        t, way = self.b * L, "_backward" if back else ""
        ranks = self.tp if self.kind == "tensor" else self.ep
        rows = 2 * t / self.tp if self.kind == "tensor" else 2 * t
        local = E // ranks
        gate = ROWS[f"gate{way}"] * t * E + self.gemm(t, M, E, back=back)
        work = 2 * self.gemm(local * (rows / local), M, H, back=back)
        work += (ROWS["gelu"] + back * ROWS["gelu_backward"]) * rows * H
        if self.kind == "tensor":
            work += ((1 + back) * ROWS["gather"] + ROWS["scatter_add"]) * rows * M
            sizes = (t * M * B, 2 * t * B if back else 8)
            nodes = self.nodes(1, self.tp)
            rows_sent, few = sizes
            sums = self.sent("all_reduce", self.tp, rows_sent, nodes)
            return gate + work + sums + wire("all_reduce", self.tp, few, nodes)
        if 1 < ranks < E:
            work += 2 * ROWS["gather"] * rows * M
        nodes = self.nodes(self.tp, self.ep)
        around = gate + (ROWS["gather"] + ROWS["scatter_add"]) * rows * M
        if not back:
            around += 2 * wire("all_to_all", self.ep, E * 8, nodes)
        return around + work + 2 * self.sent("all_to_all", self.ep, rows * M * B, nodes)

    def stages(self) -> list[range]:
        ends = [0]
        for index in range(self.pp):
            ends.append(ends[-1] + 6 // self.pp + (index < 6 % self.pp))
        return [range(first, last) for first, last in pairwise(ends)]

    def counts(self, index: int) -> tuple[int, int]:
        """Dense parameters and experts' parameters on one rank."""
        blocks = self.stages()[index]
        moe = sum(block % 2 for block in blocks)
        dense = len(blocks) * (4 * M * M // self.tp + 4 * M)
        dense += (len(blocks) - moe) * 2 * M * H // self.tp + moe * M * E
        dense += (self.words + L) * M * (index == 0)
        dense += (self.words * M + 2 * M) * (index == self.pp - 1)
        ranks = self.tp if self.kind == "tensor" else self.ep
        return dense, moe * (E // ranks) * 2 * M * H

    def stage_seconds(self) -> list[float]:
        """One micro-batch's work of each stage."""
        return [self.passes(index, back=False) + self.passes(index, back=True)
                for index in range(self.pp)]  # fmt: skip

    def passes(self, index: int, *, back: bool) -> float:
        """One micro-batch's pass of a stage; blocks that are computed again count as backward."""
        t, blocks = self.b * L, self.stages()[index]
        seconds = sum(self.block(moe=block % 2 == 1, back=back) for block in blocks)
        if back and self.again:
            seconds += sum(self.block(moe=block % 2 == 1, back=False) for block in blocks)
        if index == 0:
            seconds += (ROWS["scatter_add"] if back else ROWS["gather"]) * t * M
            if not back:
                seconds += self.sent("all_reduce", self.tp, t * M * B, self.nodes(1, self.tp))
        return seconds + (self.head(back=back) if index == self.pp - 1 else 0.0)

    def seconds(self) -> float:
        t, last, stages = self.b * L, self.pp - 1, self.stage_seconds()
        width = self.dp * self.tp
        crosses = [
            any(
                (hop * width + one) // PER_NODE != ((hop + 1) * width + one) // PER_NODE
                for one in range(width)
            )
            for hop in range(last)
        ]
        across = (2, 2) if width > 1 else (self.pp, 0)
        hops = [
            wire("send", size, t * M * B, nodes)
            for size, nodes in (across if crossed else (2, 0) for crossed in crosses)
        ]
        around = [sum(hops[max(index - 1, 0) : index + 1]) for index in range(self.pp)]
        period = max(map(sum, zip(stages, around, strict=True)))
        pipeline = (self.m - 1) * period + sum(stages) + 2 * sum(hops)
        return (
            pipeline
            + max(map(self.gradients, range(self.pp)))
            + max(map(self.adam, range(self.pp)))
            + (self.m - 1) * max(map(self.sums, range(self.pp)))
        )

    def head(self, *, back: bool) -> float:
        t, tp, way = self.b * L, self.tp, "_backward" if back else ""
        seconds = ROWS[f"norm{way}"] * t * M + ROWS[f"cross_entropy{way}"] * t * self.words
        seconds += (1 + back) * GEMM.seconds(t * M * self.words)
        size = t * M * B if back else (tp + 1) * t * 4
        return seconds + self.sent("all_reduce", tp, size, self.nodes(1, tp))

    def gradients(self, index: int) -> float:
        """What computation alone does not hide of the stage's collectives."""
        if self.at_end:
            return sum(self.collectives(self.counts(index)))
        dense, experts = self.counts(index)
        buckets, num = self.buckets(index), len(self.stages()[index])
        computing = replace(self, sends=False)
        shown = 0.0
        for own, theirs, back in zip(
            self.collectives((dense, 0)), self.collectives((0, experts)), (True, False), strict=True
        ):
            each = computing.passes(index, back=back) / num
            sent = [
                (first, a / max(1, dense) * own + b / max(1, experts) * theirs)
                for first, a, b in buckets
            ]
            if back:
                shown += _backward(sent, num, each) - num * each
            else:
                whole = self.passes(index, back=False) / num
                shown += _forward(sent, num, each, whole - each) - num * whole
        return shown

    def buckets(self, index: int) -> list[tuple[int, int, int]]:
        """The block from which each bucket is needed, and its parameters, first blocks first."""
        blocks, local = self.stages()[index], E // (self.tp if self.kind == "tensor" else self.ep)
        units = [(0, (self.words + L) * M * (index == 0), 0)]
        for place, block in enumerate(blocks):
            own = 4 * M * M // self.tp + 4 * M + (M * E if block % 2 else 2 * M * H // self.tp)
            units.append((place, own, block % 2 * local * 2 * M * H))
        units.append((len(blocks), (self.words * M + 2 * M) * (index == self.pp - 1), 0))
        kinds = [units]
        if self.kind != "tensor":
            kinds = [[(at, a, 0) for at, a, _ in units], [(at, 0, b) for at, _, b in units]]
        found = []
        for kind in kinds:
            run: list[tuple[int, int, int]] = []
            for unit in (one for one in kind if one[1] + one[2]):
                run.append(unit)
                if 4 * sum(a + b for _, a, b in run) >= 2**20:
                    found.append(run)
                    run = []
            found += [run] if run else []
        return sorted(
            (run[0][0], sum(a for _, a, _ in run), sum(b for _, _, b in run)) for run in found
        )

    def collectives(self, counts: tuple[int, int]) -> tuple[float, float]:
        """What reduces gradients, and what gathers parameters."""
        reduced = gathered = 0.0
        replicas = self.dp // self.ep
        for count, size, stride in zip(
            counts, (self.dp, replicas), (self.tp, self.tp * self.ep), strict=True
        ):
            nodes = self.nodes(stride, size)
            if count and self.zero:
                reduced += wire("reduce_scatter", size, count * 4, nodes)
                gathered += wire("all_gather", size, count * 4 / size, nodes)
            elif count:
                reduced += wire("all_reduce", size, count * 4, nodes)
        return reduced, gathered

    def adam(self, index: int) -> float:
        dense, experts = self.counts(index)
        if self.zero:
            return ROWS["adam"] * (dense / self.dp + experts / (self.dp // self.ep))
        return ROWS["adam"] * (dense + experts)

    def sums(self, index: int) -> float:
        return ROWS["accumulate"] * sum(self.counts(index))

    def memory(self) -> int:
        return max(map(self._stage_memory, range(self.pp)))

    def _stage_memory(self, index: int) -> int:
        t, blocks = self.b * L, self.stages()[index]
        dense, experts = self.counts(index)
        moment = dense + experts
        if self.zero:
            moment = math.ceil(dense / self.dp) + math.ceil(experts / (self.dp // self.ep))
        rows = 2 * t // self.tp if self.kind == "tensor" else 2 * t
        is_tensor = self.kind == "tensor"
        layer = t * 2 * M + rows * (H if is_tensor else 2 * M + H)
        plain = t * (4 * M + (4 * M + 2 * H) // self.tp)
        with_experts = t * (3 * M + 4 * M // self.tp) + layer
        sizes = [with_experts if block % 2 else plain for block in blocks]
        kept = min(self.m, self.pp - index)
        elements = kept * sum(sizes)
        if self.again:
            elements = kept * len(sizes) * t * M + max(sizes)
        elements += 2 * t * (M + self.words) * (index == self.pp - 1) * kept
        buffers = 2 * t * M + rows * 2 * (M + H) if is_tensor else rows * (M + H)
        buffers *= any(block % 2 for block in blocks)
        return 4 * (2 * (dense + experts) + 2 * moment + elements + buffers)


def brute_force(limit_bytes: float, *, in_chunks: bool) -> dict[Key, tuple[float, int]]:
    """Return the best seconds of each layout that fits, and its micro-batch.

    Args:
        in_chunks: omit whole models whose optimizer states alone are sharded: the runtime
            shards all of their states, in chunks.
    """
    found: dict[Key, tuple[float, int]] = {}
    powers = (1, 2, 4, 8, 16)
    kinds: tuple[ExpertParallel, ...] = ("all_to_all", "tensor")
    for kind, dp, ep, tp, pp in product(kinds, powers, powers, powers, powers):
        fits = dp * tp * pp == WORLD and pp <= 6 and tp <= 4 and dp % ep == 0 and ep <= E
        if not fits or (kind == "tensor" and (ep > 1 or tp == 1)) or (kind != "tensor" and tp > 1):
            continue
        for b in range(1, 65):
            share = WORLD * TOKENS // L // dp
            largest = max((one for one in range(1, share // pp + 1) if share % one == 0), default=0)
            if share % b or b > largest or (b & (b - 1) and b != largest):
                continue
            for zero in (False, True):
                if zero and (dp == 1 or (in_chunks and tp == pp == 1)):
                    continue
                # Gradients of whole replicas that exchange tokens are behind the passes.
                at_end = in_chunks and tp == pp == 1 < ep and not zero
                ways = [
                    ByHand(kind, dp, ep, tp, pp, b, zero, again, at_end) for again in (False, True)
                ]
                way = next((one for one in ways if one.memory() <= limit_bytes), None)
                if way is not None:
                    key = (kind, dp, ep, tp, pp)
                    found[key] = min(found.get(key, (math.inf, 0)), (way.seconds(), b))
    return found


def search(
    limit_bytes: int, pins: LayoutPins | None = None, runtime: TargetRuntime = MOETUNE
) -> SearchResult:
    pins = pins or LayoutPins()
    batch = whole_batch(model=MODEL, tokens_per_rank=TOKENS, world_size=WORLD)
    prices = Prices(
        model=MODEL, dtype="float32", costs=PlacedCosts(rows_seconds=ROWS, has_points=True),
        bounds=Bounds(max_degree=1), per_node=PER_NODE, runtime=runtime,
    )  # fmt: skip
    layouts = find_layouts(model=MODEL, world_size=WORLD, batch=batch, pins=pins)
    search = LayoutSearch(prices=prices, batch=batch, pins=pins, limit_bytes=limit_bytes)
    return try_all(search, layouts)


def _key(layout: Layout) -> Key:
    return layout.expert_parallel, layout.dp, layout.ep, layout.tp, layout.pp


@pytest.mark.parametrize("mebibytes", [4096, 60, 40, 25, 18])
def test_every_layout_is_at_the_best_that_brute_force_finds(mebibytes: int) -> None:
    limit = mebibytes * 2**20
    expected = brute_force(limit, in_chunks=False)
    found = search(limit, runtime=TargetRuntime(shards_in_chunks=False))
    assert {_key(one.layout) for one in found.best} == set(expected)
    for one in found.best:
        seconds, _ = expected[_key(one.layout)]
        assert one.seconds == pytest.approx(seconds, rel=1e-9), one.layout
        assert one.memory.total_bytes <= limit
    times = [one.seconds for one in found.best]
    assert times == sorted(times)
    assert all(one.memory.total_bytes > limit for one in found.unfit)
    assert found.unpriced == ()


@pytest.mark.parametrize("mebibytes", [4096, 25, 18])
def test_with_our_runtime_all_but_whole_models_in_chunks_are_those_of_brute_force(
    mebibytes: int,
) -> None:
    limit = mebibytes * 2**20
    expected = brute_force(limit, in_chunks=True)
    found = {_key(one.layout): one for one in search(limit).best}
    chunked = {key for key, one in found.items() if one.chunks is not None}
    assert bool(chunked) == (mebibytes < 4096)  # gradients of whole states are hidden, too
    assert set(found) - chunked <= set(expected) <= set(found)
    for key, one in found.items():
        assert one.memory.total_bytes <= limit
        if key not in chunked:
            assert one.seconds == pytest.approx(expected[key][0], rel=1e-9), key
            continue
        kind, dp, ep, tp, pp = key
        assert tp == pp == 1
        by_hand = ByHand(
            kind, dp, ep, tp, pp, one.setting.sequences, zero=True, again=one.setting.recompute
        )
        (stage,) = by_hand.stage_seconds()
        states = by_hand.adam(0)  # of its own shard; what is exchanged hides, at best
        assert one.seconds >= by_hand.m * stage + states - 1e-12
        assert one.seconds <= expected.get(key, (math.inf, 0))[0] * (1 + 1e-9)


def test_the_memory_limits_of_the_comparison_mean_something() -> None:
    """Some layouts fit only with blocks run again, or sharded, and some not at all."""
    found = search(25 * 2**20, runtime=TargetRuntime(shards_in_chunks=False))
    settings = [one.setting for one in found.best]
    assert {one.recompute for one in settings} == {True, False}
    assert any(one.zero for one in settings)
    assert found.unfit


def test_pins_leave_the_pinned_layouts_as_they_are() -> None:
    free = {_key(one.layout): one.seconds for one in search(2**32).best}
    pins = LayoutPins(tp=2, expert_parallel="tensor", zero=False)
    pinned = search(2**32, pins)
    assert pinned.best
    for one in pinned.best:
        assert one.layout.tp == 2
        assert one.layout.expert_parallel == "tensor"
        assert not one.setting.zero
        assert one.seconds >= free[_key(one.layout)] * (1 - 1e-12)
    sized = search(2**32, LayoutPins(micro_batch=2))
    assert {one.setting.sequences for one in sized.best} == {2}
