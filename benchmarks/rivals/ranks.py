"""The program of one rank: train every variant it is given, all in turns.

Variants are those of `models.Ours`, and the names in `_RIVALS`. Each round runs all in another
order; the step before the first round is not timed. Rank 0 prints one JSON line; a step's time is
the maximum over the ranks, a loss their mean, a peak the largest resident memory of both processes.
"""

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.netlab.ranks import time_steps, work_and_rounds
from benchmarks.rivals.case import Case
from benchmarks.rivals.models import (
    Ours,
    Step,
    ddp_step,
    fsdp2_step,
    transformers_ddp_step,
    transformers_fsdp_step,
)
from benchmarks.rivals.peers import deepspeed_step, tutel_step
from moetune.workflows.launch import leave

_TIMEOUT = timedelta(minutes=5)
_KIB = 1024
_RIVALS: Mapping[str, Callable[[Path], Step]] = {
    "transformers": transformers_fsdp_step,
    "transformers-ddp": transformers_ddp_step,
    "deepspeed": deepspeed_step,
    "tutel": tutel_step,
    "fsdp2": fsdp2_step,
    "ddp": ddp_step,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is trained, and how.

    Args:
        folder: of the initial weights.
    """

    case: Case
    folder: str
    variants: tuple[str, ...]


def main() -> None:
    """Measure what the arguments ask for."""
    work, rounds = work_and_rounds(Work, __doc__)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed talks on stdout
        line = _measure(work, rounds)
    if dist.get_rank() == 0:
        print(json.dumps(line))
    dist.barrier()
    leave(0)


def _measure(work: Work, rounds: int) -> dict[str, Any]:
    losses: dict[str, list[torch.Tensor]] = {}
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    made: dict[str, Ours] = {}
    for variant in work.variants:
        print(variant, file=sys.stderr, flush=True)
        start = time.perf_counter()
        losses[variant] = []
        step = _step(variant, Path(work.folder), made)
        steps[variant] = partial(_next_step, work.case, step, losses[variant])
        steps[variant]()
        print(f"  {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    seconds = time_steps(steps, rounds=rounds)
    return {
        "seconds": seconds,
        "losses": {name: _mean(found) for name, found in losses.items()},
        "peak_bytes": _peak_bytes(),
    }


def _step(variant: str, folder: Path, made: dict[str, Ours]) -> Step:
    if variant in _RIVALS:
        return _RIVALS[variant](folder)
    if not made:
        made["ours"] = Ours(folder)
    return made["ours"].step(variant)


def _next_step(case: Case, step: Step, losses: list[torch.Tensor]) -> torch.Tensor:
    """Train on the batch once more."""
    loss = step(case.batch(dist.get_rank()))
    losses.append(loss.double())
    return loss


def _mean(losses: list[torch.Tensor]) -> list[float]:
    total = torch.stack(losses)
    dist.all_reduce(total)
    found: list[float] = (total / dist.get_world_size()).tolist()
    return found


def _peak_bytes() -> int:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    peak = torch.tensor(own)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)


if __name__ == "__main__":
    main()
