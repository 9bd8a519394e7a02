"""Exchanges in chunks behind the experts' computation, as moetune's own layer runs them.

A pass of r equal chunks takes the makespan of the layer's solver (`solve.layer.degree`): the
exchanges of one chunk run while the experts compute another. What a chunk takes comes from the
same prices as a whole pass. All layers share a plan book, and so one degree, forward as backward;
memory is that of whole passes, whose rows are kept whatever the chunks.

Source: PipeMoE Eq. 9-12, with the corrections of `solve.layer.degree`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moetune.domain.experts import RoutedExperts
from moetune.solve.layer.degree import TIE, makespan
from moetune.solve.model.activations import ELEMENT
from moetune.solve.model.block import BlockPrices
from moetune.solve.model.passes import FORWARD_OF_BOTH, LAUNCH_SECONDS

MOST_CHUNKS = 16
_TRANSFERS = 2
"""Dispatch and combine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedPass:
    """A pass of a block's experts with its exchanges.

    Args:
        seconds: by the number of chunks, of which one is 1.
        kernels: that the host launches for one more chunk.
    """

    seconds: Mapping[int, float]
    kernels: int

    def saved(self, degree: int) -> float:
        """Return the seconds that so many chunks take less than one."""
        return self.seconds[1] - self.seconds[degree]

    def launches(self, degree: int) -> float:
        """Return the host's seconds for all chunks but the first."""
        return (degree - 1) * self.kernels * LAUNCH_SECONDS


class ChunkedPasses(NamedTuple):
    """Both passes of a layer."""

    forward: ChunkedPass
    backward: ChunkedPass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedBlock:
    """A block whose exchanges are cut into chunks.

    Args:
        slack: seconds by which the device's computation is longer than the host's launches.
        repeats: whether the backward pass repeats the forward one, exchanges and all.
    """

    passes: ChunkedPasses
    slack: float
    repeats: bool

    def launches(self, degree: int) -> float:
        """Return the host's seconds for all chunks but the first of each pass."""
        forward = self.passes.forward.launches(degree)
        return (2 if self.repeats else 1) * forward + self.passes.backward.launches(degree)

    def saved(self, degree: int) -> tuple[float, float]:
        """Return what the passes save on the device."""
        forward = self.passes.forward.saved(degree)
        again = forward if self.repeats else 0.0
        return forward, self.passes.backward.saved(degree) + again

    def gained(self, degree: int) -> tuple[float, float]:
        """Return what the passes save, less what the devices wait for more launches."""
        waits = max(0.0, self.launches(degree) - self.slack) - max(0.0, -self.slack)
        forward, backward = self.saved(degree)
        return forward - FORWARD_OF_BOTH * waits, backward - (1 - FORWARD_OF_BOTH) * waits


def chunked_passes(prices: BlockPrices, part: RoutedExperts, degree: int | None) -> ChunkedPasses:
    """Return the passes of a layer next to those in one chunk; in up to 16 for None."""
    degrees = range(1, MOST_CHUNKS + 1) if degree is None else sorted({1, degree})
    chunks = {degree: prices.chunk(part, degree) for degree in degrees}
    gemms = part.num_gemms
    forward = {
        degree: (computed.forward, sent.forward) for degree, (computed, sent) in chunks.items()
    }
    backward = {
        degree: (computed.backward, sent.grad_input) for degree, (computed, sent) in chunks.items()
    }
    return ChunkedPasses(
        _chunked_pass(prices, part, forward, kernels=gemms + 3),
        _chunked_pass(prices, part, backward, kernels=2 * gemms + 3),
    )


def best_degree(blocks: Sequence[tuple[int, ChunkedBlock]]) -> int:
    """Return the degree with which blocks gain most in sum; of equal ones the fewest chunks.

    No pass of any block may be slower than in one chunk, whichever pipeline rank it is on.

    Args:
        blocks: with their numbers in the model.
    """
    best, most = 1, 0.0
    scale = sum(
        count * sum(passes.seconds[1] for passes in block.passes) for count, block in blocks
    )
    for degree in range(2, MOST_CHUNKS + 1):
        gains = [block.gained(degree) for _, block in blocks]
        if any(gain < 0 for pair in gains for gain in pair):
            continue
        gained = sum(count * sum(pair) for (count, _), pair in zip(blocks, gains, strict=True))
        if gained > most + TIE * scale:
            best, most = degree, gained
    return best


def _chunked_pass(
    prices: BlockPrices, part: RoutedExperts, chunks: Mapping[int, tuple[float, float]],
    *, kernels: int,
) -> ChunkedPass:  # fmt: skip
    """Return a pass by its number of chunks of (experts, exchanges), no less than the whole."""
    whole_experts, whole_exchange = chunks[1]
    num_bytes = prices.own_tokens * part.mean_top_k * part.d_expert * ELEMENT
    makespans = {}
    for degree, (experts, exchange) in chunks.items():
        transfer = max(exchange, whole_exchange / degree) / _TRANSFERS
        speeds = prices.device.costs.overlap_speeds(
            exchange_bytes=num_bytes / degree, exchange_seconds=transfer
        )
        makespans[degree] = float(makespan(
            degree=degree, transfer_seconds=transfer,
            compute_seconds=max(experts, whole_experts / degree),
            comm_speed=float(speeds.comm), comp_speed=float(speeds.comp),
        ))  # fmt: skip
    return ChunkedPass(seconds=makespans, kernels=kernels)
