"""Work that all ranks do, or none: errors of one rank that reach the others."""

from collections.abc import Callable
from typing import TypeVar

from moetune.comm.group import Communicator
from moetune.domain.errors import InputError, RankMismatchError

_T = TypeVar("_T")


def do_together(
    communicator: Communicator, work: Callable[[], _T], describe: Callable[[_T], str]
) -> _T:
    """Return what each rank's own work gives, if it gives what the others' does.

    Args:
        work: without exchanges; raises InputError.
        describe: what must be equal on all ranks.

    Raises:
        InputError: it fails on all ranks.
        RankMismatchError: it fails on some, or the results differ; the same text on all.
        CollectiveError: the exchange failed.
    """
    found: list[_T] = []
    problem = None
    try:
        found.append(work())
    except InputError as error:
        problem = error
    mine = "" if problem is None else problem.what, "".join(map(describe, found))
    told = communicator.all_gather_object(mine, "the comparison of models")
    if problem is not None and all(what for what, _ in told):
        raise problem
    if problem is not None or len(set(told)) > 1:
        texts = (f"error: {what}" if what else text for what, text in told)
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        raise RankMismatchError(
            f"the ranks cannot adapt one model\n{lines}",
            "give every rank the same model, plan and checkpoint",
        )
    return found[0]
