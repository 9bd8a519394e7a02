"""A launcher's word on how many ranks it started."""

import os

import torch.distributed as dist

from moetune.domain.errors import InputError


def check_joined(what: str) -> None:
    """Check that this process is alone, or in torch.distributed's world.

    Args:
        what: would silently run on one rank alone; the subject of the error.

    Raises:
        InputError: a launcher started several ranks, and there is no process group yet.
    """
    num_ranks = os.environ.get("WORLD_SIZE", "1")  # noqa: TID251 - the launcher's, as torch reads it
    if num_ranks == "1" or (dist.is_available() and dist.is_initialized()):
        return
    raise InputError(
        f"{what} would run alone in each of {num_ranks} processes (WORLD_SIZE): there is no "
        "process group yet",
        "call torch.distributed.init_process_group() before",
    )
