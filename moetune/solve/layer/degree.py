"""Time of r chunks, and the best r (PipeMoE §III–IV, MPipeMoE §II-C).

Symbols: r chunks, t_d seconds of one chunk's all-to-all (dispatch and combine alike), t_e
seconds of one chunk's experts, μ and σ the speeds of communication and of computation while
the other runs. In tensor parallelism a chunk has one collective, its all-reduce or
reduce-scatter: t_s.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from moetune.domain.arrays import is_many, longer, shorter
from moetune.domain.constraints import Order
from moetune.domain.costs import LinearCost

TIE = 1e-12
"""Relative difference below which two times are one, and the smaller degree is taken."""


def makespan(
    *,
    degree: int,
    transfer_seconds: float,
    compute_seconds: float,
    comm_speed: float = 1.0,
    comp_speed: float = 1.0,
    order: Order = "dispatch_first",
) -> float:
    """Return the time of a phase in equal chunks.

        T(r) = max(2·r·t_d, 2·t_d + r·t_e)            dispatch first, undisturbed
        T(r) = 2·r·t_d + r·t_e + (1 − μ − σ)·O        in general: all work, less what overlaps
        O    = min((2·r − 2)·a, r·b),  a = t_d/μ,  b = t_e/σ
        O    = min((2·r − 2)·a, r·b, 2·a + (r − 2)·b)  interleaved, r ≥ 2

    O is the time in which both run. For equal chunks either the experts never wait between D₁
    and C_r, and every other transfer overlaps them, or the link never idles, and all experts
    overlap it. Interleaved there is a third case, a < b < 2·a: the link waits for the first
    and for the last chunk's experts. The first line is the second with μ = σ = 1, and all of it
    equals the fluid simulation of `timeline`.

    Source: PipeMoE Eq. 9–12 with the term that Eq. 11 lacks and Eq. 25, 33 and 40 assume: C₁
    cannot use the link before D_r has left it. The orders are those of MPipeMoE §III-B.

    Args:
        degree: r, at least 1.
        transfer_seconds: t_d of one chunk.
        compute_seconds: t_e of one chunk.
        comm_speed: μ, above 0 and at most 1.
        comp_speed: σ, above 0 and at most 1.
        order: in which the link serves the chunks.
    """
    link = 2 * degree * transfer_seconds
    device = degree * compute_seconds
    waits = order == "interleaved" and bool(np.max(degree) > 1 if is_many(degree) else degree > 1)
    if not waits and _is_undisturbed(comm_speed, comp_speed):
        return longer(link, 2 * transfer_seconds + device)
    slowed_compute = compute_seconds / comp_speed
    slowed_transfer = transfer_seconds / comm_speed
    overlap = shorter((2 * degree - 2) * slowed_transfer, degree * slowed_compute)
    if waits:
        last = 2 * slowed_transfer + (degree - 2) * slowed_compute
        overlap = shorter(overlap, longer(last, 0.0))  # in one chunk nothing overlaps
    return link + device + (1 - comm_speed - comp_speed) * overlap


def makespan_beside(
    *,
    degree: int,
    transfer_seconds: float,
    compute_seconds: float,
    beside_seconds: float,
    comm_speed: float = 1.0,
    comp_speed: float = 1.0,
) -> float:
    """Return the time of a phase that computes something else before its experts, or behind them.

        T(r) = 2·r·t_d + r·t_e + t_s + (1 − μ − σ)·O
        O    = min((2·r − 2)·a + min(a, s), r·b + s, r·a + (r − 1)·b),  s = t_s/σ

    Forward it begins with D₁, backward it follows the last experts, beside C_r: one is the other,
    read from its end. Either the device never waits and the link does, once; or the link never
    idles; or, where it is long, the link waits for it between the dispatches, which it hides, and
    the combines, which all experts but the first hide. It equals the simulation of `timeline`.

    Args:
        degree, transfer_seconds, compute_seconds, comm_speed, comp_speed: as of `makespan`, whose
            chunks are dispatched first.
        beside_seconds: t_s of what neither needs the experts' results nor they its own.
    """
    a, b = transfer_seconds / comm_speed, compute_seconds / comp_speed
    beside = beside_seconds / comp_speed
    overlap = shorter((2 * degree - 2) * a + shorter(a, beside), degree * b + beside)
    overlap = shorter(overlap, degree * a + (degree - 1) * b)
    work = 2 * degree * transfer_seconds + degree * compute_seconds + beside_seconds
    return work + (1 - comm_speed - comp_speed) * overlap


def tensor_parallel_makespan(
    *,
    degree: int,
    transfer_seconds: float,
    compute_seconds: float,
    comm_speed: float = 1.0,
    comp_speed: float = 1.0,
) -> float:
    """Return the time of a phase of experts and then one collective for each chunk.

        T(r) = t_e + t_s + (r − 1)·max(t_e, t_s)                  undisturbed
        T(r) = r·t_e + r·t_s + (1 − μ − σ)·(r − 1)·min(t_s/μ, t_e/σ)    in general

    A chunk's all-reduce overlaps the next chunk's experts. Either the experts never wait, and
    all all-reduces but the last overlap them, or the link never idles after the first chunk's
    experts, and all others overlap it.

    Source: PPMoE Eq. 5 in chunks, each of them as in PipeMoE Eq. 9–12.

    Args:
        degree: r, at least 1.
        transfer_seconds: t_s of one chunk's all-reduce or reduce-scatter.
        compute_seconds: t_e of one chunk.
        comm_speed: μ, above 0 and at most 1.
        comp_speed: σ, above 0 and at most 1.
    """
    slower = longer(transfer_seconds, compute_seconds)
    if _is_undisturbed(comm_speed, comp_speed):
        return compute_seconds + transfer_seconds + (degree - 1) * slower
    overlap = shorter(transfer_seconds / comm_speed, compute_seconds / comp_speed)
    work = degree * (compute_seconds + transfer_seconds)
    return work + (1 - comm_speed - comp_speed) * (degree - 1) * overlap


def _is_undisturbed(comm_speed: float, comp_speed: float) -> bool:
    if is_many(comm_speed) or is_many(comp_speed):
        return bool(np.all(comm_speed == 1.0) and np.all(comp_speed == 1.0))
    return comm_speed == comp_speed == 1.0


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


def best_tensor_parallel_degree(
    *,
    transfer: LinearCost,
    payload_bytes: float,
    compute: LinearCost,
    macs: float,
    max_degree: int,
) -> int:
    """Return the r in 1..max_degree with the smallest undisturbed tensor-parallel makespan.

        T(r) = max(α_e·r + x·β_e + α_s + β_s·y/r, α_s·r + y·β_s + α_e + β_e·x/r)

    is convex: the maximum of two convex functions. So the best integer is 1, max_degree, or
    next to the bottom of one of them, √(β_s·y/α_e) and √(β_e·x/α_s), or to their crossing,
    where a chunk's experts take as long as its all-reduce. Ties go to the smaller degree.

    Args:
        transfer: one all-reduce, over bytes.
        payload_bytes: y, the input of the unsplit all-reduce on one rank.
        compute: all GEMMs of one chunk together, over MACs, as in `best_degree`.
        macs: x, MACs of one unsplit GEMM.
        max_degree: largest degree allowed.

    Raises:
        ValueError: `max_degree` below 1.
    """
    wire, work = transfer.beta_seconds * payload_bytes, compute.beta_seconds * macs
    apart = transfer.alpha_seconds - compute.alpha_seconds
    reals = [
        math.sqrt(volume / start)
        for volume, start in ((wire, compute.alpha_seconds), (work, transfer.alpha_seconds))
        if start > 0
    ]
    if apart:
        reals.append((work - wire) / apart)

    def seconds(degree: int) -> float:
        return tensor_parallel_makespan(
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
