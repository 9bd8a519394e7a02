"""Peak memory of `moetune.adapt` for a model of 1 GiB on two ranks.

    python -m benchmarks.adapt_memory

First the model is built and adapted, then its checkpoint is loaded into one without memory; with
experts spread over the ranks. Bytes
are those of the process's own memory (RssAnon of Linux), above what it has before the model; those
of parameters that stay pages of the checkpoint's file are not counted.
"""

import gc
import itertools
import multiprocessing
import os
import tempfile
import threading
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moetune

_RANKS = 2
SPAWN = multiprocessing.get_context("spawn")
_MIB = 2**20
_SECONDS = 0.001


class Peak:
    """The most bytes of this process while the body runs, above a level."""

    def __init__(self, level: int) -> None:
        self._level, self._most, self._over = level, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def num_bytes(self) -> int:
        """Those bytes."""
        return self._most - self._level

    def _watch(self) -> None:
        while not self._over.wait(_SECONDS):
            self._most = max(self._most, own_bytes())


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def configuration() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=512, moe_intermediate_size=512,
        num_experts=8, num_experts_per_tok=2, num_hidden_layers=38, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip


def join(rank: int, folder: str, name: str) -> tuple[int, DeviceMesh]:
    """Return the bytes of a rank that has imported and made what is made once, and its mesh."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=_RANKS
    )
    mesh = init_device_mesh("cpu", (_RANKS,), mesh_dim_names=("experts",))
    moetune.adapt(small(), mesh=mesh)
    gc.collect()
    return own_bytes(), mesh


def adapts(rank: int, folder: str) -> None:
    """Adapt a model that has memory, and write its checkpoint before."""
    level, mesh = join(rank, folder, "adapts")
    model = Qwen3MoeForCausalLM(configuration())
    size = num_bytes(model)
    model.save_pretrained(f"{folder}/model")
    dist.barrier()
    gc.collect()
    with Peak(level) as peak:
        moetune.adapt(model, mesh=mesh)
    show(rank, "adapt", peak.num_bytes, size, model)
    dist.destroy_process_group()


def loads(rank: int, folder: str) -> None:
    """Fill a model that has none."""
    level, mesh = join(rank, folder, "loads")
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(configuration())
    size = num_bytes(model)
    with Peak(level) as peak:
        moetune.adapt(model, mesh=mesh, checkpoint=f"{folder}/model")
    show(rank, "adapt(checkpoint=…)", peak.num_bytes, size, model)
    dist.destroy_process_group()


def small() -> Qwen3MoeForCausalLM:
    config = configuration()
    config.num_hidden_layers = 1
    return Qwen3MoeForCausalLM(config)


def num_bytes(model: torch.nn.Module) -> int:
    return sum(each.nbytes for each in itertools.chain(model.parameters(), model.buffers()))


def show(rank: int, what: str, peak: int, size: int, model: torch.nn.Module) -> None:
    if rank == 0:
        own = num_bytes(model)
        print(
            f"{what}: peak {peak / _MIB:.0f} MiB; weights {size / _MIB:.0f} MiB, {peak / size:.3f} "
            f"of them; this rank's {own / _MIB:.0f} MiB, {peak / own:.3f} of them",
            flush=True,
        )


if __name__ == "__main__":
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back to the system at once
    with tempfile.TemporaryDirectory() as made:
        for work in (adapts, loads):
            ranks = [SPAWN.Process(target=work, args=(rank, made)) for rank in range(_RANKS)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
