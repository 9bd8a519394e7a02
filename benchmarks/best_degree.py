"""PipeMoE's best number of chunks in closed form, where costs are lines: an oracle of the solver.

`moetune.solve` works out all degrees at once, whatever the costs.
"""

import math
from collections.abc import Callable, Iterable, Iterator

from moetune.domain.costs import LinearCost
from moetune.solve.layer.degree import TIE, makespan


def best_degree(
    *,
    transfer: LinearCost,
    payload_bytes: float,
    compute: LinearCost,
    macs: float,
    max_degree: int,
) -> int:
    """Return the r in 1..max_degree with the smallest undisturbed makespan.

        T(r) = max(2·α_a·r + 2·β_a·y, 2·α_a + 2·β_a·y/r + α_e·r + β_e·x)

    is convex: the maximum of an increasing line and a convex function. So the best integer is
    1, max_degree, or next to the bottom of the second, √(2·β_a·y/α_e), or to a crossing of
    the two. Ties go to the smaller degree.

    Departs from PipeMoE's Algorithm 1, whose line 5 swaps t_d and t_e against Eq. 19, whose
    Eq. 28 divides by α_a − α_e whatever its sign, whose SLSQP returns a real r that has to be
    rounded, and whose lines 2–3 multiply the sizes by the number of local experts.

    Args:
        transfer: one all-to-all, over bytes.
        payload_bytes: y, the input of the unsplit all-to-all on one rank.
        compute: all GEMMs of one chunk together: α_e = g·α_gemm, β_e = g·β_gemm, over MACs.
        macs: x, MACs of one unsplit GEMM.
        max_degree: largest degree allowed.

    Raises:
        ValueError: `max_degree` below 1.
    """
    wire = 2 * transfer.beta_seconds * payload_bytes
    reals = _real_optima(
        wire=wire,
        transfer_alpha=transfer.alpha_seconds,
        compute_alpha=compute.alpha_seconds,
        work=compute.beta_seconds * macs,
    )

    def seconds(degree: int) -> float:
        return makespan(
            degree=degree,
            transfer_seconds=transfer.seconds(payload_bytes / degree),
            compute_seconds=compute.seconds(macs / degree),
        )

    return _best_near(reals, seconds, max_degree=max_degree)


def _best_near(reals: Iterable[float], seconds: Callable[[int], float], *, max_degree: int) -> int:
    """Return the best of 1, max_degree and the whole numbers next to the real candidates.

    Raises:
        ValueError: `max_degree` below 1.
    """
    if max_degree < 1:
        raise ValueError(f"max_degree must be at least 1, got {max_degree}")
    degrees = {1, max_degree}
    for real in reals:
        if 1 <= real < max_degree:
            degrees |= {math.floor(real), math.floor(real) + 1}
    times = {degree: seconds(degree) for degree in degrees}
    limit = min(times.values()) * (1 + TIE)
    return min(degree for degree, time in times.items() if time <= limit)


def _real_optima(
    *, wire: float, transfer_alpha: float, compute_alpha: float, work: float
) -> Iterator[float]:
    """Yield the bottom of the convex side and the crossings a·r² + b·r − wire = 0."""
    if compute_alpha > 0:
        yield math.sqrt(wire / compute_alpha)
    a = 2 * transfer_alpha - compute_alpha
    b = wire - 2 * transfer_alpha - work
    scale = max(abs(a), abs(b), wire)
    if not 0 < scale < math.inf:
        return
    # Scaled, and with the root that does not cancel first, so that no size of the numbers
    # overflows the discriminant or loses its digits.
    a, b, wire = a / scale, b / scale, wire / scale
    discriminant = b * b + 4 * a * wire
    if discriminant < 0:
        return
    larger = -(b + math.copysign(math.sqrt(discriminant), b)) / 2
    if a:
        yield larger / a
    if larger:
        yield -wire / larger
