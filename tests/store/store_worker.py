"""A process that uses the store, for the tests of several at once.

It says "ready" when everything is imported, and starts at the first line on its input.
"""

import sys
import time
from collections.abc import Callable
from itertools import count

from moetune.domain.cluster import Cluster, Fingerprint, Machine
from moetune.domain.samples import CopyPoint, Sample
from moetune.store import open_store


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def batch(tag: int, number: int, size: int) -> list[Sample]:
    return [
        Sample(
            point=CopyPoint(direction="h2d", pinned=True, num_bytes=number),
            seconds=(1.0,),
            marks=(str(tag), str(part)),
        )
        for part in range(size)
    ]


def write(url: str, run_id: int, tag: int, number_of_batches: int, size: int) -> None:
    """Append batches and say each when it is acknowledged; without end for 0."""
    with open_store(url) as store:
        for number in range(number_of_batches) if number_of_batches else count():
            store.add_samples(run_id, batch(tag, number, size))
            say(number)


def start(url: str) -> None:
    """Open a database that may be new or old, and start a run in it."""
    cluster = Cluster(
        machine=Machine(
            kind="cpu", device="cpu", num_devices=1, devices_per_node=1, memory_bytes=1
        ),
        fingerprint=Fingerprint(),
    )
    with open_store(url, upgrades=True) as store:
        say(store.start_run(name="race", cluster=cluster, preset="quick"))


def read(url: str, run_id: int, wanted: int) -> None:
    """Read until all samples are there; they may only grow."""
    with open_store(url, read_only=True) as store:
        seen = 0
        while seen < wanted:
            now = next(run.num_samples for run in store.runs() if run.id == run_id)
            if now < seen:
                raise SystemExit(f"{seen} samples became {now}")
            seen = now
            time.sleep(0.02)  # leave the cores to the writers
    say(seen)


def main() -> None:
    task, url, *numbers = sys.argv[1:]
    say("ready")
    sys.stdin.readline()
    tasks: dict[str, Callable[..., None]] = {"write": write, "start": start, "read": read}
    tasks[task](url, *map(int, numbers))


if __name__ == "__main__":
    main()
