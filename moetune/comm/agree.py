"""Agreement among ranks: a value that is equal on all of them, or the same error on all.

`MoELayer.forward` begins here, because ranks that disagree on a degree would hang in a collective.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from moetune.comm.group import Communicator
from moetune.domain.errors import InputError, MoetuneError, RankMismatchError

T = TypeVar("T")
_HASH_BYTES = 7


def agree_on_tokens(
    communicator: Communicator,
    *,
    num_tokens: int,
    signature: str,
    problem: str,
    device: torch.device,
    note: int = 0,
) -> tuple[tuple[int, ...], int]:
    """Return every rank's number of tokens, and the first rank's note, once all ranks agree.

    Args:
        signature: describes what must be equal on all ranks: shapes, dtype, plan.
        problem: describes a fault of this rank's input, empty without one. The other ranks get
            it, and so do not wait for this one in the next collective.
        note: what the first rank has to tell the others with this call.

    Raises:
        InputError: the input has a problem, in a group of one rank.
        RankMismatchError: the ranks differ, or one has a problem; the same text on all.
        CollectiveError: the exchange failed.
    """
    if communicator.num_ranks == 1:
        if problem:
            raise InputError(problem)
        return (num_tokens,), note
    hashed = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:_HASH_BYTES], "big")
    mine = torch.tensor([num_tokens, hashed, bool(problem), note], dtype=torch.int64, device=device)
    rows = communicator.all_gather_values(mine, "the agreement on tokens").tolist()
    if any(row[2] for row in rows) or len({row[1] for row in rows}) > 1:
        shown = f"error: {problem}" if problem else signature
        texts = communicator.all_gather_object(shown, "the exchange of texts")
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        raise RankMismatchError(
            f"the ranks of the layer's group disagree\n{lines}",
            "give every rank the same layer, plan and dtype, and tensors of the same width",
        )
    return tuple(int(row[0]) for row in rows), int(rows[0][3])


def agree_on_digest(communicator: Communicator, digest: str, what: str) -> None:
    """Check that all ranks have the same digest.

    Args:
        what: has that digest; a plural, for the error.

    Raises:
        RankMismatchError: they differ; the same text on all ranks.
        CollectiveError: the exchange failed.
    """
    digests = communicator.all_gather_object(digest, f"the comparison of {what}")
    if len(set(digests)) > 1:
        raise RankMismatchError(f"{what} differ between ranks: {', '.join(digests)}")


def decide_on_first(communicator: Communicator, decide: Callable[[], T], name: str) -> T:
    """Return on every rank what `decide`, called on rank 0 alone, returns there.

    Raises:
        MoetuneError: what `decide` raised, on every rank.
        CollectiveError: the exchange failed.
    """
    message: tuple[T | None, MoetuneError | None] = (None, None)
    if communicator.rank == 0:
        try:
            message = decide(), None
        except MoetuneError as error:
            message = None, error
    value, failure = communicator.broadcast_object(message, name)
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value] # None only where `decide` returned it


def largest(communicator: Communicator, values: Sequence[float], name: str) -> tuple[float, ...]:
    """Return the element-wise maximum over the ranks."""
    if communicator.num_ranks == 1:
        return tuple(values)
    mine = torch.tensor(values, dtype=torch.float64)
    return tuple(communicator.all_reduce_values(mine, name, op="max").tolist())


def first_text(communicator: Communicator, text: str, name: str) -> str:
    """Return the text of the first rank that has one, empty where none has."""
    return next(filter(None, communicator.all_gather_object(text, name)), "")


def vote(communicator: Communicator, wish: bool, name: str) -> Callable[[], bool]:  # noqa: FBT001 - a vote is its one value
    """Start a vote and return the function that waits for it: True if any rank wishes so."""
    ballot = torch.tensor([wish], dtype=torch.int32, device=communicator.device)
    transfer = communicator.all_reduce(ballot, name, op="max")

    def outcome() -> bool:
        transfer.wait()
        return bool(ballot.item())

    return outcome
