"""A layer with a shared expert on links of a set rate: behind its exchanges or after them; as root.

    python -m benchmarks.shared_experts        5 minutes; writes docs/results/shared-experts.md
    python -m benchmarks.shared_experts --rates 500 --rounds 3

The layer alone, with the shared expert after it, and with the shared expert beside its exchanges
take turns in one process, in one chunk and in several. The least of some rounds is what a machine
that others use, too, disturbs least.
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
from torch import nn
from torch.nn import functional

from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.cell import Step
from benchmarks.netlab.lab import check_supported
from benchmarks.netlab.ranks import time_steps, work_and_rounds
from benchmarks.netlab.ways import seconds_by_way
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Decision
from moetune.runtime.moe.layer import MoELayer
from moetune.workflows.files import write_text
from moetune.workflows.launch import leave

_RESULT = Path(__file__).parents[1] / "docs/results/shared-experts.md"
_LAYER = LayerShape(d_model=512, d_hidden=1024, num_experts=8, top_k=2)
_TOKENS = 1024
_RATES = (200.0, 500.0, 1000.0)
_WAYS = ("alone", "after", "beside")


class Shared(nn.Module):
    """A shared expert of three matrices, as DeepSeek's."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(d_model, d_hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(d_hidden, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what it adds to the routed experts' outputs."""
        y: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The width of the shared expert, and the chunks."""

    d_shared: int
    degrees: tuple[int, ...]


def main() -> int:
    """Measure every link and write the page; with `--work`, be one rank."""
    if "--work" in sys.argv:
        _rank()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=_RATES, help="Mbit/s")
    parser.add_argument("--widths", type=int, nargs="+", default=(512, 2048))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=_RESULT)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    check_supported()
    lines = [*_head(describe_machine(peer=False, load=load), given.rounds)]
    for rate in given.rates:
        for width in given.widths:
            work = Work(d_shared=width, degrees=(1, 4))
            found = seconds_by_way(
                "benchmarks.shared_experts", work, rate_mbit=rate, rounds=given.rounds
            )
            lines += _rows(rate, width, found)
    text = "\n".join(lines) + "\n"
    print(text)
    write_text(given.output, text)
    return 0


def _rank() -> NoReturn:
    work, rounds = work_and_rounds(Work, __doc__)
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    steps = {
        f"{way} {degree}": _step(way, degree, work) for way in _WAYS for degree in work.degrees
    }
    for degree in work.degrees:
        after, beside = (steps[f"{way} {degree}"]() for way in ("after", "beside"))
        torch.testing.assert_close(beside, after)
    time_steps(steps, rounds=2)
    seconds = time_steps(steps, rounds=rounds)
    if dist.get_rank() == 0:
        print(json.dumps(seconds))
    dist.destroy_process_group()
    leave(0)


def _step(way: str, degree: int, work: Work) -> Step:
    """Return a forward and a backward pass, which returns the gradient of the input."""
    torch.manual_seed(1)
    shared = Shared(_LAYER.d_model, work.d_shared)
    layer = MoELayer(
        _LAYER.d_model, _LAYER.d_hidden, _LAYER.num_experts, _LAYER.top_k,
        shared_experts=shared if way == "beside" else None,
    )  # fmt: skip
    layer.pin(Decision(forward_degree=degree, backward_degree=degree))
    tokens = torch.randn(_TOKENS, _LAYER.d_model)

    def step() -> torch.Tensor:
        layer.zero_grad()
        shared.zero_grad()
        x = tokens.clone().requires_grad_()
        y = layer(x)
        if way == "after":
            y = y + shared(x)
        y.sum().backward()
        assert x.grad is not None  # noqa: S101 - asked for
        return x.grad

    return step


def _head(machine: str, rounds: int) -> Iterator[str]:
    yield "# A shared expert beside the exchanges\n"
    yield machine + "\n"
    yield (
        f"One layer on two ranks: d_model {_LAYER.d_model}, d_hidden {_LAYER.d_hidden}, "
        f"{_LAYER.num_experts} experts, top-{_LAYER.top_k}, {_TOKENS} tokens a rank, float32, and "
        "a shared expert of three matrices; forward and backward pass. All take turns in one "
        f"process: the least of {rounds} rounds, the slower rank's.\n"
    )
    yield (
        "| link, Mbit/s | width of the shared expert | chunks | without it | after | beside "
        "| saved | of its own time hidden |"
    )
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|"


def _rows(rate: float, width: int, seconds: Mapping[str, list[float]]) -> Iterator[str]:
    for degree in sorted({int(name.split()[1]) for name in seconds}):
        alone, after, beside = (min(seconds[f"{way} {degree}"]) for way in _WAYS)
        yield (
            f"| {rate:g} | {width} | {degree} | {1e3 * alone:.0f} ms | {1e3 * after:.0f} ms "
            f"| {1e3 * beside:.0f} ms | {1 - beside / after:.1%} "
            f"| {(after - beside) / (after - alone):.0%} |"
        )


if __name__ == "__main__":
    sys.exit(main())
