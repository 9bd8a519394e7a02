"""Readers of launch files of any kind: scripts, programs and configurations."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from moetune.domain.errors import InputError
from moetune.launches.accelerate import KIND, dialect_of
from moetune.launches.arguments import PER_DEVICE, Launch, arguments_of, find_launch
from moetune.launches.bridge import bridge_entries, read_bridge, titan_entries, yaml_launch
from moetune.launches.commands import SOURCED
from moetune.launches.entries import Entry, entries_of
from moetune.launches.expansion import Word
from moetune.launches.foreign import BRIDGE_KEYS, check_runtime, check_text, is_axolotl
from moetune.launches.keyed import (
    DEEPSPEED,
    REPLICATED,
    TITAN,
    TRANSFORMERS,
    Dialect,
    read_keyed,
)
from moetune.launches.launch_file import DATA, Copy, KeyedFile, LaunchFile, MegatronFile
from moetune.launches.megatron import KEYS, plain_value, read_megatron
from moetune.launches.performance import performance_run
from moetune.launches.programs import program_entries, ranks_of
from moetune.launches.reading import LARGEST_BYTES, Asked, Problem
from moetune.launches.shell import read_script
from moetune.launches.trainer import trainer_entries, with_named_files
from moetune.launches.verl import is_verl, read_verl

_TITAN_KEYS = {
    "tensor_parallel_degree", "data_parallel_shard_degree", "local_batch_size",
    "expert_parallel_degree", "pipeline_parallel_degree", "num_tokens_per_microbatch_per_dp_rank",
}  # fmt: skip
_STAGE = "zero_optimization.stage"


def launch_text(file: Path) -> str:
    """Return the text of a launch file.

    Raises:
        InputError: the file cannot be read, is too large, or is no text.
    """
    try:
        if file.stat().st_size > LARGEST_BYTES:
            raise InputError(f"{file} is larger than 1 MiB", "give the file that starts the run")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}", "give a file") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is no text", "give the file that starts the run") from None


def open_launch(name: str, text: str, asked: Asked) -> LaunchFile:
    """Return a launch file from its text.

    Args:
        name: name of the file, whose ending gives its kind.

    Raises:
        InputError: the kind is unknown, or a value is missing or wrong.
    """
    if len(text) > LARGEST_BYTES or "\0" in text:
        fault = "larger than 1 MiB" if len(text) > LARGEST_BYTES else "no text"
        raise InputError(f"{name} is {fault}", "give the file that starts the run")
    if name.endswith((".toml", ".json", ".yaml", ".yml", ".py")):
        return _configuration(name, text, asked)
    script = read_script(text, extra=asked.extra, values=asked.values, folder=asked.folder)
    try:
        launch, cuts = find_launch(script, KEYS)
    except InputError:
        for field in ("command", "text"):  # in a text that the script writes
            check_text(name, text, field)
        raise
    file = _keyed_launch(launch, name, text, asked)
    return _megatron_file(launch, cuts, text, asked) if file is None else file


def _keyed_launch(launch: Launch, name: str, text: str, asked: Asked) -> KeyedFile | None:
    """Return the file of a command of verl, torchtitan, Bridge or the Trainer, else None."""
    file = None
    if is_verl(launch):
        file = KeyedFile(reading=read_verl(launch, asked), text=text, name=name, asked=asked)
    elif entries := titan_entries(launch):
        entries = with_named_files(entries, asked)
        file = _keyed_file(TITAN, entries, text, asked, ranks=launch.ranks)
    elif run := performance_run(launch, asked.world_size):
        named = replace(asked, world_size=run.ranks, model=asked.model or run.model)
        entries = (*run.entries, *bridge_entries(launch))
        reading = read_bridge(entries, named, line=launch.line)
        file = KeyedFile(reading=reading, text=text, name=name, asked=asked)
    elif entries := bridge_entries(launch):
        ranks = launch.ranks(asked)
        reading = read_bridge(entries, replace(asked, world_size=ranks), line=launch.line)
        file = KeyedFile(reading=reading, text=text, name=name, asked=asked)
    elif entries := trainer_entries(launch, asked):
        counted = None if any(entry.path == "num_processes" for entry in entries) else launch.ranks
        dialect = _engine(entries, launch.starter)
        file = _keyed_file(dialect, entries, text, asked, name=name, ranks=counted)
    return file and replace(file, notes=launch.notes)


def read_again(launch: LaunchFile, copy: Copy) -> LaunchFile:
    """Return a copy of a file, read with the same question."""
    asked = replace(launch.asked, extra=(*launch.asked.extra, *copy.words))
    return open_launch(launch.name, copy.text, asked)


def _megatron_file(
    launch: Launch, cuts: Iterable[Problem], text: str, asked: Asked
) -> MegatronFile:
    if all(argument.name.replace("-", "_") not in KEYS for argument in launch.arguments):
        raise InputError(
            f"line {launch.line}: no argument of the command is known",
            "give the script that has them; the YAML of --config has to be next to the script",
        )
    try:
        reading = read_megatron(launch, asked)
    except InputError as error:
        if launch.packing and "nothing gives" in error.what:
            raise InputError(error.what, launch.packing) from None
        lines = ", ".join(str(note.line) for note in launch.notes if SOURCED in note.text)
        if not lines:
            raise
        hint = f"{error.hint}; files that the script reads (line {lines}) are left aside"
        raise InputError(error.what, hint) from None
    return MegatronFile(reading=reading, launch=launch, text=text, asked=asked, cuts=(*cuts,))


def _engine(entries: tuple[Entry, ...], starter: str = "") -> Dialect:
    """Return the dialect of Trainer's keys, by the engine that they name.

    Args:
        starter: the launcher of the ranks; "" if the keys are not a command's.
    """
    paths = {entry.path for entry in entries}
    values = {path.rpartition(".")[2]: value for path, value, *_ in entries}
    kind = values.get(KIND)
    has_file = values.get("deepspeed_config_file") and kind in (None, "DEEPSPEED")
    if has_file or values.get("deepspeed") or any(path.endswith(_STAGE) for path in paths):
        return DEEPSPEED
    if kind is not None:
        return dialect_of(str(kind))
    if "zero_stage" in values or values.get("use_deepspeed"):
        return DEEPSPEED
    has_shards = any("fsdp" in path and path != "fsdp_config" for path in paths)
    if starter and not has_shards and (file := values.get("config_file")):
        hint = "check the script in the folder that has it, or put it next to the script"
        raise InputError(f"{file} is not there, and the engine stands in it", hint)
    is_replicated = (starter and not has_shards) or values.get("enable_fsdp") is False  # of oumi
    return REPLICATED if is_replicated else TRANSFORMERS


def _configuration(name: str, text: str, asked: Asked) -> LaunchFile:
    """Return a configuration as a launch file; its keys decide which kind it is."""
    function = asked.extra[0] if asked.extra and asked.extra[0].isidentifier() else ""
    if name.endswith(".py"):
        entries = program_entries(name, text, function, asked.values)
        asked = replace(asked, world_size=asked.world_size or ranks_of(function))
    else:
        check_text(name, text)
        entries = entries_of(name, text)
        check_runtime(entries)
    axolotl = name.endswith(DATA) and is_axolotl(entries)
    leaves = {entry.path.rpartition(".")[2] for entry in entries}
    if "MODEL_ARGS" in {entry.path.partition(".")[0] for entry in entries}:
        launch = yaml_launch(entries, asked)
        reading = read_megatron(launch, asked)
        return MegatronFile(reading=reading, launch=launch, text=text, asked=asked, name=name)
    if leaves & _TITAN_KEYS:
        return _keyed_file(TITAN, entries, text, asked, name=name)
    if leaves & BRIDGE_KEYS:
        overrides = (word.partition("=") for word in asked.extra if re.match(r"[\w.]+=", word))
        more = (Entry(path, plain_value(value), 0) for path, _, value in overrides)
        reading = read_bridge((*entries, *more), asked, line=1)
        return KeyedFile(reading=reading, text=text, name=name, asked=asked)
    extra = tuple(
        Entry(argument.name.replace("-", "_"), plain_value(argument.values[0].text), 0)
        for argument in arguments_of(tuple(Word(word, 0) for word in asked.extra))
        if argument.values
    )
    entries = (*with_named_files(entries, asked), *extra)
    dialect = _engine(entries, "accelerate" if axolotl else "")
    if dialect is DEEPSPEED or "train_micro_batch_size_per_gpu" in leaves:
        return _keyed_file(DEEPSPEED, entries, text, asked, name=name)
    if axolotl or leaves & {PER_DEVICE, "distributed_type", "fsdp_version"}:
        return _keyed_file(dialect, entries, text, asked, name=name)
    raise InputError(
        f"{name} is of no kind that is known",
        "give a shell script, a torchtitan TOML, a program of Megatron-Bridge, a DeepSpeed JSON, "
        "an accelerate YAML, or TrainingArguments",
    )


def _keyed_file(
    dialect: Dialect, entries: tuple[Entry, ...], text: str, asked: Asked, *, name: str = "",
    ranks: Callable[[Asked], int] | None = None,
) -> KeyedFile:  # fmt: skip
    if ranks is not None:
        asked = replace(asked, world_size=ranks(asked))
    reading = read_keyed(dialect, entries, asked)
    return KeyedFile(reading=reading, text=text, name=name, asked=asked, dialect=dialect)
