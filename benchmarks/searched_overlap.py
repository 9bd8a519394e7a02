"""What a search in training makes of the overlap of two batches, on links of a set rate; as root.

    python -m benchmarks.searched_overlap      5 minutes; writes docs/results/searched-overlap.md
    python -m benchmarks.searched_overlap --rates 500 --rounds 3

A language model trains on two ranks with an online plan book until the overlap of its two batches
is settled. Then all overlaps take turns in the same process, as an oracle of what was settled.
"""

import argparse
import json
import logging
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

import moetune
from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.cell import Step
from benchmarks.netlab.lab import Lab, check_supported
from benchmarks.netlab.ranks import time_steps, work_and_rounds
from examples.language_model import LanguageModel, next_token_loss
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.domain.plan import Plan
from moetune.domain.request import PlanRequest
from moetune.domain.training import OVERLAP_WORDS, StepOverlap
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.plans.search import OnlineSearch
from moetune.store import open_store
from moetune.workflows.files import load_profile_file, write_text
from moetune.workflows.launch import leave
from moetune.workflows.plan import make_plan
from moetune.workflows.tuning import StudyTuner

_RESULT = Path(__file__).parents[1] / "docs/results/searched-overlap.md"
_PROFILE = Path(__file__).parents[1] / "tests/golden/lab.toml"
_MODEL = Transformer(
    moe=LayerShape(d_model=512, d_hidden=1024, num_experts=8, top_k=2),
    num_layers=4, num_heads=8, length=256, vocab_size=512,
)  # fmt: skip
_SEQUENCES = 4
_MOST_STEPS = 40
_RATES = (100.0, 200.0, 500.0, 4000.0)
_OVERLAPS: tuple[StepOverlap, ...] = ("both", "batch", "chunks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The chunks of the plan that the search begins with."""

    degree: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One link.

    Args:
        settled: by the search.
        lost_seconds: by the search, with the steps that warmed up.
        seconds: raw step times of every overlap, measured afterwards.
    """

    rate_mbit: float
    degree: int
    settled: StepOverlap
    num_steps: int
    lost_seconds: float
    seconds: Mapping[str, tuple[float, ...]]


def main() -> int:
    """Measure every link and write the page; with `--work`, be one rank."""
    if "--work" in sys.argv:
        _rank()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=_RATES, help="Mbit/s")
    parser.add_argument("--degree", type=int, default=4, help="chunks of the plan")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=_RESULT)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    check_supported()
    every = [_measure(given, rate) for rate in given.rates]
    machine = describe_machine(peer=False, load=load)
    text = "\n".join(_lines(every, machine, given.rounds)) + "\n"
    print(text)
    write_text(given.output, text)
    return 0


def _measure(given: argparse.Namespace, rate_mbit: float) -> Found:
    command = [
        *(sys.executable, "-m", "benchmarks.searched_overlap"),
        *("--work", json.dumps(asdict(Work(degree=given.degree)))),
        *("--rounds", str(given.rounds)),
    ]
    with Lab(num_ranks=2, rate_mbit=rate_mbit) as lab:
        outputs = lab.run(command, timeout_seconds=900.0, echo=sys.stderr)
    found = json.loads(outputs[0].stdout.splitlines()[-1])
    return Found(rate_mbit=rate_mbit, degree=given.degree, **found)


def _rank() -> NoReturn:
    work, rounds = work_and_rounds(Work, __doc__)
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("moetune").setLevel(logging.INFO)
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    search, step = _job(_plan(work.degree))
    overlap = search.overlaps[0]
    num_steps = 0
    while not overlap.is_settled and num_steps < _MOST_STEPS:
        step()
        search.step()
        num_steps += 1
    settled, lost_seconds = overlap.overlap, search.lost.lost_seconds
    seconds = time_steps({one: partial(_in, search, one, step) for one in _OVERLAPS}, rounds=rounds)
    if dist.get_rank() == 0:
        told = {"settled": settled, "num_steps": num_steps, "lost_seconds": lost_seconds}
        print(json.dumps({**told, "seconds": seconds}))
    dist.destroy_process_group()
    leave(0)


def _plan(degree: int) -> Plan:
    """Return a plan with these chunks, whatever the profile says of them."""
    tokens = _SEQUENCES // 2 * _MODEL.length
    request = PlanRequest(
        model=None, layer=_MODEL.moe, world_size=2, tokens_per_rank=tokens, dtype="float32"
    )
    plan = make_plan(request, profile=load_profile_file(_PROFILE))
    pipeline = replace(
        plan.pipeline, forward_degree=degree, backward_degree=degree,
        ranges=((1, 2 * tokens, degree, degree),),
    )  # fmt: skip
    return replace(plan, pipeline=pipeline)


def _job(plan: Plan) -> tuple[OnlineSearch, Step]:
    """Return the search of a book, and a step of the same sequences as two batches."""
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"moetune-overlap-{os.getpid()}"  # noqa: S108
    search = OnlineSearch(
        make_tuner=lambda: StudyTuner(
            folder=folder, hardware_id="0" * 16, stores=lambda: open_store(f"{folder}/moetune.db")
        )
    )
    book = moetune.PlanBook([plan], search=search)
    moe = _MODEL.moe
    torch.manual_seed(1)
    model = LanguageModel(
        _MODEL,
        lambda: MoELayer(moe.d_model, moe.d_hidden, moe.num_experts, moe.top_k, planbook=book),
    )
    moetune.replicate(model)
    text_BS = torch.randint(_MODEL.vocab_size, (_SEQUENCES, _MODEL.length + 1))
    overlap = moetune.BatchOverlap[torch.Tensor](
        model, lambda half_BS: next_token_loss(model(half_BS[:, :-1]), half_BS[:, 1:]) / 2
    )

    def step() -> torch.Tensor:
        model.zero_grad()
        return torch.stack(overlap(text_BS.chunk(2))).sum()

    return search, step


def _in(search: OnlineSearch, overlap: StepOverlap, step: Step) -> torch.Tensor:
    """Take a step in an overlap, without a search."""
    search.overlaps[0].overlap, search.overlaps[0].is_settled = overlap, True
    return step()


def _lines(every: list[Found], machine: str, rounds: int) -> Iterator[str]:
    moe = _MODEL.moe
    yield "# The overlap of two batches, searched while training\n"
    yield machine + "\n"
    yield (
        f"A language model of {_MODEL.num_layers} blocks on two ranks: d_model {moe.d_model}, "
        f"d_hidden {moe.d_hidden}, {moe.num_experts} experts, top-{moe.top_k}, "
        f"{_SEQUENCES * _MODEL.length} tokens a rank in two batches, float32, "
        "`moetune.replicate`, forward and backward pass without an optimizer. An online plan book "
        f"begins with {every[0].degree} chunks in turns. When it has settled, all overlaps take "
        f"turns in one process: the median of {rounds} rounds, the slowest rank's.\n"
    )
    words = " | ".join(OVERLAP_WORDS[one] for one in _OVERLAPS)
    yield f"| link, Mbit/s | {words} | settled | behind the best | steps | lost |"
    yield "|---:|---:|---:|---:|---|---:|---:|---:|"
    for one in every:
        middles = {name: statistics.median(each) for name, each in one.seconds.items()}
        behind = middles[one.settled] / min(middles.values()) - 1
        times = " | ".join(f"{1e3 * middles[name]:.0f} ms" for name in _OVERLAPS)
        yield (
            f"| {one.rate_mbit:g} | {times} | {OVERLAP_WORDS[one.settled]} | {100 * behind:.1f} % "
            f"| {one.num_steps} | {one.lost_seconds:.2f} s |"
        )


if __name__ == "__main__":
    sys.exit(main())
