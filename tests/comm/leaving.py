"""A program that forks two ranks per ending, which end like scripts, and prints how they ended.

Just before it ends, the last collective of a rank leaves a tensor to gloo's thread whose freeing
takes a while: in a loaded machine that happens by itself, here it is certain.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from moetune.comm.process_group import exit_cleanly

NUM_RANKS = 2
FREEING_SECONDS = 0.15
PATIENCE_SECONDS = 30.0
HELD: list[dist.ProcessGroup] = []
"""Whoever refers to a group, as DistributedDataParallel does, keeps its threads."""


class SlowToFree:
    """Computes in Python while a thread frees it, from the end of the script on."""

    def __init__(self) -> None:
        self.is_being_freed = False
        self._script_ended = threading.Event()

    def attach(self, tensor: torch.Tensor) -> None:
        tensor.freed = _Freed(self)  # type: ignore[attr-defined]  # any attribute will do

    def compute(self) -> None:
        self.is_being_freed = True
        self._script_ended.wait(PATIENCE_SECONDS)
        # By its own time: a loaded machine gives the script's end no less of it.
        end = time.thread_time() + FREEING_SECONDS
        while time.thread_time() < end:
            pass

    def script_ends(self) -> None:
        self._script_ended.set()


class _Freed:
    def __init__(self, slow: SlowToFree) -> None:
        self._slow = slow

    def __del__(self) -> None:
        self._slow.compute()


def leave_a_tensor_to_gloo(store: Store, then: Callable[[], None] = lambda: None) -> None:
    """Let each rank in turn drop a tensor before the other joins the collective."""
    slow = SlowToFree()
    # A group each: gloo frees tensors under the lock that its next collective takes.
    groups = [dist.new_group() for _ in range(NUM_RANKS)]
    for rank, group in enumerate(groups):
        if rank == dist.get_rank():
            tensor = torch.ones(1)
            slow.attach(tensor)
            dist.all_reduce(tensor, group=group, async_op=True)
            del tensor
            store.set(f"dropped by {rank}", "")
        else:
            store.wait([f"dropped by {rank}"])
            dist.all_reduce(torch.ones(1), group=group)
    while not slow.is_being_freed:
        time.sleep(0.001)
    HELD.extend(groups)
    then()
    slow.script_ends()


def plainly(store: Store) -> None:
    leave_a_tensor_to_gloo(store)


def with_status_3(store: Store) -> None:
    leave_a_tensor_to_gloo(store)
    sys.exit(3)


def with_an_exception(store: Store) -> None:
    leave_a_tensor_to_gloo(store)
    raise ValueError("of the script's own")


def with_the_group_destroyed(store: Store) -> None:
    leave_a_tensor_to_gloo(store, then=dist.destroy_process_group)


ENDINGS: dict[str, Callable[[Store], None]] = {
    ending.__name__: ending
    for ending in (plainly, with_status_3, with_an_exception, with_the_group_destroyed)
}


def be_rank(ending: str, rank: int, folder: Path) -> None:
    output = os.open(folder / f"{ending}-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    atexit.register(print, "an earlier handler")
    store = FileStore(str(folder / ending), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    exit_cleanly()
    ENDINGS[ending](store)
    print("ended", end="")  # noqa: T201 - a script's own output, still in its buffer


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    endings: dict[str, list[tuple[int, str]]] = {}
    for ending in ENDINGS:
        processes = []
        for rank in range(NUM_RANKS):
            process = os.fork()
            if process == 0:
                be_rank(ending, rank, folder)
                return
            processes.append(process)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes]
        outputs = [(folder / f"{ending}-{rank}").read_text() for rank in range(NUM_RANKS)]
        endings[ending] = list(zip(statuses, outputs, strict=True))
    json.dump(endings, sys.stdout)


if __name__ == "__main__":
    main()
