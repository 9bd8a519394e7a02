"""Models larger than a GPU of 40 GB: chunks with offload beside FSDP2's offload and plain PyTorch.

Each row is a process of its own, its share of the GPU's memory capped. The throughput is Elixir's
Eq. 1, 6·N·T FLOP for T tokens and the N parameters that a token meets, over the step's time;
*relative* is that of plain PyTorch on the largest model that fits. Parameters are bfloat16 with
float32 masters, but for plain PyTorch and FSDP2, which keep float32 and compute in bfloat16.

python -m benchmarks.gpu_chunks             on a machine without a GPU, tiny models on the CPU
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import moetune
from examples.language_model import LanguageModel, next_token_loss
from moetune.comm.group import OneRank
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.runtime.moe.layer import MoELayer

_CAP_BYTES = 40 * 10**9
_ROUNDS, _WARM_UP = 3, 2
_TIMEOUT_SECONDS = 150
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One model trained in one way.

    Args:
        way: "plain", "chunks" or "fsdp2".
        sequences: of a step.
        cache_bytes: of our replicated cache.
    """

    name: str
    way: str
    layers: int
    d_model: int
    num_experts: int
    length: int
    vocab: int
    sequences: int
    chunk_bytes: int
    cache_bytes: int

    @property
    def transformer(self) -> Transformer:
        """The model."""
        return Transformer(
            moe=LayerShape(
                d_model=self.d_model, d_hidden=4 * self.d_model, num_experts=self.num_experts
            ),
            num_layers=self.layers,
            num_heads=self.d_model // (64 if self.d_model < 2048 else 128),  # noqa: PLR2004 - as GPT-2 and later
            length=self.length,
            vocab_size=self.vocab,
            moe_every=0 if self.num_experts == 1 else 2,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a job took; without seconds it failed."""

    job: Job
    parameters: int
    met_parameters: int
    seconds: tuple[float, ...]
    peak_bytes: int
    failure: str

    @property
    def flops(self) -> float:
        """FLOP a second (Elixir, Eq. 1); 0 where the job failed."""
        if not self.seconds:
            return 0.0
        tokens = self.job.sequences * self.job.length
        return 6 * self.met_parameters * tokens / statistics.median(self.seconds)


def main() -> None:
    """Run every job, or the one that was asked for, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", help="one job as JSON, in this process")
    parser.add_argument("--output", type=Path, default=Path("docs/results/gpu-chunks.md"))
    given = parser.parse_args()
    if given.job:
        print(json.dumps(_measure(Job(**json.loads(given.job)))))
        return
    rows = [_run(job) for job in jobs(large=torch.cuda.is_available())]
    text = "\n".join(_report(rows))
    print(text)
    if torch.cuda.is_available():
        given.output.write_text(text + "\n", encoding="utf-8")


def jobs(*, large: bool) -> tuple[Job, ...]:
    """Return the jobs: models that fit 40 GB and such that do not; tiny ones for a CPU."""
    if not large:
        sizes = [("tiny", 2, 64, 1, 2), ("tiny experts", 2, 64, 4, 2)]
        shape = {"length": 16, "vocab": 64, "chunk_bytes": 2**17, "cache_bytes": 2**20}
    else:
        sizes = [
            ("1.3B", 24, 2048, 1, 16),
            ("2.7B", 32, 2560, 1, 16),
            ("5.1B", 30, 3712, 1, 12),
            ("experts, 3.6B", 16, 1024, 64, 32),
        ]
        shape = {"length": 1024, "vocab": 50304, "chunk_bytes": _GIB // 2, "cache_bytes": 4 * _GIB}
    return tuple(
        Job(
            name=name, way=way, layers=layers, d_model=width, num_experts=experts,
            sequences=sequences, **shape,
        )
        for name, layers, width, experts, sequences in sizes
        for way in ("plain", "chunks", "fsdp2")
    )  # fmt: skip


def _run(job: Job) -> Row:
    command = [sys.executable, "-m", "benchmarks.gpu_chunks", "--job", json.dumps(asdict(job))]
    print(f"{job.name}, {job.way}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
        )
        failure = "" if not done.returncode else _last_line(done.stderr)
        found = json.loads(done.stdout) if not failure else {}
    except subprocess.TimeoutExpired:
        failure, found = f"longer than {_TIMEOUT_SECONDS} s", {}
    return Row(
        job=job,
        parameters=found.get("parameters", 0),
        met_parameters=found.get("met_parameters", 0),
        seconds=tuple(found.get("seconds", ())),
        peak_bytes=found.get("peak_bytes", 0),
        failure=failure,
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if "Error" in line] or ["no word"]
    return lines[-1][:100]


def _measure(job: Job) -> dict[str, object]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, _CAP_BYTES / total))
    makers = {"plain": _plain, "chunks": _chunks, "fsdp2": _fsdp2}
    model = _make(job)
    parameters = sum(each.numel() for each in model.parameters())
    step = makers[job.way](job, model, device)
    text = torch.randint(job.vocab, (job.sequences, job.length + 1), device=device)
    seconds = []
    for _ in range(_WARM_UP + _ROUNDS):
        start = time.perf_counter()
        float(step(text))
        _wait_for(device)
        seconds.append(time.perf_counter() - start)
    shape = job.transformer
    idle = shape.num_moe_layers * (job.num_experts - shape.moe.top_k) * 2 * 4 * job.d_model**2
    return {
        "parameters": parameters,
        "met_parameters": parameters - max(0, idle),
        "seconds": seconds[_WARM_UP:],
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
    }


def _make(job: Job) -> LanguageModel:
    moe = job.transformer.moe
    return LanguageModel(
        job.transformer,
        lambda: MoELayer(
            moe.d_model, moe.d_hidden, moe.num_experts, moe.top_k, pipeline=False,
            communicator=OneRank(), device="cpu",
        ),
    )  # fmt: skip


def _plain(_: Job, model: LanguageModel, device: torch.device) -> Callable[..., torch.Tensor]:
    model.to(device)
    return _step(model, _adam(model), torch.autocast(device.type, torch.bfloat16))


def _chunks(job: Job, model: LanguageModel, device: torch.device) -> Callable[..., torch.Tensor]:
    model.bfloat16()
    sharded, optimizer = moetune.shard(
        model, _adam(model, fused=None), chunk_bytes=job.chunk_bytes, cache_bytes=job.cache_bytes,
        offload=True, step_in_backward=True, device=device,
    )  # fmt: skip
    return _step(sharded, optimizer, nullcontext())


def _fsdp2(_: Job, model: LanguageModel, device: torch.device) -> Callable[..., torch.Tensor]:
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{file.name}-store", rank=0, world_size=1,
        )  # fmt: skip
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return _step(model, _adam(model), nullcontext())


def _adam(model: LanguageModel, fused: bool | None = True) -> torch.optim.Optimizer:  # noqa: FBT001, FBT002 - torch's flag
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: AbstractContextManager[object],
) -> Callable[..., torch.Tensor]:
    def step(text_BS: torch.Tensor) -> torch.Tensor:
        with precision:
            loss = next_token_loss(model(text_BS[:, :-1]).float(), text_BS[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _report(rows: Sequence[Row]) -> Iterator[str]:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, a check only"
    yield "# Model states in chunks on one GPU, 40 GB of its memory"
    yield ""
    yield f"{where}, {os.cpu_count()} cores, torch {torch.__version__}. {_words()}"
    yield ""
    yield "| model | parameters | way | step | TFLOP/s | relative | peak on the device |"
    yield "|---|---:|---|---:|---:|---:|---:|"
    best = max((row.flops for row in rows if row.job.way == "plain"), default=0.0)
    for row in rows:
        head = f"| {row.job.name} | {row.parameters / 1e9:.2f}B | {row.job.way} "
        if row.failure:
            yield f"| {row.job.name} | | {row.job.way} | {row.failure} | | | |"
            continue
        yield head + (
            f"| {1e3 * statistics.median(row.seconds):.0f} ms | {row.flops / 1e12:.1f} "
            f"| {100 * row.flops / best:.0f} % | {row.peak_bytes / _GIB:.1f} GiB |"
        )


def _words() -> str:
    return " ".join((__doc__ or "").partition("\n\n")[2].partition("\n\n")[0].split())


if __name__ == "__main__":
    main()
