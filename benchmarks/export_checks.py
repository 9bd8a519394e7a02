"""Exports of plans, read by each runtime's own classes; and the names that those classes know.

Run it in an environment of its own with megatron-core, torchtitan, transformers, accelerate and
deepspeed in the versions of `moetune/domain/targets.py` (a CPU is enough; about 600 MB without
torch), megatron-bridge without its dependencies, and Megatron-LM's source at core_v0.16.1:

    PYTHONPATH=. python benchmarks/export_checks.py plan.json … --megatron-lm Megatron-LM --write

For each plan and target it prints the names that were checked, or why there is no export. `--write`
renews `tests/export/known/`, which the tests compare exports with. Transformer Engine and other
CUDA packages that Megatron-Bridge imports are replaced by empty modules, and the GPU by an H100.
Exports of Megatron and Bridge are judged by `python -m tests.launch`.
"""

import argparse
import ast
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from moetune.app.export import ExportDocument, export_plan
from moetune.app.files import load_plan_file
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.targets import TARGETS

KNOWN = Path(__file__).parent.parent / "tests" / "export" / "known"
ABSENT = (
    "transformer_engine", "transformer_engine_torch", "nvidia_resiliency_ext", "modelopt",
    "mamba_ssm", "causal_conv1d", "megatron_energon", "nv_grouped_gemm", "qwen_vl_utils",
    "open_clip", "timm", "fla", "mlflow",
)  # fmt: skip


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import packages that need CUDA as modules whose every name is there and does nothing."""

    def find_spec(
        self, name: str, _path: object, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        module.__version__ = "2.10.0"
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        pass


def take(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def prepare(megatron_lm: Path) -> None:
    """Let an H100 and Transformer Engine 2.10 seem to be there."""
    sys.meta_path.insert(0, EmptyModules())
    sys.path.insert(0, str(megatron_lm))
    import torch

    gpu = SimpleNamespace(major=9, minor=0, name="NVIDIA H100")
    torch.cuda.get_device_properties = lambda *_: gpu  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    version = take("packaging.version", "Version")("2.10.0")
    importlib.import_module("megatron.core.utils").get_te_version = lambda: version  # type: ignore[attr-defined]


def module_of(document: ExportDocument) -> ModuleType:
    module = ModuleType("exported")
    exec(compile(document.text, document.file_name, "exec"), module.__dict__)  # noqa: S102
    return module


def names(cls: Any) -> list[str]:
    return sorted(item.name for item in dataclasses.fields(cls))


def check_torchtitan(document: ExportDocument, plan: dict[str, Any]) -> int:
    """Build the configuration, validate it again, and lay out its mesh."""
    config = module_of(document).planned()
    config.__post_init__()
    given = config.parallelism
    dims = take("torchtitan.distributed", "ParallelDims")(
        dp_replicate=given.data_parallel_replicate_degree,
        dp_shard=given.data_parallel_shard_degree,
        cp=given.context_parallel_degree, tp=given.tensor_parallel_degree,
        pp=given.pipeline_parallel_degree, ep=given.expert_parallel_degree,
        world_size=plan["inputs"]["world_size"],
    )  # fmt: skip
    assert dims.dp_shard == plan["layout"]["dp"]
    if stages := given.module_fqns_per_model_part:
        blocks = [name for stage in stages for name in stage if name.startswith("layers.")]
        assert blocks == [f"layers.{at}" for at in range(len(config.model_spec.model.layers))]
        assert len(stages) == plan["layout"]["pp"] * plan["layout"]["vpp"]
        take("torch.distributed.pipelining.schedules", "get_schedule_class")(
            given.pipeline_parallel_schedule
        )
    return len(keywords(document.text))


def check_transformers(document: ExportDocument, plan: dict[str, Any]) -> int:
    """Make the DistributedConfig and the TrainingArguments."""
    module = module_of(document)
    layout = module.LAYOUT.to_dict()
    assert module.LAYOUT.dp_size == plan["layout"]["dp"]
    assert layout["ep_size"] == plan["layout"]["ep"]
    registered = take("transformers.distributed.expert_parallel", "EPImplementationInterface")()
    assert layout["ep_implementation"] in {"auto", *registered.keys()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = module.training_arguments(folder)
    assert (
        arguments.gradient_accumulation_steps
        * arguments.per_device_train_batch_size
        * plan["layout"]["dp"]
        == plan["inputs"]["global_batch"]
    )
    return len(keywords(document.text))


class Read(dict[str, Any]):
    """A dict that remembers which of its keys were read."""

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __deepcopy__(self, _memo: object) -> "Read":
        return self


def check_deepspeed(document: ExportDocument, plan: dict[str, Any]) -> int:
    """Read `CONFIG` with DeepSpeedConfig and AutoEP's checks; each key must have been read."""
    layout, plain = plan["layout"], module_of(document).CONFIG
    tree = Read({key: Read(raw) if isinstance(raw, dict) else raw for key, raw in plain.items()})
    replicas = plan["inputs"]["world_size"] // layout["tp"]
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: replicas)
    settings = importlib.import_module("deepspeed.runtime.config")
    settings.dist.get_rank = lambda: 0
    config = settings.DeepSpeedConfig(tree, mpu=mpu)
    assert config.train_batch_size == plan["inputs"]["global_batch"]
    autoep = importlib.import_module("deepspeed.module_inject.auto_ep_config")
    if experts := tree.get("expert_parallel"):
        parsed = autoep.parse_autoep_config(experts)
        autoep.validate_autoep_config(
            parsed, plan["inputs"]["world_size"], 1, layout["tp"], 1, zero_stage=layout["zero"]
        )
        assert set(experts) <= experts.seen
        assert parsed.autoep_size == layout["ep"]
    assert config.zero_config.stage == layout["zero"]
    if tensor := tree.get("tensor_parallel"):
        assert tensor["autotp_size"] == config.tensor_parallel_config.autotp_size == layout["tp"]
    assert set(tree) <= tree.seen, set(tree) - tree.seen
    assert set(plain["zero_optimization"]) <= set(type(config.zero_config).model_fields)
    return sum(len(value) if isinstance(value, dict) else 1 for value in plain.values())


def check_moetune(document: ExportDocument, _plan: dict[str, Any]) -> int:
    """Import the module; its functions need a GPU."""
    return len(keywords(document.text)) * bool(module_of(document).make_layer)


CHECKS: dict[str, Callable[[ExportDocument, dict[str, Any]], int]] = {
    "torchtitan": check_torchtitan,
    "transformers": check_transformers, "deepspeed": check_deepspeed, "moetune": check_moetune,
}  # fmt: skip


def keywords(text: str) -> list[str]:
    """Return the named arguments of calls and the attributes that are set."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg:
            names.append(node.arg)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append(node.attr)
    return names


def facts() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (package, version, names that it knows)."""
    core = "megatron.core.transformer.transformer_config"
    ddp = take("megatron.core.distributed", "DistributedDataParallelConfig")
    yield "megatron-core", metadata.version("megatron-core"), {
        "TransformerConfig": names(take(core, "TransformerConfig")),
        "DistributedDataParallelConfig": names(ddp),
    }  # fmt: skip
    parser = argparse.ArgumentParser(allow_abbrev=False)
    take("megatron.training.arguments", "add_megatron_arguments")(parser)
    flags = {
        flag: sorted(map(str, action.choices)) if action.choices else None
        for action in parser._actions
        for flag in action.option_strings
    }
    yield "megatron-lm", "core_v0.16.1", {"flags": dict(sorted(flags.items()))}
    training = importlib.import_module("megatron.bridge.training.config")
    precision = take("megatron.bridge.training.mixed_precision", "MixedPrecisionConfig")
    yield "megatron-bridge", metadata.version("megatron-bridge"), {
        "model": names(take("megatron.bridge.models", "GPTModelProvider")),
        "train": names(training.TrainingConfig),
        "ddp": names(training.DistributedDataParallelConfig),
        "optimizer": names(training.OptimizerConfig),
        "dataset": names(training.GPTDatasetConfig),
        "checkpoint": names(training.CheckpointConfig),
        "comm_overlap": names(training.CommOverlapConfig),
        "mixed_precision": names(precision),
    }  # fmt: skip
    titan = importlib.import_module("torchtitan.config")
    yield "torchtitan", metadata.version("torchtitan"), {
        "ParallelismConfig": names(titan.ParallelismConfig),
        "training": names(titan.TrainingConfig),
        "config": names(take("torchtitan.trainer", "Trainer").Config),
    }  # fmt: skip
    yield "transformers", metadata.version("transformers"), {
        "DistributedConfig": names(take("transformers.distributed", "DistributedConfig")),
        "TrainingArguments": names(take("transformers", "TrainingArguments")),
    }  # fmt: skip
    experts = Read({"enabled": True})
    autoep = importlib.import_module("deepspeed.module_inject.auto_ep_config")
    autoep.parse_autoep_config(experts)
    zero = take("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig")
    yield "deepspeed", metadata.version("deepspeed"), {
        "expert_parallel": sorted(experts.seen),
        "presets": sorted(autoep.PRESET_MODELS),
        "zero_optimization": sorted(zero.model_fields),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plans", nargs="*", type=Path)
    parser.add_argument("--megatron-lm", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    prepare(asked.megatron_lm)
    failed = 0
    for path in asked.plans:
        plan = json.loads(path.read_text(encoding="utf-8"))
        for target in (name for name in TARGETS if name in CHECKS):
            try:
                export = export_plan(
                    load_plan_file(path).as_model(),
                    to=target,
                    model=None,
                    stores=lambda: nullcontext(None),
                )
            except InfeasiblePlanError as error:
                print(f"{path.stem:24} {target:13} none: {error.what}")
                continue
            try:
                print(f"{path.stem:24} {target:13} {CHECKS[target](export, plan)} names")
            except (Exception, SystemExit) as error:  # noqa: BLE001 - of any kind: it is a finding
                failed += 1
                print(f"{path.stem:24} {target:13} FAILED: {type(error).__name__}: {error}")
    for package, version, known in facts() if asked.write else ():
        document = {"name": package, "version": version, "known": known}
        (KNOWN / f"{package}.json").write_text(json.dumps(document, indent=1) + "\n")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
