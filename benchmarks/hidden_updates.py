"""Gradients and parameters of replicas behind the passes, or exposed, on two ranks; as root.

    python -m benchmarks.hidden_updates            writes docs/results/hidden-updates.md
    python -m benchmarks.hidden_updates --rates 500 --rounds 3

A language model is trained by `Stages` in three ways that take turns in one process: everything at
the end of the step, gradients beside the last backward pass, and parameters of ZeRO stage 1 beside
the next forward pass, too.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.cell import Step
from benchmarks.netlab.lab import check_supported
from benchmarks.netlab.ranks import time_steps, work_and_rounds
from benchmarks.netlab.ways import seconds_by_way
from examples.language_model import staged_language_model
from moetune.domain.errors import MoetuneError
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.domain.training import FoldedLayout
from moetune.runtime.parallel.groups import ParallelGroups, join
from moetune.runtime.parallel.parameter_buffer import ParameterBuffer
from moetune.runtime.parallel.reductions import Reductions
from moetune.runtime.parallel.stages import Stages
from moetune.workflows.files import write_text
from moetune.workflows.launch import leave

_RESULT = Path(__file__).parents[1] / "docs/results/hidden-updates.md"
_RATES = (200.0, 500.0, 1000.0)
_SHAPE = Transformer(
    moe=LayerShape(d_model=256, d_hidden=512, num_experts=4, top_k=2), num_layers=8, num_heads=4,
    length=128, vocab_size=256, moe_every=2,
)  # fmt: skip
_SEQUENCES, _MICRO_BATCH = 8, 4
_STEPS = 4
"""Of each way in a row: the last one's parameters have no next forward pass to hide behind."""
_AT_END, _REDUCED, _BOTH = "all at the end", "gradients hidden", "parameters, too"
_LAYOUTS: Mapping[str, FoldedLayout] = {
    "ep 2, ZeRO-1": FoldedLayout(dp=2, ep=2, micro_batch=_MICRO_BATCH, zero=1),
    "ep 1, ZeRO-1": FoldedLayout(dp=2, ep=1, micro_batch=_MICRO_BATCH, zero=1),
    "ep 1": FoldedLayout(dp=2, ep=1, micro_batch=_MICRO_BATCH, zero=0),
}
_TIMEOUT = timedelta(minutes=3)
_SAME = 1e-4
"""Difference of losses of a first step, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One layout, by its name."""

    layout: str


def main() -> int:
    """Measure every link and write the page; with `--work`, be one rank."""
    if "--work" in sys.argv:
        _rank()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=_RATES, help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=_RESULT)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    check_supported()
    lines = [*_head(describe_machine(peer=False, load=load), given.rounds)]
    for rate in given.rates:
        for layout in _LAYOUTS:
            found = seconds_by_way(
                "benchmarks.hidden_updates",
                Work(layout=layout),
                rate_mbit=rate,
                rounds=given.rounds,
            )
            lines += _rows(rate, layout, found)
    text = "\n".join(lines) + "\n"
    print(text)
    write_text(given.output, text)
    return 0


def _rank() -> NoReturn:
    work, rounds = work_and_rounds(Work, __doc__)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    layout = _LAYOUTS[work.layout]
    ranks = join(layout, timeout=_TIMEOUT)
    ways = [_AT_END, _REDUCED, *([_BOTH] if layout.zero else [])]
    every = {way: _trained(ranks, way) for way in ways}
    losses = [float(step()) for step, _ in every.values()]
    assert max(losses) - min(losses) < _SAME, losses  # noqa: S101 - the same numbers
    arriving = {way for way, (_, stages) in every.items() if _is_arriving(stages)}
    assert arriving <= {_BOTH}, arriving  # noqa: S101 - the others have waited
    assert layout.zero == 0 or arriving, layout  # noqa: S101 - and this one has not
    steps = {way: _steps(*one) for way, one in every.items()}
    time_steps(steps, rounds=1)
    seconds = {
        way: [each / _STEPS for each in every_round]
        for way, every_round in time_steps(steps, rounds=rounds).items()
    }
    if dist.get_rank() == 0:
        print(json.dumps(seconds))
    dist.destroy_process_group()
    leave(0)


def _trained(ranks: ParallelGroups, way: str) -> tuple[Step, Stages]:
    """Return a step, which returns the loss, and what it trains."""
    stages = staged_language_model(_SHAPE, ranks, num_sequences=_SEQUENCES)
    if way == _AT_END:
        _reduce_at_end(stages)
    optimizer = stages.optimizer(lambda parts: torch.optim.AdamW(parts, lr=1e-6))
    drawn = torch.Generator().manual_seed(dist.get_rank())
    text_BS = torch.randint(_SHAPE.vocab_size, (_SEQUENCES, _SHAPE.length + 1), generator=drawn)

    def step() -> torch.Tensor:
        share = stages.backward(text_BS[:, :-1], text_BS[:, 1:])
        optimizer.step()
        if way != _BOTH:
            _wait(stages)
        return stages.total_loss(share)

    return step, stages


def _is_arriving(stages: Stages) -> bool:
    return any(getattr(one, "_arriving", None) is not None for one in stages._buffers)  # noqa: SLF001


def _reduce_at_end(stages: Stages) -> None:
    buckets = [one for one in stages._buffers if isinstance(one, ParameterBuffer)]  # noqa: SLF001 - what it did before
    stages._reductions = Reductions(  # noqa: SLF001
        stages.parts, buckets, num_micro_batches=_SEQUENCES // _MICRO_BATCH,
        late=[*stages.parts.parameters()],
    )  # fmt: skip


def _wait(stages: Stages) -> object:
    return [*stages.parts.parameters()]  # whoever reads parameters waits for them


def _steps(step: Step, stages: Stages) -> Step:
    def run() -> torch.Tensor:
        losses = [step() for _ in range(_STEPS)]
        _wait(stages)
        return losses[-1]

    return run


def _head(machine: str, rounds: int) -> Iterator[str]:
    yield "# Gradients and parameters behind the passes\n"
    yield machine + "\n"
    yield (
        "`python -m benchmarks.hidden_updates`: a language model of "
        f"{_SHAPE.num_layers} blocks, every second one with {_SHAPE.moe.num_experts} experts, "
        f"top-{_SHAPE.moe.top_k}, d_model {_SHAPE.moe.d_model}, d_hidden {_SHAPE.moe.d_hidden}, "
        f"on two ranks; {_SEQUENCES // _MICRO_BATCH} micro-batches of {_MICRO_BATCH} sequences of "
        f"{_SHAPE.length} tokens on each, float32. A step is all passes, AdamW, and the loss. The "
        f"ways take turns in one process, {_STEPS} steps each: the least and the median of "
        f"{rounds} rounds, the slower rank's. Their first losses are the same.\n"
    )
    yield "| link, Mbit/s | layout | way | least | median | saved (median) |"
    yield "|---:|---|---|---:|---:|---:|"


def _rows(rate: float, layout: str, found: Mapping[str, list[float]]) -> Iterator[str]:
    def median(way: str) -> float:
        return sorted(found[way])[len(found[way]) // 2]

    for way, seconds in found.items():
        yield (
            f"| {rate:g} | {layout} | {way} | {1e3 * min(seconds):.0f} ms "
            f"| {1e3 * median(way):.0f} ms | {1 - median(way) / median(_AT_END):.1%} |"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoetuneError as error:
        sys.exit(f"error: {error}")
