"""The program of one rank of a job whose link changes: a layer trains with a plan and its alarm.

Rank 0 touches a file at the step from which the link is another one, and prints one JSON line: the
log's warnings, each with the step that it was written at, and the seconds of every step.
"""

import argparse
import json
import logging
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.netlab.cell import Cell, Step, module_step
from moetune import MoELayer
from moetune.runtime.plans.shared import read_plans
from moetune.workflows.launch import leave


def main() -> None:
    """Train for as many steps as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--change-at", type=int, required=True)
    parser.add_argument("--touch", type=Path, required=True)
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    warnings = Warnings()
    logging.getLogger("moetune").addHandler(warnings)
    seconds = []
    step = _step(given.plan)
    for number in range(1, given.steps + 1):
        warnings.step = number
        if number == given.change_at:
            _change(given.touch)
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps({"warnings": warnings.seen, "seconds": seconds}))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


class Warnings(logging.Handler):
    """Keeps the warnings of the log with the step at which each was written."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.step = 0
        self.seen: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning."""
        self.seen.append((self.step, record.getMessage()))


def _step(path: Path) -> Step:
    (plan,) = read_plans([path])
    shape = plan.workload.layer
    cell = Cell(layer=shape, tokens=plan.tokens_per_rank)
    layer = MoELayer(
        d_model=shape.d_model, d_hidden=shape.d_hidden, num_experts=shape.num_experts,
        top_k=shape.top_k, activation=shape.activation, plan=plan,
    )  # fmt: skip
    layer.load_state_dict(cell.all_weights())
    return module_step(cell, layer)


def _change(touch: Path) -> None:
    """Ask for the other link, and wait until it is there."""
    if dist.get_rank() == 0:
        touch.touch()
        while touch.exists():
            time.sleep(0.01)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
