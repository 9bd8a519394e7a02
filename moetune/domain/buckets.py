"""Buckets of a model's parameters, whose gradients are reduced and values gathered at once."""

from collections.abc import Sequence

LEAST_BUCKET_BYTES = 2**20
"""Of the parameters of a bucket: below it a collective's start takes longer than its bytes.
torch's DDP begins with as many."""


def bucket_ends(sizes: Sequence[float]) -> list[int]:
    """Return behind how many units each bucket ends, in the order of the forward pass.

    A bucket has `LEAST_BUCKET_BYTES` or more, and the last one what is left.

    Args:
        sizes: bytes of the parameters of a model's units, such as blocks.
    """
    ends, size = list[int](), 0.0
    for number, one in enumerate(sizes, start=1):
        size += one
        if size >= LEAST_BUCKET_BYTES or (size and number == len(sizes)):
            ends.append(number)
            size = 0.0
    return ends
