"""The program of one rank: time a variant's training steps.

Rank 0 prints one JSON line; a step's time is the maximum over the ranks.
"""

import contextlib
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.chunks.oracle import fewest_gathers
from benchmarks.chunks.variants import make_model, make_step, traffic
from benchmarks.netlab.ranks import work_and_rounds
from examples.language_model import LanguageModel
from moetune import InputError, model_chunks
from moetune.domain.model import Transformer
from moetune.workflows.launch import leave

_TIMEOUT = timedelta(minutes=5)
_WARM_UP_ROUNDS = 3
_SEED = 1
_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is trained, and how.

    Args:
        sequences: of one step on each rank.
        chunk_bytes, places: of our variants with a small cache.
        scatter, offload, recompute: of the planned variant.
    """

    transformer: Transformer
    sequences: int
    variant: str
    chunk_bytes: int
    places: int
    scatter: bool = True
    offload: bool = False
    recompute: bool = False


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
    model = make_model(work.transformer, recompute=work.recompute)
    step = make_step(
        work.variant, model, chunk_bytes=work.chunk_bytes, places=work.places,
        scatter=work.scatter, offload=work.offload,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(_SEED + dist.get_rank())
    seconds, losses = [], []
    before = None
    for _ in range(_WARM_UP_ROUNDS + rounds):
        text = torch.randint(
            work.transformer.vocab_size,
            (work.sequences, work.transformer.length + 1),
            generator=generator,
        )
        before = traffic(model)
        dist.barrier()
        start = time.perf_counter()
        loss = step(text)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.double())
    told = torch.tensor(seconds[_WARM_UP_ROUNDS:], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    total = torch.stack(losses)
    dist.all_reduce(total)
    return {
        "seconds": told.tolist(),
        "losses": (total / dist.get_world_size()).tolist(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB,
        **_moved(model, before),
    }


def _moved(model: LanguageModel, before: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return what the last step moved, and the fewest gathers that its order needs."""
    try:
        chunks = model_chunks(model)
    except InputError:
        return {}
    after = traffic(model)
    assert after is not None  # noqa: S101 - it is sharded
    return {
        "moved": asdict(after - before),
        "fewest_gathers": fewest_gathers(chunks.order, chunks.cache_capacity),
        "peak_device_bytes": chunks.peak_device_bytes,
        "num_chunks": len(chunks.chunks),
    }


if __name__ == "__main__":
    main()
