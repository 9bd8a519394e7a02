"""The part on chunks: models near a GPU's 40 GB, with our offload, FSDP2's, and plain PyTorch.

Throughput is Elixir's Eq. 1, 6·N·T FLOP for T tokens and the N parameters that a token meets, over
the step's time. Parameters are bfloat16 with float32 masters, but for plain PyTorch and FSDP2,
which keep float32 and compute in bfloat16. Blocks are checkpointed.
"""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import moetune
from benchmarks.gpu.jobs import Job
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.scale import Scale
from examples.language_model import LanguageModel, next_token_loss
from moetune.comm.group import OneRank
from moetune.runtime.moe.layer import MoELayer

CAP_BYTES = 40 * 10**9
_ROUNDS, _WARM_UP = 3, 2

Step = Callable[[torch.Tensor], torch.Tensor]


def run_chunks(scale: Scale, folder: Path) -> None:
    """Train every job's model for a few steps, and write a row each; a failure is one, too."""
    rows, device = Rows(folder, "chunks"), scale.torch_device
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_BYTES / total))
    for job in scale.jobs:
        try:
            measured = _measure(job, device)
        except Exception as error:  # noqa: BLE001 - one way's failure leaves the others
            measured = {"failure": f"{type(error).__name__}: {error}".splitlines()[0][:100]}
        rows.add(name=job.name, way=job.way, **measured)
        _forget(device)


def _measure(job: Job, device: torch.device) -> dict[str, object]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = make_model(job, device)
    parameters = sum(each.numel() for each in model.parameters())
    makers = {"plain": _plain, "chunks": _chunks, "fsdp2": _fsdp2}
    step = makers[job.way](job, model, device)
    text = torch.randint(job.vocab, (job.sequences, job.length + 1), device=device)
    seconds = []
    for _ in range(_WARM_UP + _ROUNDS):
        start = time.perf_counter()
        float(step(text))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    shape = job.transformer
    idle = shape.num_moe_layers * (job.num_experts - shape.moe.top_k) * 2 * 4 * job.d_model**2
    return {
        "parameters": parameters,
        "met_parameters": parameters - max(0, idle),
        "tokens": job.sequences * job.length,
        "seconds": sorted(seconds[_WARM_UP:])[_ROUNDS // 2],
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    }


def _forget(device: torch.device) -> None:
    """Free what the last job left, its process group included."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # noqa: SLF001 - page-locked memory; no public name


def make_model(job: Job, device: torch.device) -> LanguageModel:
    """Return the model, drawn on the device, whose blocks keep only their inputs."""
    moe = job.transformer.moe
    with torch.device(device):
        model = LanguageModel(
            job.transformer,
            lambda: MoELayer(
                moe.d_model, moe.d_hidden, moe.num_experts, moe.top_k, pipeline=False,
                communicator=OneRank(), device=device,
            ),
        ).to(device)  # fmt: skip
    for block in model.blocks.values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def _plain(_: Job, model: LanguageModel, device: torch.device) -> Step:
    return make_step(model, _adam(model), torch.autocast(device.type, torch.bfloat16))


def _chunks(job: Job, model: LanguageModel, device: torch.device) -> Step:
    _join(device)
    model.bfloat16()
    sharded, optimizer = moetune.shard(
        model, _adam(model, fused=None), chunk_bytes=job.chunk_bytes, cache_bytes=job.cache_bytes,
        offload=True, device=device,
    )  # fmt: skip
    return make_step(sharded, optimizer, nullcontext())


def _join(device: torch.device) -> None:
    """Make a world of one rank."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined] # which torch does not say that it exports
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _fsdp2(_: Job, model: LanguageModel, device: torch.device) -> Step:
    _join(device)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return make_step(model, _adam(model), nullcontext())


def _adam(model: LanguageModel, fused: bool | None = True) -> torch.optim.Optimizer:  # noqa: FBT001, FBT002 - torch's flag
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def make_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: AbstractContextManager[object],
) -> Step:
    """Return the function that takes one training step and returns its loss."""

    def step(text_BS: torch.Tensor) -> torch.Tensor:
        with precision:
            loss = next_token_loss(model(text_BS[:, :-1]).float(), text_BS[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
