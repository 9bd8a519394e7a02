"""A model with a hot expert on two ranks: in its order, placed once, and with replicas; as root.

    python -m benchmarks.hot_models            4 minutes; writes docs/results/hot-models.md
    python -m benchmarks.hot_models --rates 500 --rounds 3

Most tokens of every layer choose the first expert. The ranks record their
routing, place the experts by it as a plan does, and train the same model in all three ways, which
take turns in one process.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import moetune
from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.cell import Step
from benchmarks.netlab.lab import check_supported
from benchmarks.netlab.ranks import time_steps, work_and_rounds
from benchmarks.netlab.ways import seconds_by_way
from moetune.domain.errors import MoetuneError
from moetune.domain.recorded_layers import RecordedLayer, RecordedLayers
from moetune.domain.routing import ExpertLoads
from moetune.domain.training import FoldedLayout
from moetune.runtime.parallel.chain import find_blocks
from moetune.runtime.parallel.groups import join
from moetune.runtime.parallel.parallel_model import ParallelModel, parallel_model
from moetune.solve.joint.placed_layers import PlacedLayers
from moetune.solve.joint.replicated_layers import ReplicatedLayers
from moetune.workflows.files import write_text
from moetune.workflows.launch import leave

_RESULT = Path(__file__).parents[1] / "docs/results/hot-models.md"
_RATES = (500.0, 1000.0)
_VOCABULARY, _WIDTH, _HIDDEN, _EXPERTS, _BLOCKS = 512, 256, 2048, 8, 4
_SEQUENCES, _LENGTH, _MICRO_BATCHES = 4, 512, 4
_WAYS = ("in their order", "placed once", "with replicas")
_PULL = 1.0
_SAME = 1e-4
"""Difference of losses of a first step, in float32."""


class Block(nn.Module):
    """A mixer and experts, of which most tokens choose the first one."""

    def __init__(self, pull: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.mix = nn.Linear(_WIDTH, _WIDTH)
        self.moe = moetune.MoELayer(
            _WIDTH, _HIDDEN, _EXPERTS, 1, communicator=moetune.OneRank(), pipeline=False
        )
        nn.init.ones_(self.norm2.bias)
        nn.init.normal_(self.moe.gate.weight, std=0.02)
        nn.init.constant_(self.moe.gate.weight[0], pull / _WIDTH)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D)."""
        x_BSD = x_BSD + 0.1 * self.mix(self.norm1(x_BSD)).cumsum(1)
        y_BSD: torch.Tensor = x_BSD + self.moe(self.norm2(x_BSD))
        return y_BSD


class Decoder(nn.Module):
    """Next-token model."""

    def __init__(self, pull: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(Block(pull) for _ in range(_BLOCKS))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, S, V) of the next tokens."""
        x = self.tokens(tokens_BS)
        for block in self.blocks:
            x = block(x)
        logits_BSV: torch.Tensor = self.head(x)
        return logits_BSV


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The mean of the first expert's logit; those of the others spread by 0.45 around 0."""

    pull: float


def main() -> int:
    """Measure every link and write the page; with `--work`, be one rank."""
    if "--work" in sys.argv:
        _rank()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=_RATES, help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=_RESULT)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    check_supported()
    lines = [*_head(describe_machine(peer=False, load=load), given.rounds)]
    for rate in given.rates:
        found = seconds_by_way(
            "benchmarks.hot_models", Work(pull=_PULL), rate_mbit=rate, rounds=given.rounds
        )
        lines += _rows(rate, found)
    text = "\n".join(lines) + "\n"
    print(text)
    write_text(given.output, text)
    return 0


def _rank() -> NoReturn:
    work, rounds = work_and_rounds(Work, __doc__)
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    natural = _trained(work, ())
    losses = [float(_step(natural)())]
    layers = _recorded(natural)
    replicated = ReplicatedLayers.of_placed(PlacedLayers.of(layers))
    every = {"in their order": natural}
    for way, found in (("placed once", replicated.once), ("with replicas", replicated)):
        every[way] = _trained(work, [one.experts for one in found.placements(2)])
        losses.append(float(_step(every[way])()))
    assert max(losses) - min(losses) < _SAME, losses  # noqa: S101 - the same numbers
    steps = {way: _step(one) for way, one in every.items()}
    time_steps(steps, rounds=1)
    seconds = {way: [*every_round] for way, every_round in time_steps(steps, rounds=rounds).items()}
    skews = {
        "in their order": fmean(one.natural_skew for one in replicated.placements(2)),
        "placed once": fmean(one.skew for one in replicated.once.placements(2)),
        "with replicas": fmean(one.skew for one in replicated.placements(2)),
    }
    if dist.get_rank() == 0:
        print(json.dumps(seconds | {f"rows {way}": [skew] for way, skew in skews.items()}))
    dist.destroy_process_group()
    leave(0)


def _trained(work: Work, placements: Sequence[Sequence[int]]) -> ParallelModel:
    torch.manual_seed(0)
    model = Decoder(work.pull)
    layout = FoldedLayout(dp=2, ep=2, micro_batch=_SEQUENCES // _MICRO_BATCHES, zero=1)
    return parallel_model(
        model, join(layout, device_type="cpu"), loss_of=_loss_of, num_sequences=_SEQUENCES,
        length=_LENGTH, blocks=find_blocks(model, None), placements=placements,
    )  # fmt: skip


def _loss_of(logits_BSV: torch.Tensor, wanted_BS: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits_BSV.flatten(0, 1), wanted_BS.flatten())


def _step(trained: ParallelModel) -> Step:
    """Return a whole step, which returns the loss: both passes, clipping and AdamW."""
    optimizer = trained.optimizer(lambda parts: torch.optim.AdamW(parts, lr=1e-6))
    drawn = torch.Generator().manual_seed(dist.get_rank())
    text_BS = torch.randint(_VOCABULARY, (_SEQUENCES, _LENGTH + 1), generator=drawn)

    def step() -> torch.Tensor:
        share = trained.backward(text_BS[:, :-1], text_BS[:, 1:])
        trained.clip_grad_norm_(1.0)
        optimizer.step()
        return trained.total_loss(share)

    return step


def _recorded(trained: ParallelModel) -> RecordedLayers:
    record = moetune.routing_record(trained)
    return RecordedLayers(
        name="recorded",
        layers=tuple(
            RecordedLayer(
                loads=ExpertLoads(name="recorded", loads=tuple(map(float, one.loads))),
                spread=1.0, top_k=one.top_k,
            )
            for one in record.layers
        ),
    )  # fmt: skip


def _head(machine: str, rounds: int) -> Iterator[str]:
    yield "# A model with a hot expert\n"
    yield machine + "\n"
    yield (
        f"`python -m benchmarks.hot_models`: a model of {_BLOCKS} blocks on two ranks that share "
        f"the experts: d_model {_WIDTH}, d_hidden {_HIDDEN}, {_EXPERTS} experts, top-1, of "
        f"which most tokens choose the first one; {_MICRO_BATCHES} micro-batches of {_LENGTH} "
        "tokens a rank, float32, ZeRO-1. A step is all passes, clipping, AdamW, and the loss. All "
        f"three take turns in one process: the least and the median of {rounds} rounds, the slower "
        "rank's. Their first losses are the same.\n"
    )
    yield (
        "| link, Mbit/s | experts | rows of the fullest rank over the mean | least | median "
        "| saved (least) |"
    )
    yield "|---:|---|---:|---:|---:|---:|"


def _rows(rate: float, found: Mapping[str, list[float]]) -> Iterator[str]:
    first = min(found[_WAYS[0]])
    for way in _WAYS:
        seconds = sorted(found[way])
        least, median = seconds[0], seconds[len(seconds) // 2]
        yield (
            f"| {rate:g} | {way} | {found[f'rows {way}'][0]:.2f} | {1e3 * least:.0f} ms "
            f"| {1e3 * median:.0f} ms | {1 - least / first:.1%} |"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoetuneError as error:
        sys.exit(f"error: {error}")
