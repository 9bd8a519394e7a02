"""Bytes that layouts need at least, before their pipelines are cut: those of one size at once.

Of L blocks on p pipeline ranks some rank has ⌈L/p⌉ or more. Equal and balanced cuts tell more: a
rank between the ends has ⌈L/p⌉ − 1 or more, because a block goes to the rank that has least to do
(`balanced_stages`). Which blocks these are is not known: those of the model that take least.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moetune.domain.pipeline import V_SCHEDULES
from moetune.domain.training import FoldedLayout, LayoutRequest, Recompute
from moetune.solve.joint.fitting import Fitting
from moetune.solve.training.memory import FRAGMENTATION, LIBRARY_BYTES, MemoryModel

_Floats = npt.NDArray[np.float64]
_LESS = np.array([[[0.0]], [[-1.0]]])
"""Blocks that the rank that has most of them has more, and one between the ends."""


def least_bytes(
    fitting: Fitting,
    pipelines: Sequence[FoldedLayout],
    recomputes: Sequence[tuple[Recompute, ...]],
    pins: LayoutRequest,
    *,
    may_offload: bool,
) -> _Floats:
    """Return bytes that the fullest device needs at least, [pipeline, recomputation].

    Args:
        pipelines: layouts of the same sizes, which differ in overlap, vpp and schedule.
        may_offload: whether what is not pinned may be in host memory.
    """
    if pins.stages is not None:
        return np.zeros((len(pipelines), len(recomputes)))
    sizes, memory = pipelines[0], fitting.memory
    usual = memory.kept(sizes)
    least = memory.kept(fitting.with_most_waiting(sizes, pins)) if may_offload else usual
    return _least_of_cuts(
        memory, pipelines, recomputes,
        ways=fitting.ways(sizes, pins, may_offload=may_offload),
        kept=[usual if modules else least for modules in recomputes],
    )  # fmt: skip


def _least_of_cuts(
    memory: MemoryModel,
    pipelines: Sequence[FoldedLayout],
    recomputes: Sequence[tuple[Recompute, ...]],
    *,
    ways: Sequence[tuple[FoldedLayout, float]],
    kept: Sequence[float],
) -> _Floats:
    """Return the bytes of pipelines that are cut equally or balanced.

    Args:
        ways: to keep the states, as a layout with a ZeRO stage and a share of the optimizer on the
            host: the one that takes least counts.
        kept: share of the activations that the device keeps at least, for each recomputation.
    """
    first, num_layers = pipelines[0], memory.job.decoder.num_layers
    counts = np.array(memory.stages.whole.counts, dtype=float)
    blocks = memory.sizes_of_blocks(first, recomputes)
    loss = 1 + FRAGMENTATION
    activations = np.array(
        [
            [loss * share * one.total for one in every]
            for share, every in zip(kept, blocks, strict=True)
        ]
    )
    workspace = np.array([min(one.workspace for one in every) for every in blocks])
    live = np.array([_live(memory, one) for one in pipelines])[:, :, None, None] * activations
    states = loss * np.array([memory.states_of_blocks(one, on_host=share) for one, share in ways])
    num = -(-num_layers // first.pp)
    taken = _cheapest(_LESS + num, counts, states[:, None, None, None] + live)
    fullest = np.maximum(taken[:, :, 0], taken[:, :, 1])
    if first.pp == 1:  # all is on one rank, the ends with it
        whole = [memory.least(one, on_host=share) - LIBRARY_BYTES for one, share in ways]
        fullest += (np.array(whole) - states @ counts)[:, None, None]
    bound: _Floats = fullest.min(axis=0) + (loss * workspace + LIBRARY_BYTES)
    return bound


def _live(memory: MemoryModel, layout: FoldedLayout) -> tuple[float, float]:
    """Return the least micro-batches in work on any rank, and the most between the ends."""
    live = memory.live(layout)
    middle = live[1:] if layout.order in V_SCHEDULES else live[1:-1]
    return min(live), max(middle, default=0.0)


def _cheapest(num: _Floats, counts: _Floats, sizes: _Floats) -> _Floats:
    """Return the bytes of those blocks that take least, [way, pipeline, rank, recomputation].

        min Σ x_k·s_k  for  Σ x_k = n, 0 ≤ x_k ≤ c_k  is  max_j (n·s_j − Σ c_k·max(0, s_j − s_k))

    Args:
        num: n, of the blocks, [rank, 1, 1].
        counts: c, that the model has of each kind.
        sizes: s, of one block, [way, pipeline, rank, recomputation, kind].
    """
    if len(counts) == 1:
        return (num * sizes)[..., 0]
    saved = np.maximum(sizes[..., :, None] - sizes[..., None, :], 0.0) @ counts
    least: _Floats = (num * sizes - saved).max(axis=-1)
    return least
