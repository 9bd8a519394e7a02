"""How long the search over all layouts takes: `python -m benchmarks.layout_search`.

Decoders on the published profile of eight H100, each in a process of its own, without and with a
record of each layer's routing; and a model of 96 layers on 1,024 ranks, where every cost is a line.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import TextIO, cast

from moetune.domain.architecture import Decoder
from moetune.domain.cluster import Machine
from moetune.domain.constraints import Bounds, LayoutPins
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.domain.profile import CollectiveLine, GemmLine, Profile
from moetune.domain.recorded_layers import RecordedLayer, RecordedLayers
from moetune.domain.request import PlanInputs
from moetune.domain.routing import BALANCED, ExpertLoads
from moetune.domain.samples import CollectiveOp
from moetune.domain.targets import find_target
from moetune.domain.training import LayoutRequest, TrainingJob
from moetune.fit.costs import costs_of
from moetune.huggingface.registry import named_model
from moetune.solve.layout.choose import LayoutProblem, search_layouts
from moetune.solve.layout.plan import solve_layout
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.training import plan_training
from moetune.workflows.training_plan import TrainingRequest

NUM_RANKS = 1024
PER_NODE = 8
GIB = 2**30
RUNS = 3
OPS: tuple[CollectiveOp, ...] = (
    "all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A decoder's plan that is timed.

    Args:
        has_record: of the routing of each layer, with log-normal loads of a spread of 1.
        memory_gib: of a device; None for the machine's.
    """

    model: str
    ranks: int
    global_batch: int
    target: str = "moetune"
    has_record: bool = False
    memory_gib: int | None = None

    @property
    def words(self) -> str:
        """The question in a table's row."""
        memory = f", {self.memory_gib} GiB" if self.memory_gib else ""
        record = "yes" if self.has_record else ""
        return (
            f"{self.model} | {self.ranks} | {self.global_batch}{memory} | {self.target} | {record}"
        )


QUESTIONS = (
    Question(model="qwen3-30b-a3b", ranks=64, global_batch=1024),
    Question(model="qwen3-30b-a3b", ranks=64, global_batch=1024, has_record=True),
    Question(model="qwen3-30b-a3b", ranks=64, global_batch=1024, memory_gib=24),
    Question(model="qwen3-30b-a3b", ranks=64, global_batch=1024, target="megatron"),
    Question(model="qwen3-30b-a3b", ranks=64, global_batch=1024, target="torchtitan"),
    Question(model="qwen3-235b-a22b", ranks=64, global_batch=1024),
    Question(model="qwen3-235b-a22b", ranks=64, global_batch=1024, has_record=True),
    Question(model="mixtral-8x7b", ranks=64, global_batch=1024, has_record=True),
    Question(model="deepseek-v3", ranks=256, global_batch=1024),
    Question(model="deepseek-v3", ranks=256, global_batch=1024, has_record=True),
    Question(model="deepseek-v3", ranks=4096, global_batch=32_768),
    Question(model="deepseek-v3", ranks=4096, global_batch=32_768, has_record=True),
    Question(model="deepseek-v3", ranks=4096, global_batch=32_768, target="megatron"),
)
_LENGTH, _SPREAD = 4096, 1.0


def main() -> None:
    """Print the best of a few runs: of decoders' plans, and of layers over many ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "question", type=int, nargs="?", choices=range(len(QUESTIONS)),
        help="solve only this one, counted from 0, and print its seconds",
    )  # fmt: skip
    given = parser.parse_args()
    if given.question is not None:
        print(json.dumps(_solve(QUESTIONS[given.question])))
        return
    print("| model | ranks | global batch | target | record | solving | processor in all | peak |")
    print("|---|---:|---|---|---|---:|---:|---:|")
    for number, question in enumerate(QUESTIONS):
        solving, seconds, mib = _of_processes(number)
        print(
            f"| {question.words} | {solving:.2f} s | {seconds:.2f} s | {mib:.0f} MiB |", flush=True
        )
    for memory_bytes in (80 * GIB, 192 * GIB):
        best = min(_seconds(memory_bytes) for _ in range(RUNS))
        print(f"{NUM_RANKS} ranks, 96 layers, {memory_bytes // GIB} GiB: {best:.2f} s")
    started = time.perf_counter()
    plan = solve_layout(_question(192 * GIB)).plan
    print(f"with the plan of its MoE layer: {time.perf_counter() - started:.2f} s, {plan.layout}")


def _of_processes(number: int) -> tuple[float, float, float]:
    """Return the least seconds of a question, of its process, and its peak memory in MiB.

    The process starts, reads the profile, and solves this one question.
    """
    found = []
    for _ in range(RUNS):
        command = (sys.executable, "-m", "benchmarks.layout_search", str(number))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            out = cast("TextIO", process.stdout)
            solving = float(json.loads(out.read()))
            used = os.wait4(process.pid, 0)[2]
            process.returncode = 0  # already waited for
        found.append((solving, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024))
    return min(found)


def _solve(question: Question) -> float:
    """Return the processor's seconds that this process takes to solve a question, its first."""
    gc.set_threshold(200_000)  # as the command does
    profile = load_profile_file(bundled_profiles()["h100-x8"])
    decoder, routing = named_model(question.model).decoder, None
    if question.has_record:
        routing = recorded_layers(decoder)
        decoder = routing.told_apart(decoder)
    job = TrainingJob(
        decoder=decoder, world_size=question.ranks, global_batch=question.global_batch,
        length=_LENGTH, routing=routing or BALANCED,
    )  # fmt: skip
    request = TrainingRequest(
        job=job, pins=LayoutRequest(), target=find_target(question.target),
        memory_limit_bytes=question.memory_gib and question.memory_gib * GIB,
    )  # fmt: skip
    started = time.process_time()
    plan_training(request, profile)
    return time.process_time() - started


def recorded_layers(decoder: Decoder) -> RecordedLayers:
    """Return a made-up record: log-normal loads, drawn for each layer of experts."""
    drawn = random.Random(0)  # noqa: S311 - not for secrets
    layers = [
        RecordedLayer(
            loads=ExpertLoads(
                name="drawn",
                loads=tuple(drawn.lognormvariate(0.0, _SPREAD) for _ in range(part.num_experts)),
            ),
            spread=1.2, top_k=part.mean_top_k,
        )
        for block in decoder.blocks
        if (part := block.routed) is not None
    ]  # fmt: skip
    return RecordedLayers(name="drawn", layers=tuple(layers))


def _seconds(memory_bytes: int) -> float:
    question = _question(memory_bytes)
    started = time.perf_counter()
    _, found = search_layouts(question)
    seconds = time.perf_counter() - started
    fitting, others = len(found.best), len(found.unfit)
    print(f"  {fitting} layouts fit, {others} do not, {len(found.unpriced)} are not measured")
    return seconds


def _question(memory_bytes: int) -> LayoutProblem:
    moe = LayerShape(d_model=8192, d_hidden=32_768, num_experts=64)
    profile = _profile()
    return LayoutProblem(
        inputs=PlanInputs(
            model=None, layer=moe, world_size=NUM_RANKS, tokens_per_rank=16_384, dtype="float16",
            memory_limit_bytes=memory_bytes, profile=profile.name,
            profile_fingerprint=profile.digest, constraints={},
        ),
        model=Transformer(
            moe=moe, num_layers=96, num_heads=64, length=2048, vocab_size=51_200
        ),
        pins=LayoutPins(), costs=costs_of(profile), resamples=(), bounds=Bounds(),
        per_node=PER_NODE, runs_ahead=True, device_memory_bytes=memory_bytes, provenance="modelled",
    )  # fmt: skip


def _profile() -> Profile:
    """Return lines for every group of a power of two, on as few nodes as possible and on more."""
    lines = [
        CollectiveLine(
            op=op, group_size=2**size, num_nodes=nodes, alpha_seconds=1e-5 * size,
            beta_seconds_per_byte=1e-11 * (1 + nodes),
        )
        for op in OPS
        for size in range(1, NUM_RANKS.bit_length())
        for nodes in (0, *(2**one for one in range(1, size + 1)))
        if nodes == 0 or nodes > -(-(2**size) // PER_NODE)
    ]  # fmt: skip
    machine = Machine(
        kind="cuda", device="none", num_devices=NUM_RANKS, devices_per_node=PER_NODE,
        memory_bytes=80 * GIB,
    )  # fmt: skip
    gemm = GemmLine(dtype="float16", alpha_seconds=2e-5, beta_seconds_per_mac=4e-15)
    profile = Profile(
        name="lines", provenance="modelled", machine=machine, gemm=(gemm,), collective=tuple(lines)
    )
    return replace(profile, citation="made up")


if __name__ == "__main__":
    main()
