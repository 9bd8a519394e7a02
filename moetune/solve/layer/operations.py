"""The operations of an MoE layer on one rank, each priced alone: GEMMs, rows, collectives.

T tokens per rank, k experts per token, M d_model, H d_hidden, E experts, r chunks.
`solve.layer.costs` builds chunks and phases from them.

A kernel for all experts cuts each expert's rows into tiles, and pads the last tile. Gradients of
weights are sums over an expert's rows, so the most loaded expert takes longest. Uneven forms of a
GEMM take extra time. Loads between even and uneven take a part of it, by tiles or by the most
loaded expert's share: measured on an H100 (docs/decisions/gpus.md#0130).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from types import MappingProxyType

import numpy as np

from moetune.domain.arrays import Floats, Sizes
from moetune.domain.cost_keys import CollectiveKey, CostKey, GemmKey, RowsKey
from moetune.domain.costs import Costs, Doubt, Estimate, least_trust, scaled
from moetune.domain.kernels import KernelName
from moetune.domain.layer import LayerKey, LayerShape, Phase
from moetune.domain.once import Tables
from moetune.domain.samples import (
    HOST_CHUNKS,
    LAUNCHES,
    CollectiveOp,
    GemmForm,
    even_form,
    hottest_share,
    uneven_form,
)

Price = Estimate[Floats]
"""Times of a layer's operation. A single size gives arrays without dimensions, with trust and
doubts; many sizes or refits have neither."""
NOTHING: Price = Estimate(seconds=np.zeros(()), trust="measured")
_SECONDS, _TRUST, _DOUBTS = map(attrgetter, Estimate._fields)  # a plan sums thousands


def total(*parts: Price | None) -> Price:
    """Return the sum of the measured parts; None counts as 0 s."""
    parts_had = [part for part in parts if part is not None]
    trusts = set(map(_TRUST, parts_had))
    return Estimate(
        seconds=sum(map(_SECONDS, parts_had), NOTHING.seconds),
        trust=least_trust(trusts) if len(trusts) != 1 else trusts.pop(),
        doubts=doubts_of(parts_had),
    )


def in_numbers(estimate: Price) -> Estimate[float]:
    """Return the estimate of a single size with its time as a float."""
    return Estimate(estimate.seconds.item(), estimate.trust, estimate.doubts)


def at_least(estimate: Price, least: Price | None) -> Price:
    """Return the estimate, raised to a lower bound; None means no bound."""
    if least is None:
        return estimate
    return estimate._replace(seconds=np.maximum(estimate.seconds, least.seconds))


def doubts_of(parts: Iterable[Estimate[float] | Price]) -> tuple[Doubt, ...]:
    """Return the distinct doubts of all estimates, those of the longest estimate first."""
    doubted = list(filter(_DOUBTS, parts))
    if len(doubted) < 2:  # noqa: PLR2004 - nothing to merge
        return doubted[0].doubts if doubted else ()
    doubted.sort(key=_SECONDS, reverse=True)
    return tuple(dict.fromkeys(chain.from_iterable(map(_DOUBTS, doubted))))


COUNT_BYTES = 8
"""Bytes of a token count, which ranks exchange as int64."""
PHASE_GEMMS: Mapping[Phase, tuple[GemmForm, ...]] = MappingProxyType(
    {"forward": ("forward",), "backward": ("grad_input", "grad_weight")}
)
"""The forms of GEMM that each phase computes for each weight."""
ROW_MOVES = ("gather", "scatter_add")
"""Permute and unpermute outside the pipeline: rows go into the order of experts, and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperations(Tables):
    """A layer on a number of ranks, and the times of its operations there.

    Args:
        key: the layer, its P ranks, and the way in which they share the experts.
        expert_shares: share of each expert in the fullest rank's rows; empty for even experts.
        gemm_factor: factor on the seconds of a GEMM alone, within a step.
        gap_seconds: time behind each GEMM, within a step.
    """

    key: LayerKey
    costs: Costs
    expert_shares: tuple[float, ...] = ()
    kernel: KernelName = ""
    gemm_factor: float = 1.0
    gap_seconds: float = 0.0

    @property
    def layer(self) -> LayerShape:
        """The sizes of the layer."""
        return self.key.layer

    @property
    def world_size(self) -> int:
        """P, the number of ranks."""
        return self.key.num_ranks

    @property
    def dtype(self) -> str:
        """The dtype of the experts' computation."""
        return self.key.dtype

    @property
    def local_experts(self) -> int:
        """Number of experts on a rank."""
        return self.layer.num_experts // self.world_size

    def price(self, key: CostKey, size: Sizes) -> Price:
        """Return the time of an operation; ProfileError if it was not measured."""
        return self.costs.seconds(key, np.asarray(size, float))

    def gate(self, phase: Phase, *, tokens: float) -> Price:
        """Return the time of scores, softmax and top-k choice; 0 if it was not measured."""
        experts = self.layer.num_experts
        choice = self.rows_op("gate", tokens, experts)
        if choice is None:
            return NOTHING
        if phase == "backward":
            choice = self.rows_op("gate_backward", tokens, experts)
        keys = (
            GemmKey(self.dtype, product, 1, self.layer.d_model, experts)
            for product in PHASE_GEMMS[phase]
        )
        return total(choice, *(self._multiplied(key, tokens) for key in keys))

    def _multiplied(self, key: GemmKey, rows: Sizes) -> Price:
        alone = self.price(key, rows)
        if self.gemm_factor == 1 and not self.gap_seconds:
            return alone
        return alone._replace(seconds=alone.seconds * self.gemm_factor + self.gap_seconds)

    def gemm(self, product: GemmForm, *, rows: Sizes, is_second: bool = False) -> Price:
        """Return a GEMM over all local experts' rows; ProfileError for an unmeasured dtype."""
        expert_rows = rows / self.local_experts
        even = self._gemm_of(product, rows=expert_rows, is_second=is_second)
        if len(self.expert_shares) <= 1:
            return even
        share = unevenness(product, self.expert_shares, rows=expert_rows * self.local_experts)
        uneven = self._gemm_of(uneven_form(product), rows=expert_rows, is_second=is_second)
        return total(scaled(even, 1 - share), scaled(uneven, share))

    def _gemm_of(self, form: GemmForm, *, rows: Sizes, is_second: bool) -> Price:
        """Return a form's GEMM over all local experts, with `rows` as the mean per expert."""
        sizes = self.layer.d_model, self.layer.d_hidden
        d_in, d_out = sizes[::-1] if is_second else sizes
        shape = self.local_experts, d_in, d_out
        return self._multiplied(GemmKey(self.dtype, form, *shape, self.kernel), rows)

    def gemms(self, rows: Sizes, *forms: GemmForm, is_second: bool = False) -> list[Price]:
        """Return the GEMMs of a chunk with W₂, or with all other weights."""
        count = 1 if is_second else self.layer.num_gemms - 1
        return count * [self.gemm(form, rows=rows, is_second=is_second) for form in forms]

    def activation(self, phase: Phase, rows: Sizes) -> Price:
        """Return the activation; backward it is evaluated again, with its gradient after it."""
        name, width = self.layer.activation, self.layer.d_hidden
        backward = self.rows_op(f"{name}_backward", rows, width) if phase == "backward" else None
        return total(self.rows_op(name, rows, width), backward)

    def rows_op(self, op: str, rows: Sizes, width: int) -> Price | None:
        """Return a memory-bound operation; None where it was not measured."""
        key = RowsKey(op, self.dtype)
        return self.price(key, rows * width) if self.costs.knows(key) else None

    def launches(self, phase: Phase) -> tuple[Price, Price] | None:
        """Return the host's launch times per phase and per chunk; None if unmeasured (CPUs)."""
        fewest, most = (self._launched(phase, chunks) for chunks in HOST_CHUNKS)
        if fewest is None or most is None:
            return None
        chunk_seconds = (most.seconds - fewest.seconds) / (HOST_CHUNKS[1] - HOST_CHUNKS[0])
        once = np.maximum(fewest.seconds - chunk_seconds * HOST_CHUNKS[0], 0.0)
        return fewest._replace(seconds=once), fewest._replace(seconds=chunk_seconds)

    def _launched(self, phase: Phase, chunks: int) -> Price | None:
        forward, step = (self.rows_op(op, chunks, 1) for op in LAUNCHES)
        if forward is None or step is None:
            return None
        backward = np.maximum(step.seconds - forward.seconds, 0.0)
        return forward if phase == "forward" else step._replace(seconds=backward)

    def collective(self, op: CollectiveOp, num_bytes: Sizes, *, in_flight: int = 1) -> Price:
        """Return a collective of all ranks, 0 on a single rank; ProfileError if unmeasured."""
        if self.world_size == 1:
            return NOTHING
        key = CollectiveKey(op, self.world_size, in_flight=in_flight)
        return self.price(key, num_bytes)

    def collectives(self, op: CollectiveOp, num_bytes: Sizes, in_flight: Floats) -> Price:
        """Return `collective` at several sizes, with a common or separate number in flight."""
        if not in_flight.ndim:
            return self.collective(op, num_bytes, in_flight=int(in_flight))
        sizes, numbers = np.broadcast_arrays(num_bytes, in_flight)
        seconds = np.empty(sizes.shape)
        for number in set(numbers.ravel().tolist()):
            same = numbers == number
            estimate = self.collective(op, sizes[same], in_flight=int(number))
            seconds[same] = estimate.seconds
        return Estimate(seconds=seconds, trust="measured")


TILE_ROWS = 128
"""Tile height of kernels that multiply all experts at once, on compute capability 9.0."""
_LEAST, _MOST = -1.0, 1.5
"""Limits of unevenness: fewer tiles than even loads save time; the upper limit is a guess."""


def unevenness(form: GemmForm, shares: Sequence[float], *, rows: Sizes) -> Floats:
    """Return the part of the uneven form's extra time that these shares take; 1 as measured."""
    num_experts = len(shares)
    hottest = hottest_share(num_experts)
    by_share = (max(shares) - 1 / num_experts) / (hottest - 1 / num_experts)
    if even_form(form) == "grad_weight":
        return np.asarray(min(by_share, _MOST))
    even = _nearly_even_tiles(rows, num_experts)
    colder = _nearly_even_tiles(rows * (1 - hottest), num_experts - 1)
    more = _tiles(rows, [hottest]) + colder - even
    by_tiles = (_tiles(rows, shares) - even) / np.where(more > 0, more, 1)
    return np.clip(np.where(more > 0, by_tiles, by_share), _LEAST, _MOST)


def _tiles(rows: Sizes, shares: Sequence[float]) -> Floats:
    return _whole(np.multiply.outer(rows, shares))


def _nearly_even_tiles(rows: Sizes, num_experts: int) -> Floats:
    """Return the tiles of even experts, whose loads still differ by a row: see `expert_rows`."""
    unevenness = np.zeros(num_experts)
    unevenness[: num_experts - 1 : 4], unevenness[1::4] = 1, -1
    return _whole(np.asarray(rows, float)[..., None] / num_experts + unevenness)


def _whole(rows: Floats) -> Floats:
    tiles: Floats = np.ceil(np.maximum(rows, 0.0) / TILE_ROWS).sum(axis=-1)
    return tiles
