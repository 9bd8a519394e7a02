"""Agreement among ranks: the same value on all ranks, or the same error on all.

`MoELayer.forward` begins here, because ranks that disagree on a degree would hang in a collective.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

import torch

from moetune.comm.group import Communicator
from moetune.domain.errors import InputError, MoetuneError, RankMismatchError

T = TypeVar("T")
_HASH_BYTES = 7
OPENING_VALUES = 3
"""The number of integers in a rank's `Opening`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Message of a rank to the others at the beginning of a layer's step.

    Args:
        num_tokens: tokens of this rank.
        signature: describes what must be equal on all ranks: shapes, dtype, plan.
        problem: describes a fault of this rank's input; "" if there is none. The other ranks
            receive it, so that they do not wait for this rank in the next collective.
    """

    num_tokens: int
    signature: str
    problem: str

    @property
    def values(self) -> tuple[int, ...]:
        """The integers to exchange: tokens, the signature's hash, whether there is a problem."""
        hashed = hashlib.sha256(self.signature.encode()).digest()[:_HASH_BYTES]
        return self.num_tokens, int.from_bytes(hashed, "big"), bool(self.problem)

    def agree(self, rows: Sequence[Sequence[int]], communicator: Communicator) -> tuple[int, ...]:
        """Return every rank's number of tokens, if all ranks agree.

        Args:
            rows: the values of every rank; not read in a group of a single rank.

        Raises:
            InputError: this rank's input has a problem, in a group of one rank.
            RankMismatchError: the ranks differ, or some have a problem; the same text on all.
            CollectiveError: the exchange of the texts failed.
        """
        if communicator.num_ranks == 1:
            if self.problem:
                raise InputError(self.problem)
            return (self.num_tokens,)
        if any(row[2] for row in rows) or len({row[1] for row in rows}) > 1:
            shown = f"error: {self.problem}" if self.problem else self.signature
            texts = communicator.all_gather_object(shown, "the exchange of texts")
            raise RankMismatchError(
                f"the ranks of the layer's group disagree\n{_by_rank(texts)}",
                "give every rank the same layer, plan and dtype, and tensors of the same width",
            )
        return tuple(int(row[0]) for row in rows)


def few_values(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the host's numbers as a tensor on the device; a GPU gets them without a host sync."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    on_host = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=True)
    return on_host.to(device, non_blocking=True)


def agree(
    communicator: Communicator,
    work: Callable[[], T],
    describe: Callable[[T], Sequence[str]],
    what: str,
) -> T:
    """Return the result of `work`, if it is the same on all ranks.

    Args:
        work: runs without exchanges; raises MoetuneError. Its rank alone raises another error.
        describe: gives lines that must be equal on all ranks; the error shows the first difference.
        what: names what the ranks are about to do, for the error.

    Raises:
        MoetuneError: the work fails on all ranks.
        RankMismatchError: it fails on some, or the results differ; the same text on all.
        CollectiveError: the exchange failed.
    """
    results: list[T] = []
    problem: MoetuneError | None = None
    try:
        results.append(work())
    except MoetuneError as error:
        problem = error
    except Exception as error:
        with suppress(MoetuneError):  # the other ranks raise it, and would wait for this rank
            raise_on_all(communicator, MoetuneError(f"{type(error).__name__}: {error}"), what)
        raise
    raise_on_all(communicator, problem, what)
    (result,) = results
    rows = communicator.all_gather_object(list(describe(result)), f"the agreement on {what}")
    for lines in zip_longest(*rows, fillvalue="nothing"):
        if len(set(lines)) > 1:
            raise RankMismatchError(
                f"the ranks disagree on {what}\n{_by_rank(lines)}",
                "give every rank the same model, plan and options",
            )
    return result


def raise_on_all(communicator: Communicator, problem: MoetuneError | None, what: str) -> None:
    """Raise an error on every rank if any rank has a problem; all ranks call this.

    Args:
        what: names what cannot be done, for the error.

    Raises:
        MoetuneError: this rank's problem, if all ranks have a problem.
        RankMismatchError: some have a problem; the same text on all.
        CollectiveError: the exchange failed.
    """
    if not vote(communicator, problem is not None, f"the agreement on {what}")():
        return
    mine = ("", "") if problem is None else (problem.what, problem.hint)
    problems = communicator.all_gather_object(mine, f"the exchange of problems with {what}")
    if problem is not None and all(text for text, _ in problems):
        raise problem
    lines = _by_rank([text or "fine" for text, _ in problems])
    hint = next(hint for text, hint in problems if text)
    raise RankMismatchError(f"some ranks cannot take part in {what}\n{lines}", hint)


def _by_rank(texts: Sequence[object]) -> str:
    return "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))


def decide_on_first(communicator: Communicator, decide: Callable[[], T], name: str) -> T:
    """Call `decide` on rank 0 alone, and return its result on every rank.

    Raises:
        MoetuneError: raised by `decide`, or with the text of its other error; raised on every rank.
        CollectiveError: the exchange failed.
    """
    message: tuple[T | None, MoetuneError | None] = (None, None)
    if communicator.rank == 0:
        try:
            message = decide(), None
        except MoetuneError as error:
            message = None, error
        except Exception as error:  # noqa: BLE001 - the other ranks would wait for this rank
            failed = MoetuneError(f"{name} failed on the first rank: {error!r}")
            failed.__cause__ = error
            message = None, failed
    value, failure = communicator.broadcast_object(message, name)
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value] # None only where `decide` returned it


def largest(communicator: Communicator, values: Sequence[float], name: str) -> tuple[float, ...]:
    """Return the element-wise maximum over the ranks."""
    if communicator.num_ranks == 1:
        return tuple(values)
    mine = torch.tensor(values, dtype=torch.float64, device="cpu")
    return tuple(communicator.all_reduce_values(mine, name, op="max").tolist())


def first_text(communicator: Communicator, text: str, name: str) -> str:
    """Return the text of the first rank that has a text; "" if no rank has any."""
    return next(filter(None, communicator.all_gather_object(text, name)), "")


def vote(communicator: Communicator, wish: bool, name: str) -> Callable[[], bool]:  # noqa: FBT001 - a vote is its one value
    """Start a vote and return the function that waits for it: True if any rank wishes so."""
    ballot = torch.tensor([wish], dtype=torch.int32, device=communicator.device)
    transfer = communicator.all_reduce(ballot, name, op="max")

    def outcome() -> bool:
        transfer.wait()
        return bool(ballot.item())

    return outcome
