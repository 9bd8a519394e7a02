"""torchtitan's own Trainer, built on the meta device over a fake process group of all ranks.

The module that `export` wrote is read by torchtitan's ConfigManager with the arguments of its
launch line; `Trainer.__init__` then lays out the mesh, checks lengths and batches, builds the whole
model, cuts it into stages, shards it and makes its schedule and optimizer. Weights and data are
never there. No step is run: torchtitan attends by FlexAttention alone, which torch 2.13 does not
train on a CPU (`_validate_device` of `torch/nn/attention/flex_attention.py`).
"""

import importlib
import importlib.machinery
import os
import shlex
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parent))

import common  # type: ignore[import-not-found]

ON_A_CPU = ("--comm.mode", "fake_backend", "--parallelism.spmd_backend", "partial_dtensor")
"""torchtitan's default, spmd_types, needs FSDP of torch 2.15, of which there is no CPU build."""


class ReachedError(Exception):
    """Everything before the tokenizer was built."""


class PretendedModules(common.EmptyModules):  # type: ignore[misc]
    """Import packages of kernels and images as mocks, whose every value does what it is asked."""

    absent: tuple[str, ...] = ("fla", "torchvision", "av", "deep_ep")

    def find_spec(
        self, name: str, _path: object, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.absent:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module  # type: ignore[no-any-return]


def prepare() -> None:
    """Let torchtitan take the CPU for its accelerator, and a Blackwell GPU for what it asks."""
    sys.meta_path.insert(0, PretendedModules())
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    opaque: Any = torch._library.opaque_object
    if not hasattr(opaque, "CustomClassBase"):  # of torch 2.15
        opaque.CustomClassBase = importlib.import_module("torch._opaque_base").OpaqueBase
    from torchtitan import trainer
    from torchtitan.components.quantization import mx
    from torchtitan.protocols.model import BaseModel

    mx.has_cuda_capability = lambda *_: True
    mx.MXFP8Linear = narrow_linear()
    PretendedModules.absent += ("torchao",)  # after torchtitan, whose layers would be its heirs
    trainer.utils.get_local_device = lambda: torch.device("cpu")
    trainer.utils.device_module = MagicMock()
    trainer.utils.device_type = "cpu"
    torch.nn.Module.to_empty = lambda self, **_: self  # type: ignore[method-assign]
    BaseModel.init_weights = lambda *_, **__: None


def narrow_linear() -> type:
    """Return a layer in the place of torchao's, with the converter's fields."""
    from dataclasses import dataclass

    from torchtitan.models.common.linear import Linear

    class MXFP8Linear(Linear):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(Linear.Config):  # type: ignore[misc]
            pass

    return MXFP8Linear


def start(job: dict[str, Any], rank: int) -> None:
    """Build the Trainer of one rank up to its tokenizer."""
    import torch.distributed as dist
    from torchtitan.config import ConfigManager

    arguments = shlex.split(job["launch"].partition("torchtitan.train ")[2])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "torchtitan_layout.py").write_text(job["text"], encoding="utf-8")
        sys.path.insert(0, folder)
        sys.modules.pop("torchtitan_layout", None)
        ranks = str(job["plan"]["inputs"]["world_size"])
        os.environ.update(NGPU=ranks, RANK=str(rank), LOCAL_RANK="0")
        try:
            config: Any = ConfigManager().parse_args([*arguments, *ON_A_CPU])
            assert config.parallelism.data_parallel_shard_degree == job["plan"]["layout"]["dp"]
            watch(config)
            config.build()
        except ReachedError:
            return
        finally:
            sys.path.remove(folder)
            if dist.is_initialized():
                dist.destroy_process_group()
    raise AssertionError("the Trainer did not reach its tokenizer")


def watch(config: Any) -> None:
    """Let metrics do nothing, and the tokenizer say that it was asked."""
    stop = MagicMock()
    stop.build.side_effect = ReachedError
    metrics = MagicMock()
    monitor = metrics.build.return_value.device_memory_monitor
    monitor.device_name = "NVIDIA H100"
    monitor.get_peak_stats.return_value = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0)
    config.metrics, config.tokenizer = metrics, stop


def check(job: dict[str, Any]) -> None:
    """Start the first rank, and the last one of a pipeline."""
    last = job["plan"]["inputs"]["world_size"] - 1
    for rank in (0, last) if job["plan"]["layout"]["pp"] > 1 else (0,):
        start(job, rank)


prepare()
common.judge_all(check)
