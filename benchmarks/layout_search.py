"""How long the search over all layouts takes: `python -m benchmarks.layout_search`.

Decoders on the published profile of eight H100, each in a process of its own, without and with a
record of each layer's routing.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TextIO, cast

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.training import plan_training
from moetune.app.training_plan import TrainingRequest
from moetune.domain.architecture import Decoder
from moetune.domain.routing import BALANCED, ExpertLoads
from moetune.domain.routing_record import RecordedLayer, RecordedLayers
from moetune.domain.targets import find_target
from moetune.domain.training import LayoutRequest, TrainingJob
from moetune.huggingface.registry import named_model

GIB = 2**30
RUNS = 3


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
    """Print the best of a few runs of decoders' plans."""
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
        decoder = routing.with_numbers(decoder)
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


if __name__ == "__main__":
    main()
