"""What ranks must agree on before a step, and the one error they all raise if they do not."""

import hashlib

import torch

from moetune.domain.errors import InputError, RankMismatchError
from moetune.runtime.links import Link

_HASH_BYTES = 7


def agree_on_tokens(
    link: Link, *, num_tokens: int, signature: str, problem: str, device: torch.device
) -> tuple[int, ...]:
    """Return every rank's tokens, once all ranks have shown the same signature.

    Args:
        signature: what must be equal on all ranks: shapes, dtype, plan.
        problem: what is wrong with this rank's input, empty when nothing is; it travels, so
            that no other rank waits for this one.

    Raises:
        InputError: one rank alone has a problem with its input.
        RankMismatchError: the ranks differ, or one has a problem; the same text on all.
        CollectiveError: the exchange failed.
    """
    if link.num_ranks == 1:
        if problem:
            raise InputError(problem)
        return (num_tokens,)
    hashed = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:_HASH_BYTES], "big")
    mine = torch.tensor([num_tokens, hashed, bool(problem)], dtype=torch.int64, device=device)
    rows = link.gather(mine, "the agreement on tokens").tolist()
    if any(row[2] for row in rows) or len({row[1] for row in rows}) > 1:
        texts = link.gather_texts(f"error: {problem}" if problem else signature)
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        raise RankMismatchError(
            f"the ranks of the layer's group disagree\n{lines}",
            "give every rank the same layer, plan and dtype, and tensors of the same width",
        )
    return tuple(int(row[0]) for row in rows)
