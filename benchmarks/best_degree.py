"""PipeMoE's best number of chunks in closed form, where costs are lines: an oracle of the solver.

`moetune.solve` works out all degrees at once, whatever the costs.
"""

import math

from moetune.domain.costs import LinearCost
from moetune.solve.layer.degree import TIE, makespan


def best_degree(
    *, transfer: LinearCost, payload_bytes: float, compute: LinearCost, macs: float, max_degree: int
) -> int:
    """Return the r in 1..max_degree with the smallest undisturbed makespan.

        T(r) = max(2·α_a·r + 2·β_a·y, 2·α_a + 2·β_a·y/r + α_e·r + β_e·x)

    is convex: the maximum of an increasing line and a convex function. So the best integer is
    1, max_degree, or next to the bottom of the second, √(2·β_a·y/α_e), or to a crossing of
    the two, (2·α_a − α_e)·r² + (2·β_a·y − 2·α_a − β_e·x)·r = 2·β_a·y. Ties go to the smaller one.

    Departs from PipeMoE's Algorithm 1, whose line 5 swaps t_d and t_e against Eq. 19, whose
    Eq. 28 divides by α_a − α_e whatever its sign, whose SLSQP returns a real r that has to be
    rounded, and whose lines 2–3 multiply the sizes by the number of local experts.

    Args:
        transfer: one all-to-all, over bytes.
        payload_bytes: y, the input of the unsplit all-to-all on one rank.
        compute: all GEMMs of one chunk together: α_e = g·α_gemm > 0, β_e = g·β_gemm, over MACs.
        macs: x, MACs of one unsplit GEMM.
    """
    wire = 2 * transfer.beta_seconds * payload_bytes
    a = 2 * transfer.alpha_seconds - compute.alpha_seconds
    b = wire - 2 * transfer.alpha_seconds - compute.beta_seconds * macs
    reals = [math.sqrt(wire / compute.alpha_seconds)]
    if (discriminant := b * b + 4 * a * wire) >= 0:
        larger = -(b + math.copysign(math.sqrt(discriminant), b)) / 2  # that does not cancel
        reals += [larger / a if a else 0.0, -wire / larger if larger else 0.0]
    near = (math.floor(real) + more for real in reals if 1 <= real < max_degree for more in (0, 1))
    times = {
        degree: makespan(
            degree=degree, transfer_seconds=transfer.seconds(payload_bytes / degree),
            compute_seconds=compute.seconds(macs / degree),
        )
        for degree in {1, max_degree, *near}
    }  # fmt: skip
    limit = min(times.values()) * (1 + TIE)
    return min(degree for degree, seconds in times.items() if seconds <= limit)
