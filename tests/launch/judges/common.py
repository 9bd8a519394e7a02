"""What judges share: jobs from a file, verdicts on stdout, and packages of GPUs that do nothing.

A judge runs in an environment of its own, which has the runtime and not moetune:

    python tests/launch/judges/megatron_judge.py jobs.jsonl > verdicts.jsonl
"""

import importlib.abc
import importlib.machinery
import io
import json
import sys
import traceback
import typing
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

ABSENT = (
    "transformer_engine", "transformer_engine_torch", "nvidia_resiliency_ext", "modelopt",
    "mamba_ssm", "causal_conv1d", "megatron_energon", "nv_grouped_gemm", "qwen_vl_utils",
    "open_clip", "timm", "fla", "mlflow", "deep_ep", "comet_ml", "diffusers", "webdataset",
    "wandb", "multistorageclient", "tensorstore", "emerging_optimizers", "nemo_run",
    "triton", "datasets", "google", "tensorboard", "flash_mla", "cudnn",
)  # fmt: skip
CAPABILITIES = {"a100": (8, 0), "b200": (10, 0), "b300": (10, 3), "gb200": (10, 0),
                "gb300": (10, 3)}  # fmt: skip
"""Compute capabilities of chips; of others Hopper's."""


class EmptyModule(ModuleType):
    """A module whose every name is there: capital ones are classes, others modules to call."""

    __version__ = "2.14.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            value: Any = type(name, (), {
                "__class_getitem__": classmethod(lambda cls, _: cls),
                "__init__": lambda *_, **__: None,
            })  # fmt: skip
        else:
            value = EmptyModule(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *_: object, **__: object) -> Any:
        return MagicMock()


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import packages that need CUDA as modules whose every name is there and does nothing."""

    def find_spec(
        self, name: str, _path: object, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT and not name.startswith("megatron.energon"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = EmptyModule(spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def stub_gpus() -> None:
    """Let packages of GPUs seem to be there, and names of Python 3.12 that runtimes import."""
    sys.meta_path.insert(0, EmptyModules())
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]


def seem_like(chip: str | None) -> None:
    """Let torch see a GPU of a chip."""
    import torch

    major, minor = CAPABILITIES.get(chip or "", (9, 0))
    gpu = SimpleNamespace(major=major, minor=minor, name=f"NVIDIA {(chip or 'h100').upper()}")
    torch.cuda.get_device_properties = lambda *_: gpu  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (major, minor)
    torch.cuda.is_available = lambda: True


def judge_all(check: Callable[[dict[str, Any]], None]) -> None:
    """Check every job of the file that the command names, and print a verdict on each."""
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        job = json.loads(line)
        verdict: dict[str, Any] = {"number": job["number"], "refusal": ""}
        try:
            with redirect_stdout(io.StringIO()):
                check(job)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of any kind: it is a finding
            verdict["refusal"] = f"{type(error).__name__}: {error}"
            verdict["where"] = "".join(traceback.format_tb(error.__traceback__)[-2:])
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()
