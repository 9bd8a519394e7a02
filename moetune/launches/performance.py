"""Reader of Megatron-Bridge's performance scripts, whose recipes stand in a table.

Source: `src/megatron/bridge/perf_recipes` and `scripts/performance` of Megatron-Bridge 0.6.0.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from moetune.domain.errors import InputError
from moetune.domain.spelling import nearest_or
from moetune.huggingface.registry import resolve_name
from moetune.launches.arguments import Argument, Launch, check_values
from moetune.launches.bridge import PERFORMANCE
from moetune.launches.entries import Entry
from moetune.launches.megatron import plain_value

_PROGRAMS = frozenset({"setup_experiment.py", "bootstrap.py", "run_script.py"})
_FIELDS = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size", "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size",
    "micro_batch": "micro_batch_size", "batch": "global_batch_size", "length": "seq_length",
}  # fmt: skip
"""Fields of Megatron by their short names in the table."""
_LETTERS = {
    "mr": "model_recipe_name", "ng": "num_gpus", "g": "gpu", "c": "compute_dtype",
    "cv": "config_variant", "tp": _FIELDS["tp"], "pp": _FIELDS["pp"], "cp": _FIELDS["cp"],
    "vp": _FIELDS["vpp"], "ep": _FIELDS["ep"], "et": _FIELDS["etp"], "mb": "micro_batch_size",
    "gb": "global_batch_size", "sl": "seq_length",
}  # fmt: skip
_PASSED_ON = frozenset({*_FIELDS.values(), "use_megatron_fsdp", "cuda_graph_impl"})
"""Arguments that set the field of their name."""
_PRECISIONS: Mapping[str, Mapping[str, object]] = {
    "bf16": {},
    "fp8cs": {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True},
    "fp8sc": {"fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_param_gather": False},
    "fp8mx": {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp8_param_gather": False},
}
"""Fields of `training/mixed_precision.py` by the precision in a recipe's name."""
_RECIPE = re.compile(r"(\d+)gpu_(\w+)")
_NAME = "perf_recipes"


class PerformanceRun(NamedTuple):
    """A run of a performance recipe.

    Args:
        entries: the recipe's fields, then those that the command sets.
    """

    model: str
    ranks: int
    entries: tuple[Entry, ...]


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def performance_run(launch: Launch, ranks: int | None) -> PerformanceRun | None:
    """Return what a command of the performance scripts runs; None if it is no such command.

    Args:
        ranks: the number of ranks; None for that of the command.

    Raises:
        InputError: the recipe is not in the table, or an argument has no value.
    """
    given = {_LETTERS.get(row.name, row.name): row for row in launch.arguments}
    named = given.get("model_recipe_name")
    if named is None or launch.program not in _PROGRAMS:
        return None
    rows = {name: row for name, row in given.items() if row.values}
    check_values((f"--{name}", row.values[0]) for name, row in rows.items()
                 if name in {*_LETTERS.values()})  # fmt: skip
    words = {name: row.values[0].text for name, row in rows.items()}
    task = words.get("task", "pretrain")
    if "use_recipes" in given or task != "pretrain":
        what = "--use_recipes" if "use_recipes" in given else f"--task {task}"
        what = f"line {named.line}: {what} of the performance scripts is not read"
        raise InputError(what, "check the recipe's program, or plan --target bridge --tp 2 --pp 4")
    model, wanted = words.get("model_recipe_name", ""), _recipe_end(words)
    said = words.get("num_gpus", "")
    ranks = ranks or (int(said) if said.isdigit() else None)
    number = _gpus_of(model, wanted, ranks, named)
    fields = {**_table()[model], **_table()[model]["recipes"][f"{number}gpu_{wanted}"]}
    entries = [*_recipe_entries(fields, wanted.partition("_")[2].partition("_")[0])]
    entries += _argument_entries(rows)
    values = {entry.path.rpartition(".")[2]: entry.value for entry in entries}
    if ranks not in (None, number) and "global_batch_size" not in words:
        entries.append(_scale_batch(values, fields, ranks or number, number))
    name = resolve_name(model.replace("_", "-"))
    return PerformanceRun(name or model, ranks or number, tuple(entries))


def _recipe_end(words: Mapping[str, str]) -> str:
    """Return the end of a recipe's name: the GPU, the precision and the variant."""
    precision = words.get("compute_dtype", "bf16").replace("_", "")
    variant = words.get("config_variant", "")
    return f"{words.get('gpu', '')}_{precision}" + (f"_{variant}" if variant else "")


def _gpus_of(model: str, wanted: str, ranks: int | None, named: Argument) -> int:
    """Return the GPUs of the recipe that runs on a number of ranks.

    Without a recipe for that many it is that for the most GPUs, or for the fewest where the
    scripts prefer it.

    Raises:
        InputError: the table has no such recipe.
    """
    if model not in _table():
        hint = f"plan --target bridge --tp 2 --pp 4, or name one of {', '.join(_table())}"
        what = f"line {named.line}: no recipe of {model!r} is in the table of Megatron-Bridge 0.6"
        raise InputError(what, nearest_or(hint, model, _table()))
    names = (_RECIPE.fullmatch(name) for name in _table()[model]["recipes"])
    counts = [int(match[1]) for match in names if match is not None and match[2] == wanted]
    if not counts:
        ends = dict.fromkeys(name.partition("_")[2] for name in _table()[model]["recipes"])
        what = f"line {named.line}: {model} has no recipe for {wanted}"
        hint = f"give --gpu, --compute_dtype and --config_variant of {', '.join(ends)}"
        raise InputError(what, hint)
    usual = min(counts) if wanted in _table()[model].get("smallest", ()) else max(counts)
    return ranks if ranks in counts else usual


def _recipe_entries(fields: Mapping[str, Any], precision: str) -> Iterator[Entry]:
    plain = {_FIELDS.get(name, name): value for name, value in fields.items()}
    for name, value in {**_PRECISIONS[precision], **plain}.items():
        if name not in ("recipes", "smallest"):
            parts = tuple(value) if isinstance(value, list) else value
            yield Entry(f"model.{name}", parts, 0, _NAME)
    yield Entry("import.base", PERFORMANCE, 0, _NAME)


def _argument_entries(rows: Mapping[str, Argument]) -> Iterator[Entry]:
    """Yield the fields that a command sets (`scripts/performance/utils/overrides.py`)."""
    for name, row in rows.items():
        word = row.values[0]
        values: dict[str, object] = {name: plain_value(word.text)} if name in _PASSED_ON else {}
        if name == "tensor_model_parallel_size":
            values["sequence_parallel"] = word.text != "1"
        elif name == "cuda_graph_scope":
            values[name] = tuple(word.text for word in row.values)
        elif name == "recompute_modules":
            values = {name: tuple(word.text.split(",")), "recompute_granularity": "selective"}
        elif name == "recompute_num_layers":
            values = {name: plain_value(word.text), "recompute_granularity": "full",
                      "recompute_method": "block"}  # fmt: skip
        elif name == "moe_a2a_overlap" and plain_value(word.text) is True:
            values = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True,
                      "moe_shared_expert_overlap": False}  # fmt: skip
        elif name == "activation_offload_layers":
            values = {"cpu_offloading": True, "cpu_offloading_num_layers": plain_value(word.text)}
        for field, value in values.items():
            yield Entry(f"model.{field}", value, row.line, row.file)


def _scale_batch(
    values: Mapping[str, Any], fields: Mapping[str, Any], ranks: int, number: int
) -> Entry:  # fmt: skip
    """Return the batch, which grows with the data-parallel ranks if the GPUs are others."""
    sizes = [(values.get(_FIELDS[name], 1), fields.get(name, 1)) for name in ("tp", "pp", "cp")]
    batch = fields["batch"] * ranks
    divisor = number
    for given, usual in sizes:
        batch, divisor = batch * usual, divisor * given
    return Entry("model.global_batch_size", batch // divisor, 0, _NAME)
