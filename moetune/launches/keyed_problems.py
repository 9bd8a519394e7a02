"""Problems of a configuration's keys: unknown, not read, or priced as something else."""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from moetune.export.keys import Value, names_of
from moetune.export.transformers import DISTRIBUTED
from moetune.launches.entries import Entry
from moetune.launches.programs import BRANCH
from moetune.launches.reading import Given, Problem, Severity

ALIASES = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "max_seq_length": "seq_len", "max_length": "seq_len", "model_max_length": "seq_len",
    "cutoff_len": "seq_len", "max_seq_len": "seq_len",
    "model_name_or_path": "model_name", "zero_stage": "zero_optimization.stage",
    "MODEL": "model_name", "parallelism_config_tp_size": "tp_size",
    "deepspeed_config_file": "deepspeed",
    "activation_checkpointing": "fsdp_activation_checkpointing",
    "enable_gradient_checkpointing": "gradient_checkpointing", "base_model": "model_name",
    "micro_batch_size": "train_micro_batch_size_per_gpu", "sequence_len": "seq_len",
    "use_gradient_checkpointing": "gradient_checkpointing",  # of unsloth
    "expert_parallel_comm_backend": "moe_comm_backend",  # of older torchtitan
}  # fmt: skip
"""Keys of other tools, with the dialects' keys that mean the same."""
TITAN_FILE = "job.config_file"
"""Argument that names torchtitan's TOML."""
_NEAR = 0.95
_OF_SWIFT = re.compile(r"zero([0-3])(?:_offload)?$")
_STAGE_IN_NAME = re.compile(r"(?i)(?:z|zero|stage)[-_]?([0-3])(?!\d)")
_OF_A_FILE = 3
"""Assumed ZeRO stage of a DeepSpeed file that is not read."""
_AS_ELSE: tuple[tuple[str, tuple[Value, ...], str], ...] = (
    (r"offload_(optimizer|param)[._]device|offload_params|cpu_offload",
     (None, False, "none"),
     "states in host memory are not priced"),
    (r"fsdp_(sharding_strategy|reshard_after_forward)",
     (None, True, "FULL_SHARD", "default", "always", "never"),
     "priced as if all ranks shared all states"),
    ("data_parallel_replicate_degree|parallelism_config_dp_replicate_size", (None, 1),
     "replicas that do not share shards are priced as if all shared them"),
    (r"mixed_precision(_param)?|fp16(\.enabled)?", (None, False, "auto", "bf16", "bfloat16"),
     "priced as bfloat16"),
    ("enable_fsdp_float8_all_gather|fp8_all_gather", (None, False),
     "weights are gathered in bfloat16"),
    ("load_in_8bit", (None, False), "frozen weights are priced in bfloat16"),
    (r"rl|rlhf_type|(?<![._])stage", (None, False, "sft", "pt", 0, 1, 2, 3),
     "a step of supervised training is priced"),
    ("trainer", (None, "Trainer", "SFTTrainer", "UnslothTrainer", "Seq2SeqTrainer",
                 "train_on_responses_only"),
     "a step of supervised training is priced"),
    ("(use|enable)_liger(_kernel)?", (None, False),
     "logits are priced as without Liger's fused loss"),
)  # fmt: skip
"""Ends of keys, with the values that are priced exactly, and how other values are priced."""
_ON_HOST = re.compile(
    r"(?:^|[._])(?:offload_(optimizer|param)[._]device|(zero_optimization.)?cpu_offload"
    r"|offload_params)$"
)
_ALL_STATES = ("gradients", "optimizer", "parameters")
_HELD = {"optimizer": _ALL_STATES[:2], "param": _ALL_STATES[2:]}
"""Parts of memory that wait on the host, by what a key of DeepSpeed offloads."""
_OF_TITAN = (
    ("converters", "float8", "products in float8 are priced as in bfloat16"),
    ("optimizer", "muon", "Muon and its states are priced as AdamW"),
)


def priced_as_else(given: Mapping[str, Given], ranks: int) -> Iterator[Problem]:
    """Yield the keys whose values are priced as another value."""
    del ranks
    for place in {place.written: place for place in given.values()}.values():
        for ends, priced, what in _AS_ELSE:
            if re.search(rf"(^|[._])({ends})$", place.written) and place.value not in priced:
                yield Problem(severity="note", line=None if place.file else place.line,
                              what=f"{place.written} {place.value}: {what}")  # fmt: skip


def host_parts(given: Mapping[str, Given]) -> frozenset[str]:
    """Return the parts of memory that wait on the host: `zero_offload` and `fully_shard` do that.

    Source: `runtime/zero/stage_1_and_2.py` and `stage3.py` of DeepSpeed 0.19, whose gradients go
    where the optimizer is; `_fsdp_api.py` of torch 2.13, CPUOffloadPolicy.
    """
    parts: set[str] = set()
    for place in given.values():
        match = _ON_HOST.search(place.written)
        if match is not None and place.value not in (None, False, "none", "false"):
            name = "optimizer" if match[2] else match[1]
            parts |= {*_HELD.get(name, _ALL_STATES)}
    named = str(given["deepspeed"].value) if "deepspeed" in given else ""
    if _OF_SWIFT.match(named) and "offload" in named:
        parts |= {*_ALL_STATES} if stage_of(named) == _OF_A_FILE else {*_HELD["optimizer"]}
    return frozenset(parts)


def titan_problems(given: Mapping[str, Given], ranks: int) -> Iterator[Problem]:
    """Yield torchtitan's keys that are not read, or priced as something else."""
    yield from priced_as_else(given, ranks)
    if (file := given.get(TITAN_FILE)) is not None:  # which is not there
        yield Problem(
            severity="note", line=file.line, what=f"{file.value} is not read with this file",
            why="keys that are not given have their defaults", fix="check it next to that file",
        )  # fmt: skip
    stages = given.get("pipeline_parallel_degree")
    reshards = given.get("fsdp_reshard_after_forward")
    is_piped = stages is not None and stages.value != 1
    if is_piped and reshards is not None and reshards.value == "always":
        yield Problem(
            severity="note", line=reshards.line, fix="default",
            what=f"{reshards.written} always gathers weights for each micro-batch of a pipeline, "
            "and is priced as never",
        )  # fmt: skip
    for key, word, what in _OF_TITAN:
        place = given.get(key)
        if place is not None and word in str(place.value).lower():
            yield Problem(severity="note", line=place.line, what=f"{place.written}: {what}")


def engine_problems(given: Mapping[str, Given], ranks: int) -> Iterator[Problem]:
    """Yield DeepSpeed's keys and files that are not read, or priced as something else."""
    yield from priced_as_else(given, ranks)
    engine = given.get("deepspeed")
    if engine is None or not isinstance(engine.value, str):
        return
    if not _OF_SWIFT.match(engine.value):
        yield Problem(
            severity="note", line=engine.line, what=f"{engine.value} is not read with this file",
            why=f"its ZeRO stage is taken as {stage_of(engine.value)}",
            fix="check it, with this file's keys behind --",
        )  # fmt: skip
    elif "offload" in engine.value:
        yield Problem(severity="note", line=engine.line,
                      what=f"{engine.value}: states in host memory are not priced")  # fmt: skip


def stage_of(engine: str) -> int:
    """Return the ZeRO stage in a name such as zero2_offload or ds_z2_config.json; else 3."""
    match = _STAGE_IN_NAME.search(engine.rpartition("/")[2])
    return int(match[1]) if match else _OF_A_FILE


def shard_problems(given: Mapping[str, Given], ranks: int) -> Iterator[Problem]:
    """Yield keys that are priced as something else, and a note if the file names no engine."""
    yield from priced_as_else(given, ranks)
    engines = ("fsdp", *names_of(DISTRIBUTED))
    if ranks > 1 and not any(name in key for key in given for name in engines):
        yield Problem(
            severity="note", line=None, what="the file names no engine: FSDP is taken, over all "
            "ranks", fix="the command that starts it, or -- --deepspeed FILE",
        )  # fmt: skip


def replica_problems(given: Mapping[str, Given], ranks: int) -> Iterator[Problem]:
    """Yield keys that are priced as something else, and a note that no states are sharded."""
    yield from priced_as_else(given, ranks)
    yield Problem(
        severity="note", line=None, what="no engine shards states: every rank has all of them",
        why="DistributedDataParallel, priced as stage 0 of ZeRO",
        fix="DeepSpeed's stage 3, or FSDP",
    )  # fmt: skip


def branches(entries: Iterable[Entry]) -> Iterator[Problem]:
    """Yield a note if a program has branches whose test has no value."""
    lines = ", ".join(dict.fromkeys(str(entry.line) for entry in entries if entry.path == BRANCH))
    if lines:
        yield Problem(
            severity="note", line=None, why="the last value counts",
            what=f"branches whose test has no value here are all read (line {lines})",
        )  # fmt: skip


def misspellings(
    entries: Iterable[Entry], keys: Collection[str], severity: Severity, why: str
) -> Iterator[Problem]:
    """Yield keys that are a letter or two from a known key."""
    leaves = {key.rpartition(".")[2] for key in keys}
    for entry in entries:
        leaf = entry.path.rpartition(".")[2]
        near = difflib.get_close_matches(leaf, leaves - {leaf}, n=1, cutoff=_NEAR)
        if near and leaf not in leaves and leaf not in ALIASES:
            where = f" in {entry.file}" if entry.file else ""
            yield Problem(severity=severity, line=None if entry.file else entry.line,
                          what=f"{entry.path}{where} is unknown", why=why,
                          fix=near[0])  # fmt: skip
