"""Attention that was not measured at some length and heads, from the nearest that was."""

import math
from collections.abc import Iterable

from moetune.fit.pool import AttentionKey


def nearest_attention(wanted: AttentionKey, known: Iterable[AttentionKey]) -> AttentionKey | None:
    """Return the known shape of that dtype and direction whose length is nearest, then its heads.

    Near is near in ratio; of two as near, the smaller.
    """
    dtype, *shape, backward = wanted
    alike = [key for key in known if (key[0], key[-1]) == (dtype, backward)]

    def distance(key: AttentionKey) -> tuple[float, ...]:
        _, *there, _ = key
        return (*(abs(math.log(a / b)) for a, b in zip(there, shape, strict=True)), *there)

    return min(alike, key=distance, default=None)


def work_ratio(wanted: AttentionKey, known: AttentionKey) -> float:
    """Return how many sequences of the known shape are as much work as one of the wanted.

    Work is length² · heads · head_dim, of both products.
    """
    _, length, heads, width, _ = wanted
    _, length_there, heads_there, width_there, _ = known
    return (length / length_there) ** 2 * heads * width / (heads_there * width_there)
