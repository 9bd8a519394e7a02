"""How long the search over all layouts takes: `python -m benchmarks.layout_search`.

A model of 96 layers on 1,024 ranks, where every cost is a line; and whole commands for decoders,
as the CPU seconds and the memory of processes of their own.
"""

import os
import subprocess
import sys
import time
from dataclasses import replace

from moetune.domain.cluster import Machine
from moetune.domain.constraints import Bounds, LayoutPins
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.domain.profile import CollectiveLine, GemmLine, Profile
from moetune.domain.request import PlanInputs
from moetune.domain.samples import CollectiveOp
from moetune.fit.costs import costs_of
from moetune.solve.layout.choose import LayoutProblem, search_layouts
from moetune.solve.layout.plan import solve_layout

NUM_RANKS = 1024
PER_NODE = 8
GIB = 2**30
RUNS = 3
OPS: tuple[CollectiveOp, ...] = (
    "all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send",
)  # fmt: skip


_QWEN = ("plan", "--model", "qwen3-30b-a3b", "--profile", "h100-x8", "--seq", "4096", "--json")
_DEEPSEEK = ("plan", "--model", "deepseek-v3", "--profile", "h100-x8", "--seq", "4096", "--json")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("models", "show", "qwen3-30b-a3b"),
    *(
        (*_QWEN, "--world-size", "64", "--global-batch", "512", "--target", target)
        for target in ("moetune", "megatron", "torchtitan")
    ),
    *(
        (*_DEEPSEEK, "--world-size", "1024", "--global-batch", "8192", "--target", target)
        for target in ("moetune", "megatron", "torchtitan")
    ),
)


def main() -> None:
    """Print the best of a few runs: of commands, and of the search for several memory limits."""
    print("CPU seconds, peak MiB")
    for command in COMMANDS:
        seconds, mib = _cpu_seconds(command)
        print(f"{seconds:6.2f} {mib:6.0f}  moetune {' '.join(command)}")
    for memory_bytes in (80 * GIB, 192 * GIB):
        best = min(_seconds(memory_bytes) for _ in range(RUNS))
        print(f"{NUM_RANKS} ranks, 96 layers, {memory_bytes // GIB} GiB: {best:.2f} s")
    started = time.perf_counter()
    plan = solve_layout(_question(192 * GIB)).plan
    print(f"with the plan of its MoE layer: {time.perf_counter() - started:.2f} s, {plan.layout}")


def _cpu_seconds(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Return the least CPU seconds of a few runs of a command, and its peak memory in MiB."""
    found = []
    for _ in range(RUNS):
        command = (sys.executable, "-m", "moetune", *arguments)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            used = os.wait4(process.pid, 0)[2]
            process.returncode = 0  # already waited for
        found.append((used.ru_utime + used.ru_stime, used.ru_maxrss / 1024))
    return min(found)


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
