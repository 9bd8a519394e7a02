"""Rows of `runs.csv`, as jobs and layouts that the planner can price.

A row's runtime is that of its framework. What it does not say is what its recipe sets
(`recipe_settings.csv`) or its system's default (`systems.py`); what cannot be priced is a `Skipped`
with its reason.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.public_runs.decoders import decoder_named
from benchmarks.public_runs.rows import (
    MeasuredMemory,
    PublicRun,
    Skipped,
    read_dtype,
    read_modules,
    read_row,
)
from benchmarks.public_runs.systems import CHUNKED_LOSS, DEVICES, Device, System, system_of
from moetune.domain.architecture import Decoder
from moetune.domain.kernels import FUSED, TORCHTITAN
from moetune.domain.optimizers import OPTIMIZERS, OptimizerName
from moetune.domain.pipeline import Schedule, read_stages
from moetune.domain.routing import BALANCED, NATURAL
from moetune.domain.training import (
    CudaGraphs,
    FoldedLayout,
    Recompute,
    TokenDispatcher,
    TrainingJob,
    ZeroStage,
)

_Row = Mapping[str, str]
_SETTINGS = Path(__file__).parent / "recipe_settings.csv"
_SCHEDULES: Mapping[str, tuple[Schedule | None, int]] = {
    "1f1b": (None, 1), "interleaved 1f1b": (None, 2), "interleaved1f1b": (None, 2),
    "interleaved": (None, 2), "vpp2": (None, 2), "zbb": ("zero_bubble", 1),
    "zero-bubble": ("zero_bubble", 1), "zbv": ("zero_bubble_v", 2),
}  # fmt: skip
"""Schedules and stages a rank, by the words of a note."""
_CANNOT = {
    "v-half": "its schedule, V-half, is none of the planner's",
    "v-min": "its schedule, V-min, is none of the planner's",
    "dualpipe": "its schedule, DualPipe, is none of the planner's",
    "megamoe": "its dispatcher, MegaMoE, is none of the planner's",
    "dynamic cp": "its context-parallel ranks change from batch to batch",
    "fine-grained activation offload": "it offloads activations of modules, not of whole blocks",
    "optimizer-state offload": "it does not say how much of the optimizer is on the host",
}
_COMPILED = replace(
    TORCHTITAN,
    source=TORCHTITAN.source.replace("without compile", "with compile, which fuses them"),
    norm=(0, 0),
    rotary=(0, 0),
    activation=(0, 0),
    rows=(4, 8),  # scatter_add and its gradient stay
)
_UNFUSED = replace(FUSED, activation=(2, 7))
"""silu and product apart, and gradients of both factors joined (Megatron-Core, `glu` in mlp.py)."""
_GATHERS_HEADS, _OF_ALL_HEADS = "2025-10-14", 15
"""Until when tensor ranks of Qwen3 had all heads' queries and keys (#1870), and how often these are
read or written: by the gather's order, norm, rotation and repetition."""
_YES_OR_NO = "fuses_activations", "splits_sequence", "caches_narrow_weights", "saves_exchanges"
_COMPILES_LOSS = "2025-04-02"
"""When torchtitan began to compile the loss with the model (#1033)."""
_COMPILED_LOGIT_BYTES = 4
"""A compiled loss keeps the logits alone, in bfloat16, and writes their gradient."""
_SAME_TOKENS = 0.06
"""Relative difference of tokens printed and those of the batch that padding does not explain."""


def read_more(folder: Path) -> Iterator[PublicRun | Skipped]:
    """Yield the rows of `runs.csv`."""
    with (folder / "runs.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield read_row(row["id"], _with_recipe(row), _read)


def _with_recipe(row: _Row) -> _Row:
    """Return a row whose empty fields are as its recipe sets them."""
    fields, recipe = dict(row), ""
    for name in (row["id"], row["id"].rpartition("-")[0], _recipe_name(row)):
        said = _recipes().get(name, {})
        fields |= {key: value for key, value in said.items() if value and not fields.get(key)}
        recipe = recipe or said.get("source", "")
    return {**fields, "recipe": recipe}


def _recipe_name(row: _Row) -> str:
    return row["model_config_note"].removeprefix("recipe ").strip()


@cache
def _recipes() -> dict[str, dict[str, str]]:
    if not _SETTINGS.exists():
        return {}
    with _SETTINGS.open(encoding="utf-8") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def _read(name: str, row: _Row) -> PublicRun:
    _refuse(row)
    system, device = system_of(row["framework"]), _device(row)
    decoder = decoder_named(row["model"], row["model_config_note"])
    assumed = [f"recipe {row['recipe']}"] if row.get("recipe") else []
    layout = _layout(row, system, decoder, assumed)
    job = _job(row, system, decoder, layout)
    return PublicRun(
        name=name,
        set_name=f"{_source(row)}, {decoder.name}, {job.world_size} {row['gpu']}, "
        f"{job.length} x {job.global_batch}",
        profile=device.profile, release=f"{_source(row)} {row['version']}".strip(), job=job,
        layout=layout, tokens=_tokens(row, job), measured=_memory(row),
        routing="natural" if job.routing == NATURAL else "forced", assumed=tuple(assumed),
        target=system.target, ran_out=row["oom"] == "yes", device_bytes=device.memory_bytes,
        facts=_facts(row, system, job),
        document="" if row["version"] else row["source"].split("@")[0],
    )  # fmt: skip


def _facts(row: _Row, system: System, job: TrainingJob) -> Mapping[str, Any]:
    """Return what of the target's facts the run has otherwise."""
    facts = dict(system.facts)
    if _hides_tensor_comm(row, system, job):
        facts |= {"overlaps_input_scatter": True, "multiplies_in_pieces": True}
    if system.target == "torchtitan":
        facts |= _of_torchtitan(row, job)
    if row.get("fuses_activations") == "no":
        facts["kernels"] = _UNFUSED
    if row.get("in_pieces") == "yes":
        facts |= {"overlaps_input_scatter": False, "multiplies_in_pieces": True}
    if row.get("logit_bytes"):
        facts["logit_bytes"] = int(row["logit_bytes"])
    for name in _YES_OR_NO:
        if row.get(name):
            facts[name] = row[name] == "yes"
    return facts


def _of_torchtitan(row: _Row, job: TrainingJob) -> dict[str, Any]:
    """Return what of torchtitan's facts the run has otherwise, by its date."""
    date, tp, facts = row["source_date"], _size(row["tp"]), dict[str, Any]()
    if date < CHUNKED_LOSS:
        facts["loss_chunks"] = 1
    if "compile" in row["dispatcher_overlap_note"] or row.get("compiled") == "yes":
        facts["kernels"] = _COMPILED
        if date > _COMPILES_LOSS:
            facts["logit_bytes"] = _COMPILED_LOGIT_BYTES
    if job.decoder.name.startswith("qwen3") and date < _GATHERS_HEADS and tp > 1:
        facts["kernels"] = replace(TORCHTITAN, rotary=(_OF_ALL_HEADS * tp - 2, 8))
    if row.get("in_pieces") == "yes":
        facts["copies_sequence"] = False
    return facts


def _hides_tensor_comm(row: _Row, system: System, job: TrainingJob) -> bool:
    """Return whether GEMMs hide the exchanges of tensor ranks: in recipes of dense models.

    They need shared sequences, and have no NVFP4 (Megatron-Bridge, perf_recipes/llama).
    """
    if job.decoder.num_moe_layers or job.dtype == "nvfp4" or row.get("splits_sequence") == "no":
        return False
    return system.hides_tensor_comm


def _refuse(row: _Row) -> None:
    """Refuse a row by what the planner does not have.

    Raises:
        ValueError: it is one of those.
    """
    if row.get("skip"):
        raise ValueError(row["skip"])
    note = f"{row['dispatcher_overlap_note']} {row['recompute']}".lower()
    for word, reason in _CANNOT.items():
        if word in note:
            raise ValueError(reason)
    text = f"{row['source']} {row['model']} {row['model_config_note']}".lower()
    if " peft" in text or "_peft" in text or "lora" in text:
        raise ValueError("LoRA trains a part of the parameters alone")
    if row["oom"].startswith("hang"):
        raise ValueError("it neither ran nor ran out of memory: it hung")
    if row["precision"] in {"mxfp8 linears", "mxfp8 grouped GEMM", "mxfp8 dense"}:
        raise ValueError("a part of its GEMMs alone has 8 bits")
    if "other recipe" in row["precision"]:
        raise ValueError("its 8-bit recipe is not named")


def _device(row: _Row) -> Device:
    gpu = row["gpu"]
    if not gpu:
        raise ValueError("its GPU is not said")
    device = next((device for word, device in DEVICES.items() if gpu.startswith(word)), None)
    if device is None:
        raise ValueError(f"there is no reference profile of {gpu!r}")
    return device


def _layout(row: _Row, system: System, decoder: Decoder, assumed: list[str]) -> FoldedLayout:
    tp, cp, pp, ep = (_size(row[name]) for name in ("tp", "cp", "pp", "ep"))
    if not row["nodes_or_gpus"]:
        raise ValueError("its number of GPUs is not said")
    world = int(row["nodes_or_gpus"])
    note = row["dispatcher_overlap_note"].lower()
    schedule, vpp = _schedule(row, note)
    is_sharded = "fsdp" in note or bool(row.get("fsdp"))
    if not row["micro_batch"]:
        raise ValueError("its micro-batch is not said")
    is_cut = system.target == "torchtitan" and pp > 1
    micro_batch = 1 if is_cut else int(row["micro_batch"])
    plain = FoldedLayout(
        dp=world // (tp * cp * pp), cp=cp, tp=tp, pp=pp, vpp=vpp, ep=ep,
        etp=int(row["etp"]) if row["etp"] else system.etp(tp, decoder.num_moe_layers),
        micro_batch=micro_batch, zero=_zero(system, pp, is_sharded=is_sharded),
        dispatcher=_dispatcher(note, system, assumed), schedule=schedule,
        overlap="batch" if _overlaps(note) else "none", cuda_graphs=_graphs(note),
        offload_optimizer=1.0 if "optimizer on cpu" in note else 0.0,
        offload_activations=float(row.get("offload_activations") or 0), stages=_stages(note),
    )  # fmt: skip
    return replace(plain, recompute=_recompute(row, system, decoder, assumed))


def _zero(system: System, pp: int, *, is_sharded: bool) -> ZeroStage:
    """Return the ZeRO stage: torchtitan keeps gathered parameters between stages' passes."""
    if system.target == "torchtitan" and pp > 1:
        return 2
    return 3 if is_sharded else system.zero


def _job(row: _Row, system: System, decoder: Decoder, layout: FoldedLayout) -> TrainingJob:
    if not row["seq"]:
        raise ValueError("its sequence length is not said")
    local = int(row["micro_batch"]) * layout.dp
    sequences = row["global_batch"] or ("" if system.target != "torchtitan" else str(local))
    if not sequences:
        sequences = str(_batch_of_step(row, layout))
    if not sequences.isdigit():
        raise ValueError(f"its global batch is {sequences!r}")
    is_natural = decoder.num_moe_layers > 0 and _is_natural(row, system)
    return TrainingJob(
        decoder=decoder, world_size=layout.world_size, global_batch=int(sequences),
        length=int(row["seq"]), dtype=read_dtype(row["precision"] or system.dtype),
        routing=NATURAL if is_natural else BALANCED,
        optimizer=_optimizer(row, system),
    )  # fmt: skip


def _optimizer(row: _Row, system: System) -> OptimizerName:
    said = row.get("optimizer")
    return next((name for name in OPTIMIZERS if name == said), system.optimizer)


def _batch_of_step(row: _Row, layout: FoldedLayout) -> int:
    """Return the sequences of a step, from tokens and seconds, to a multiple of the replicas."""
    if row["tokens_per_s_per_gpu"] and row["step_seconds"]:
        tokens = float(row["tokens_per_s_per_gpu"]) * float(row["step_seconds"])
        sequences = tokens * layout.world_size / int(row["seq"])
        replicas = layout.dp * layout.micro_batch
        return max(1, round(sequences / replicas)) * replicas
    return layout.dp * layout.micro_batch * max(layout.pp * 2, 8)


def _is_natural(row: _Row, system: System) -> bool:
    words = f"{row['notes']} {row['dispatcher_overlap_note']}"
    if "forced" in words or "perf recipe" in words:
        return "natural routing" in words and "forced" not in words and "perf" not in words
    return system.is_natural or "natural" in words


def _tokens(row: _Row, job: TrainingJob) -> float | None:
    """Return tokens a second and device as printed, of the step, or of the TFLOP/s.

    None of Megatron-LM's functional tests: they run kernels that repeat to the bit, attention
    without a fused kernel among them (`--deterministic-mode`, `--attention-backend: unfused`). And
    none of fine-tuning on real data, whose samples are shorter than the sequence by what no card
    says, or of a device that is inferred.
    """
    is_padded, is_inferred = "card.yaml sft" in row["source"], "inferred" in row["gpu"]
    if is_padded or is_inferred or "golden values" in row["version"]:
        return None
    printed, seconds = row["tokens_per_s_per_gpu"], row["step_seconds"]
    of_batch = job.tokens / job.world_size
    if printed and not _contradicts(row, of_batch):
        return float(printed)
    if seconds:
        return of_batch / float(seconds)
    if row["tflops_per_gpu"]:
        flops = job.decoder.flops_per_token(job.length).total
        return float(row["tflops_per_gpu"]) * 1e12 / flops
    return None


def _contradicts(row: _Row, of_batch: float) -> bool:
    """Return whether tokens a second are other than those of the whole batch: without padding."""
    if not (row["step_seconds"] and row["global_batch"]):
        return False
    tokens = float(row["tokens_per_s_per_gpu"]) * float(row["step_seconds"])
    return abs(tokens / of_batch - 1) > _SAME_TOKENS


def _memory(row: _Row) -> MeasuredMemory | None:
    if not row["peak_memory_gib"] or row["oom"] == "yes":
        return None
    scope, unit = system_of(row["framework"]).memory_scope, 2.0**30
    words = f"{row['notes']} {row['source']}"
    if "nvidia-smi" in words or "MiB observed" in words:
        scope = "device"
    elif "reserved" in words:
        scope = "reserved"
    if "yangwhale" in words:
        unit = 1000 * 2.0**20
    elif "as printed" in words or "GB max over ranks" in words or "BastiaanGroot" in words:
        unit = 1e9
    is_last = "last pipeline stage" in words or "golden" in row["version"]
    return MeasuredMemory(
        bytes=float(row["peak_memory_gib"]) * unit, scope=scope, of_last_rank=is_last
    )


def _size(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 1


def _schedule(row: _Row, note: str) -> tuple[Schedule | None, int]:
    said = row["vpp"].lower() or note
    if said.isdigit():
        return None, int(said)
    words = [word.strip() for word in re.split(r"[;,]", f"{said};{note}")]
    return next((_SCHEDULES[word] for word in words if word in _SCHEDULES), (None, 1))


def _dispatcher(note: str, system: System, assumed: list[str]) -> TokenDispatcher:
    for word, dispatcher in _DISPATCHERS.items():
        if word in note:
            return dispatcher
    if note.startswith("a1 "):
        return "hybrid_ep"
    assumed.append(system.dispatcher)
    return system.dispatcher


_DISPATCHERS: Mapping[str, TokenDispatcher] = {
    "hybridep": "hybrid_ep", "deepep": "deepep", "alltoall": "all_to_all",
    "all_to_all": "all_to_all", "allgather": "all_gather",
}  # fmt: skip


def _overlaps(note: str) -> bool:
    if re.search(r"(no|without) a2a overlap", note):
        return False
    if note.startswith("a1 "):
        return True
    return bool(re.search(r"a2a overlap|ep overlap", note))


def _graphs(note: str) -> CudaGraphs:
    if "without cuda graph" in note:
        return "none"
    if "te cuda graph" in note:
        return "partial"
    if "full-iteration" in note or note.startswith("a1 "):
        return "full"
    return "partial" if "cuda graph" in note else "none"


def _stages(note: str) -> tuple[str, ...] | None:
    match = re.search(r"layout (\S+)", note)
    if match is None:
        return None
    return read_stages(match[1].replace("tl", "tL").replace("l", "L").replace("e", "E"))


def _recompute(
    row: _Row, system: System, decoder: Decoder, assumed: list[str]
) -> tuple[Recompute, ...]:
    text = row["recompute"]
    if not text:
        assumed.append("recompute " + (",".join(system.recompute) or "none"))
        return system.recompute
    if text.startswith("selective") and "moe_act" not in text:
        return system.selective
    modules = read_modules(text.split("(")[0].removeprefix("selective "))
    return tuple(module for module in modules if module in decoder.modules)


def _source(row: _Row) -> str:
    return re.split(r"[ @#]", row["source"])[0]
