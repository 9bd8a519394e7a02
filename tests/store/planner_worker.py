"""A process that answers questions from several threads, for the tests that kill it.

It says each plan's id when the plan and its observations are acknowledged.
"""

import sys
import threading
from itertools import count

from moetune.config import Settings
from moetune.domain.records import Observation
from moetune.workflows.open_planner import ServicePlanner, open_planner

NUM_THREADS = 4
NUM_OBSERVATIONS = 3


def work(planner: ServicePlanner, thread: int, say: threading.Lock) -> None:
    for number in count(1):
        plan = planner.resolve(
            {
                "model": "tm-1",
                "profile": "rtx2080ti-x64",
                "tokens_per_rank": number * NUM_THREADS + thread,
                "constraints": {"max-degree": "1"},
            }
        )
        observation = Observation(
            plan_id=plan.id, forward_degree=1, backward_degree=1, tokens_per_rank=number,
            predicted_seconds=1.0, seconds=(1.0,), source="training",
        )  # fmt: skip
        planner.store.add_observations([observation] * NUM_OBSERVATIONS)
        with say:
            sys.stdout.write(f"{plan.id}\n")
            sys.stdout.flush()


def main() -> None:
    say = threading.Lock()
    with open_planner(Settings(db=sys.argv[1])) as planner:
        threads = [
            threading.Thread(target=work, args=(planner, thread, say))
            for thread in range(NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
