"""Time of r chunks (PipeMoE §III–IV, MPipeMoE §II-C).

Symbols: r chunks, t_d seconds of one chunk's all-to-all (dispatch and combine alike), t_e
seconds of one chunk's experts, μ and σ the speeds of communication and of computation while
the other runs. In tensor parallelism a chunk has one collective, its all-reduce or
reduce-scatter: t_s.
"""

import numpy as np

from moetune.domain.constraints import Order
from moetune.domain.costs import Number

TIE = 1e-12
"""Relative difference below which two times tie, so that the smaller degree is taken."""


def makespan(
    *,
    degree: Number,
    transfer_seconds: Number,
    compute_seconds: Number,
    comm_speed: float | Number = 1.0,
    comp_speed: float | Number = 1.0,
    order: Order = "dispatch_first",
) -> Number:
    """Return the time of a phase in equal chunks.

        T(r) = max(2·r·t_d, 2·t_d + r·t_e)                 dispatch first, undisturbed
        T(r) = 2·r·t_d + r·t_e + (1 − μ − σ)·O       in general: all work, less what overlaps
        O    = min((2·r − 2)·a, r·b),  a = t_d/μ,  b = t_e/σ
        O    = min((2·r − 2)·a, r·b, 2·a + (r − 2)·b)      interleaved, r ≥ 2

    O is the time in which both run. With equal chunks there are two cases. Either the experts never
    wait between D₁ and C_r, and all other transfers overlap them; or the link never idles, and all
    experts overlap it. Interleaved there is a third case, a < b < 2·a: the link waits for the
    experts of the first and of the last chunk. The first line is the second with μ = σ = 1. All
    lines equal the fluid simulation of `timeline`.

    Source: PipeMoE Eq. 9–12 with the term that Eq. 11 lacks and Eq. 25, 33 and 40 assume: C₁ cannot
    use the link before D_r has left it. The orders are those of MPipeMoE §III-B.

    Args:
        degree: r, at least 1.
        transfer_seconds: t_d of one chunk.
        compute_seconds: t_e of one chunk.
        comm_speed: μ, above 0 and at most 1.
        comp_speed: σ, above 0 and at most 1.
        order: in which the link serves the chunks.
    """
    a, b = transfer_seconds / comm_speed, compute_seconds / comp_speed
    overlap: Number = np.minimum((2 * degree - 2) * a, degree * b)
    if order == "interleaved" and np.max(degree) > 1:
        rest = np.maximum(2 * a + (degree - 2) * b, 0.0)  # 0 in one chunk
        overlap = np.minimum(overlap, rest)
    work = 2 * degree * transfer_seconds + degree * compute_seconds
    return work + (1 - comm_speed - comp_speed) * overlap


def tensor_parallel_makespan(
    *,
    degree: Number,
    transfer_seconds: Number,
    compute_seconds: Number,
    comm_speed: float | Number = 1.0,
    comp_speed: float | Number = 1.0,
) -> Number:
    """Return the time of a phase in which each chunk has experts, and then one collective.

        T(r) = t_e + t_s + (r − 1)·max(t_e, t_s)                  undisturbed
        T(r) = r·t_e + r·t_s + (1 − μ − σ)·(r − 1)·min(t_s/μ, t_e/σ)    in general

    A chunk's all-reduce overlaps the next chunk's experts. Either the experts never wait, and all
    all-reduces except the last overlap them; or the link never idles after the first chunk's
    experts, and all other experts overlap it.

    Source: PPMoE Eq. 5 in chunks, each of them as in PipeMoE Eq. 9–12.

    Args:
        transfer_seconds: t_s of one chunk's all-reduce or reduce-scatter.
    """
    overlap: Number = np.minimum(transfer_seconds / comm_speed, compute_seconds / comp_speed)
    work = degree * (compute_seconds + transfer_seconds)
    return work + (1 - comm_speed - comp_speed) * (degree - 1) * overlap
