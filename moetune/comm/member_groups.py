"""Process groups that their members make alone, under one name on every member.

torch names such a group by its ranks and by how many groups the calling rank is in. Members that
are in different numbers of groups, as those of a first and a last stage may be, would each wait for
a group of another name, for ever.
"""

import datetime as dt
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from moetune.domain.errors import CollectiveError


def group_of_members(
    ranks: Sequence[int],
    *,
    description: str,
    backend: str | None = None,
    timeout: dt.timedelta | None = None,
    options: Any = None,  # noqa: ANN401 - of the backend
) -> dist.ProcessGroup:
    """Make a group that no other rank takes part in. All its ranks call this together.

    Args:
        ranks: in the world, this one among them.
        description, backend, timeout, options: as of `torch.distributed.new_group`.

    Raises:
        CollectiveError: a rank of the group did not come within the timeout.
    """
    _even_out(ranks, description, timeout)
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True,
        group_desc=description, pg_options=options,
    )  # fmt: skip
    return group


def _even_out(ranks: Sequence[int], description: str, timeout: dt.timedelta | None) -> None:
    """Bring all members into as many groups: those in fewer make groups of themselves."""
    own = len(distributed_c10d._world.pg_names)  # noqa: SLF001 - what torch makes the name of
    most = max(_told_by_all(ranks, own, description, timeout))
    me = dist.get_rank()
    for _ in range(most - own):
        dist.new_group(
            [me], backend="gloo", use_local_synchronization=True,
            group_desc="moetune: evens out names of groups",
        )  # fmt: skip


def _told_by_all(
    ranks: Sequence[int], number: int, description: str, timeout: dt.timedelta | None
) -> list[int]:
    """Return the number of each member, given this one's."""
    store = distributed_c10d._get_default_store()  # noqa: SLF001 - no group has just these members
    me, prefix = dist.get_rank(), "moetune/groups/" + "_".join(map(str, ranks))
    turn = store.add(f"{prefix}/turn of {me}", 1)
    keys = [f"{prefix}/{turn}/{rank}" for rank in ranks]
    store.set(keys[list(ranks).index(me)], str(number))
    try:
        store.wait(keys, *([] if timeout is None else [timeout]))
    except RuntimeError as error:  # a file store has no class of its own
        raise CollectiveError(
            f"rank {me} waits for ranks {', '.join(map(str, ranks))} to make a group with it, and "
            f"not all came ({description}): {error}"
        ) from error
    return [int(store.get(key)) for key in keys]
