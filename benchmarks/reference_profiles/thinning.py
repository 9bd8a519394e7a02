"""Fewest points of a curve that predict those left out within a bound."""

from collections.abc import Mapping

from moetune.fit.curve import curve_through

BOUND = 0.03
Curve = Mapping[float, float]


def thinned(points: Curve, *, bound: float = BOUND) -> dict[float, float]:
    """Return the points to keep: the ends, and then always the worst predicted one.

    Times that fall as the size grows are contradictions: the curve through them is flat there, and
    a kept point may miss itself. Where adding points no longer helps, all are kept.

    Args:
        points: seconds by size.
    """
    sizes = sorted(points)
    kept = {sizes[0], sizes[-1]}
    while len(kept) < len(sizes):
        errors = left_out(points, kept)
        worst = max(errors, key=lambda size: errors[size])
        if errors[worst] <= bound:
            break
        kept.add(worst)
    return {size: points[size] for size in sorted(kept)}


def left_out(points: Curve, kept: set[float]) -> dict[float, float]:
    """Return |predicted / given − 1| of the points that are not kept."""
    chosen = sorted(kept)
    curve = curve_through(sizes=chosen, seconds=[points[size] for size in chosen])
    rest = [size for size in points if size not in kept]
    return {size: abs(curve.predict(size).seconds / points[size] - 1) for size in rest}
