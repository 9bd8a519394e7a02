"""A launch file of any kind: opened, read, checked, and written with changes."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

from moetune.domain.errors import InputError
from moetune.domain.site import Site
from moetune.domain.training import FoldedLayout
from moetune.export.keys import Value, keys_of, names_of
from moetune.export.megatron_values import DDP, EXPERTS, LAYOUT, NARROW, SETTINGS
from moetune.launches.accelerate import KIND, dialect_of
from moetune.launches.arguments import PER_DEVICE, Launch, arguments_of, find_launch
from moetune.launches.bridge import bridge_entries, read_bridge, titan_entries, yaml_launch
from moetune.launches.entries import Entry, entries_of
from moetune.launches.expansion import Word
from moetune.launches.foreign import BRIDGE_KEYS, check_runtime, check_text, is_axolotl
from moetune.launches.keyed import (
    COMMAND,
    DEEPSPEED,
    REPLICATED,
    TITAN,
    TRANSFORMERS,
    Dialect,
    key_as_written,
    keyed_changes,
    read_keyed,
    short_value,
)
from moetune.launches.keyed_edit import keyed_text
from moetune.launches.megatron import KEYS, flag_of_key, plain_value, read_megatron
from moetune.launches.megatron_changes import (
    argument_text,
    argument_words,
    edit_script,
    megatron_changes,
)
from moetune.launches.megatron_checks import Context, megatron_problems
from moetune.launches.places import Code
from moetune.launches.programs import program_entries, ranks_of
from moetune.launches.reading import LARGEST_BYTES, Asked, Problem, Reading
from moetune.launches.shell import SOURCED, read_script
from moetune.launches.trainer import trainer_entries, with_named_files
from moetune.launches.verl import is_verl, read_verl

BRIDGE_GROUPS = {
    "ddp": names_of(DDP), "train": ("micro_batch_size", "global_batch_size"),
    "optimizer": (*keys_of(SETTINGS, "optimizer"), *keys_of(SETTINGS, "offload_optimizer")),
    "checkpoint": ("ckpt_format",), "model": names_of((*LAYOUT, *EXPERTS, *NARROW)),
}  # fmt: skip
"""Megatron's fields by the part of Megatron-Bridge's configuration that has them."""
_TITAN_KEYS = {
    "tensor_parallel_degree", "data_parallel_shard_degree", "local_batch_size",
    "expert_parallel_degree", "pipeline_parallel_degree", "num_tokens_per_microbatch_per_dp_rank",
}  # fmt: skip
_DATA = (".json", ".yaml", ".yml")
"""Endings of files without code, which a command or a program reads."""
_MODE, _POLICY = "activation_checkpoint.mode", "activation_checkpoint"
"""torchtitan's activation checkpointing: a word in TOML, and in programs an imported class."""
_POLICIES = "torchtitan.distributed.activation_checkpoint"
_IMPORTS = re.compile(r"(?m)^from torchtitan\b")
_STAGE = "zero_optimization.stage"
_DISTRIBUTED = "use_distributed_optimizer"
_VIRTUAL = "virtual_pipeline_model_parallel_size"
_OF_ARGUMENTS = "num_virtual_stages_per_pipeline_rank"


class Copy(NamedTuple):
    """A file with changes, and arguments that its command needs with it."""

    text: str
    words: tuple[str, ...] = ()


class LaunchFile(Protocol):
    """A file that launches a training in some runtime."""

    @property
    def reading(self) -> Reading:
        """The training that the file starts."""
        ...

    def problems(self, site: Site | None) -> Iterator[Problem]:
        """Yield what stops, costs or surprises, except for broken rules of layouts."""
        ...

    def changes(self, layout: FoldedLayout, facts: Collection[str]) -> dict[str, Value]:
        """Return the keys whose value differs in another layout, with their new values."""
        ...

    def words(self, changes: Mapping[str, Value]) -> str:
        """Return changes as the file would write them."""
        ...

    def key_of(self, name: str) -> str:
        """Return the runtime's key for an attribute of the layout, as it is written."""
        ...

    def written(self, changes: Mapping[str, Value]) -> Copy:
        """Return the file with changes."""
        ...

    def read_again(self, copy: Copy) -> "LaunchFile":
        """Return a copy of the file, read with the same question."""
        ...


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
        check_text(name, text, "command")  # in a text that the script writes
        raise
    if is_verl(launch):
        return KeyedFile(reading=read_verl(launch, asked), text=text, name=name, asked=asked)
    if (entries := titan_entries(launch)) or (bridge := bridge_entries(launch)):
        if entries:
            entries = with_named_files(entries, asked)
            return _keyed_file(TITAN, entries, text, asked, ranks=launch.ranks)
        ranks = launch.ranks(asked)
        reading = read_bridge(bridge, replace(asked, world_size=ranks), line=launch.line)
        return KeyedFile(reading=reading, text=text, name=name, asked=asked)
    if entries := trainer_entries(launch, asked):
        counted = None if any(entry.path == "num_processes" for entry in entries) else launch.ranks
        dialect = _engine(entries, launch.starter)
        return _keyed_file(dialect, entries, text, asked, name=name, ranks=counted)
    return _megatron_file(launch, cuts, text, asked)


def _megatron_file(
    launch: Launch, cuts: Iterable[Problem], text: str, asked: Asked
) -> "MegatronFile":
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
    axolotl = name.endswith(_DATA) and is_axolotl(entries)
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
) -> "KeyedFile":  # fmt: skip
    if ranks is not None:
        asked = replace(asked, world_size=ranks(asked))
    reading = read_keyed(dialect, entries, asked)
    return KeyedFile(reading=reading, text=text, name=name, asked=asked, dialect=dialect)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedFile:
    """A configuration whose keys set the layout.

    Args:
        dialect: form of the configuration; None for Megatron-Bridge, whose keys are fields.
    """

    reading: Reading
    text: str
    name: str
    asked: Asked
    dialect: Dialect | None = None

    def problems(self, site: Site | None) -> Iterator[Problem]:
        """Yield the problems of the keys."""
        del site
        yield from self.reading.problems

    def changes(self, layout: FoldedLayout, facts: Collection[str]) -> dict[str, Value]:
        """Return the keys whose value differs in another layout, with their new values."""
        if self.dialect is None:
            changes = megatron_changes(self.reading, layout, facts)
            if self.reading.job.optimizer == "muon" and _DISTRIBUTED in changes:
                is_shared = changes.pop(_DISTRIBUTED)
                changes["optimizer"] = "dist_muon" if is_shared else "muon"
            virtual = changes.pop(_OF_ARGUMENTS, None)  # which a configuration does not have
            usual = {key: default for setting in SETTINGS for key, default in setting.keys.items()}
            said = {key: usual.get(key) if value is None else value
                    for key, value in changes.items()}  # fmt: skip
            return said if virtual is None else {**said, _VIRTUAL: virtual}
        changes = keyed_changes(self.dialect, self.reading, layout)
        if self.name.endswith(".py") and (mode := changes.pop(_MODE, None)):
            changes[_POLICY] = None if mode == "none" else Code(f"{str(mode).title()}AC.Config()")
        keys = (key for name in facts for key in keys_of(self.dialect.settings, name))
        return {**changes, **dict.fromkeys(keys, True)}

    def words(self, changes: Mapping[str, Value]) -> str:
        """Return changes as assignments, and as arguments those that the file's command takes."""
        flags = self._flags(changes)
        given = {key: place.written for key, place in self.reading.given.items()}
        inside = (f"{key_as_written(key, given)} = {short_value(value)}"
                  for key, value in changes.items() if key not in flags)  # fmt: skip
        arguments = (f"{flag} {short_value(changes[key])}" for key, flag in flags.items())
        return ", ".join((*inside, *arguments))

    def key_of(self, name: str) -> str:
        """Return the key for an attribute of the layout."""
        settings = SETTINGS if self.dialect is None else self.dialect.settings
        return next(iter(keys_of(settings, name)), "")

    def written(self, changes: Mapping[str, Value]) -> Copy:
        """Return the file with changed values and added keys."""
        groups = BRIDGE_GROUPS if self.dialect is None else self.dialect.keys_by_table
        given = self.reading.given
        arguments = self._flags(changes)
        inside = {key: value for key, value in changes.items() if key not in arguments}
        text = keyed_text(self.name, self.text, given, groups, inside)
        classes = (str(value).partition(".")[0] for value in inside.values()
                   if isinstance(value, Code))  # fmt: skip
        for name in classes:
            if not re.search(rf"\bimport\b.*\b{name}\b", text):
                text = _IMPORTS.sub(f"from {_POLICIES} import {name}\n\\g<0>", text, count=1)
        pairs = ((flag, short_value(changes[key])) for key, flag in arguments.items())
        return Copy(text, tuple(chain.from_iterable(pairs)))

    def _flags(self, changes: Mapping[str, Value]) -> dict[str, str]:
        """Return the flags, by key, of values that the file's command sets, not the file."""
        given = self.reading.given
        return {
            key: f"--{given[key].written if key in given else key}"
            for key, value in changes.items() if value is not None and self._is_argument(key)
        }  # fmt: skip

    def _is_argument(self, key: str) -> bool:
        place = self.reading.given.get(key)
        if not self.name.endswith(_DATA):
            return False
        if place is None:
            return self.dialect is not None and key in self.dialect.keys_by_table.get(COMMAND, ())
        return not place.line and not place.file

    def read_again(self, copy: Copy) -> LaunchFile:
        """Return a copy of the file, read with the same question."""
        asked = replace(self.asked, extra=(*self.asked.extra, *copy.words))
        return open_launch(self.name, copy.text, asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFile:
    """A shell script with Megatron's arguments."""

    reading: Reading
    launch: Launch
    text: str
    asked: Asked
    cuts: tuple[Problem, ...] = ()
    name: str = "the copy"

    def problems(self, site: Site | None) -> Iterator[Problem]:
        """Yield what stops, costs or surprises in the script and its arguments."""
        yield from self.cuts
        generation = None if site is None else site.generation
        yield from megatron_problems(
            Context(reading=self.reading, launch=self.launch, generation=generation)
        )
        yield from self.reading.problems
        for note in self.launch.notes:
            yield Problem(severity="note", line=note.line, what=note.text)

    def changes(self, layout: FoldedLayout, facts: Collection[str]) -> dict[str, Value]:
        """Return the fields whose value differs in another layout, with their new values."""
        return megatron_changes(self.reading, layout, facts)

    def words(self, changes: Mapping[str, Value]) -> str:
        """Return changes as arguments."""
        return argument_words(changes)

    def key_of(self, name: str) -> str:
        """Return the argument for an attribute of the layout."""
        if name in ("vpp", "stages", "schedule"):
            return "--num-virtual-stages-per-pipeline-rank"
        keys = keys_of(SETTINGS, name)
        return flag_of_key(keys[0]) if keys else ""

    def written(self, changes: Mapping[str, Value]) -> Copy:
        """Return the script with changes."""
        if self.name.endswith((".yaml", ".yml")):
            given = {place.written: place for place in self.reading.given.values()}
            wanted = {key if key in given else flag_of_key(key): value or None
                      for key, value in changes.items()}  # fmt: skip
            flags = dict.fromkeys((*map(flag_of_key, names_of(SETTINGS)), *wanted))
            return Copy(keyed_text(self.name, self.text, given, {"": tuple(flags)}, wanted))
        texts = {
            key: "" if value in (None, False) else argument_text(key, value)
            for key, value in changes.items()
        }
        return Copy(edit_script(self.text, self.reading.given, texts))

    def read_again(self, copy: Copy) -> LaunchFile:
        """Return a copy of the script, read with the same question."""
        return open_launch(self.name, copy.text, self.asked)
