"""A launch file of any kind: opened, read, checked, and written with changes."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from moetune.domain.errors import InputError
from moetune.domain.site import Site
from moetune.domain.training import FoldedLayout
from moetune.export.keys import Value, keys_of
from moetune.export.megatron_values import SETTINGS
from moetune.launches.arguments import Launch, arguments_of, find_launch
from moetune.launches.bridge import bridge_entries, read_bridge, titan_entries, yaml_launch
from moetune.launches.edit import edited
from moetune.launches.entries import Entry, entries_of
from moetune.launches.expansion import Word
from moetune.launches.keyed import (
    DEEPSPEED,
    TITAN,
    TRANSFORMERS,
    Dialect,
    keyed_changes,
    read_keyed,
)
from moetune.launches.megatron import KEYS, flag_of_key, plain_value, read_megatron
from moetune.launches.megatron_changes import argument_text, argument_words, megatron_changes
from moetune.launches.megatron_checks import Context, megatron_problems
from moetune.launches.programs import program_entries, ranks_of
from moetune.launches.reading import Asked, Problem, Reading
from moetune.launches.shell import read_script
from moetune.launches.verl import is_verl, read_verl

_ASSIGNED = r"""(?<!\w)["']?{key}["']?\s*[:=]\s*("[^"]*"|'[^']*'|[^\s,#}}]+)"""
_TITAN_KEYS = {
    "tensor_parallel_degree", "data_parallel_shard_degree", "local_batch_size",
    "expert_parallel_degree", "pipeline_parallel_degree", "num_tokens_per_microbatch_per_dp_rank",
}  # fmt: skip
_BRIDGE_KEYS = {
    f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert")
}  # fmt: skip
LARGEST_BYTES = 2**20
"""Of a file that is read."""


class LaunchFile(Protocol):
    """A launch of a runtime."""

    @property
    def reading(self) -> Reading:
        """What it says."""
        ...

    def problems(self, site: Site | None) -> Iterator[Problem]:
        """Yield what of it stops, costs or surprises, rules of layouts aside."""
        ...

    def changes(self, layout: FoldedLayout, facts: Collection[str]) -> dict[str, Value]:
        """Return the keys that another layout has otherwise."""
        ...

    def words(self, changes: Mapping[str, Value]) -> str:
        """Return changes as the file would have them."""
        ...

    def key_of(self, name: str) -> str:
        """Return the runtime's key of an attribute of the layout, as it is written."""
        ...

    def written(self, changes: Mapping[str, Value]) -> str:
        """Return the file with changes."""
        ...

    def read_again(self, text: str) -> "LaunchFile":
        """Return another text as the same question asks for it."""
        ...


def open_launch(name: str, text: str, asked: Asked) -> LaunchFile:
    """Return a launch file.

    Args:
        name: of the file, whose ending says its kind.

    Raises:
        InputError: it is of an unknown kind, or something of it is missing or wrong.
    """
    if len(text) > LARGEST_BYTES:
        raise InputError(f"{name} is larger than 1 MiB", "give the file that starts the run")
    if "\0" in text:
        raise InputError(f"{name} is no text", "give the file that starts the run")
    if name.endswith((".toml", ".json", ".yaml", ".yml", ".py")):
        return _configured(name, text, asked)
    script = read_script(text, extra=asked.extra, values=asked.values)
    launch, cuts = find_launch(script, KEYS)
    if is_verl(launch):
        return KeyedFile(reading=read_verl(launch, asked), text=text, name=name, asked=asked)
    if (entries := titan_entries(launch)) or (bridge := bridge_entries(launch)):
        if entries:
            return _keyed(TITAN, entries, text, asked, ranks=launch.ranks)
        ranks = launch.ranks(asked)
        reading = read_bridge(bridge, replace(asked, world_size=ranks), line=launch.line)
        return KeyedFile(reading=reading, text=text, name=name, asked=asked)
    return MegatronFile(
        reading=read_megatron(launch, asked), launch=launch, text=text, asked=asked,
        cuts=tuple(cuts),
    )  # fmt: skip


def _configured(name: str, text: str, asked: Asked) -> LaunchFile:
    """Return a configuration, by the keys that it has."""
    function = asked.extra[0] if asked.extra and asked.extra[0].isidentifier() else ""
    if name.endswith(".py"):
        entries = program_entries(name, text, function)
        asked = replace(asked, world_size=asked.world_size or ranks_of(function))
    else:
        entries = entries_of(name, text)
    paths = {entry.path for entry in entries}
    leaves = {path.rpartition(".")[2] for path in paths}
    if "MODEL_ARGS" in {path.partition(".")[0] for path in paths}:
        launch = yaml_launch(entries, asked)
        reading = read_megatron(launch, asked)
        return MegatronFile(reading=reading, launch=launch, text=text, asked=asked)
    if leaves & _TITAN_KEYS:
        return _keyed(TITAN, entries, text, asked, name=name)
    if leaves & _BRIDGE_KEYS:
        overrides = (word.partition("=") for word in asked.extra if re.match(r"[\w.]+=", word))
        more = (Entry(path, plain_value(value), 0) for path, _, value in overrides)
        reading = read_bridge((*entries, *more), asked, line=1)
        return KeyedFile(reading=reading, text=text, name=name, asked=asked)
    extra = tuple(
        Entry(argument.name.replace("-", "_"), plain_value(argument.values[0].text), 0)
        for argument in arguments_of(tuple(Word(word, 0) for word in asked.extra))
        if argument.values
    )
    has_engine = any(entry.path == "deepspeed" and entry.value for entry in entries)
    has_stage = any(path.endswith(("zero_optimization.stage", "zero_stage")) for path in paths)
    if has_engine or has_stage or "train_micro_batch_size_per_gpu" in leaves:
        return _keyed(DEEPSPEED, (*entries, *extra), text, asked, name=name)
    if leaves & {"per_device_train_batch_size", "distributed_type", "fsdp_version"}:
        return _keyed(TRANSFORMERS, (*entries, *extra), text, asked, name=name)
    raise InputError(
        f"{name} is of no kind that is known",
        "give a shell script, a torchtitan TOML, a program of Megatron-Bridge, a DeepSpeed JSON, "
        "an accelerate YAML, or TrainingArguments",
    )


def _keyed(
    dialect: Dialect, entries: tuple[Entry, ...], text: str, asked: Asked, *, name: str = "",
    ranks: Callable[[Asked], int] | None = None,
) -> "KeyedFile":  # fmt: skip
    if ranks is not None:
        asked = replace(asked, world_size=ranks(asked))
    reading = read_keyed(dialect, entries, asked)
    return KeyedFile(reading=reading, text=text, name=name, asked=asked, dialect=dialect)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedFile:
    """A configuration whose keys say the layout.

    Args:
        dialect: None for Megatron-Bridge's, whose keys are Megatron's fields.
    """

    reading: Reading
    text: str
    name: str
    asked: Asked
    dialect: Dialect | None = None

    def problems(self, site: Site | None) -> Iterator[Problem]:
        """Yield what of the keys surprises."""
        del site
        yield from self.reading.problems

    def changes(self, layout: FoldedLayout, facts: Collection[str]) -> dict[str, Value]:
        """Return the keys that another layout has otherwise."""
        if self.dialect is None:
            return megatron_changes(self.reading, layout, facts)
        changes = keyed_changes(self.dialect, self.reading, layout)
        keys = (key for name in facts for key in keys_of(self.dialect.settings, name))
        return {**changes, **dict.fromkeys(keys, True)}

    def words(self, changes: Mapping[str, Value]) -> str:
        """Return changes as assignments."""
        return ", ".join(f"{key} = {json.dumps(value)}" for key, value in changes.items())

    def key_of(self, name: str) -> str:
        """Return the key of an attribute of the layout."""
        settings = SETTINGS if self.dialect is None else self.dialect.settings
        return next(iter(keys_of(settings, name)), "")

    def written(self, changes: Mapping[str, Value]) -> str:
        """Return the file with other values in its lines."""
        lines = self.text.splitlines(keepends=True)
        for key, value in changes.items():
            place = self.reading.given.get(key)
            line = lines[place.line - 1] if place is not None and place.line else ""
            match = re.search(_ASSIGNED.format(key=re.escape(key.rpartition(".")[2])), line)
            if place is None or match is None or value is None:
                raise InputError(
                    f"{key} stands in no line of the file", f"write it by hand: {key} = {value}"
                )
            new = json.dumps(list(value) if isinstance(value, tuple) else value)
            lines[place.line - 1] = line[: match.start(1)] + new + line[match.end(1) :]
        return "".join(lines)

    def read_again(self, text: str) -> LaunchFile:
        """Return another text."""
        return open_launch(self.name, text, self.asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFile:
    """A shell script with Megatron's arguments."""

    reading: Reading
    launch: Launch
    text: str
    asked: Asked
    cuts: tuple[Problem, ...] = ()

    def problems(self, site: Site | None) -> Iterator[Problem]:
        """Yield what of the script and its arguments stops, costs or surprises."""
        yield from self.cuts
        generation = None if site is None else site.generation
        yield from megatron_problems(
            Context(reading=self.reading, launch=self.launch, generation=generation)
        )
        yield from self.reading.problems
        for note in self.launch.notes:
            yield Problem(severity="note", line=note.line, what=note.text)

    def changes(self, layout: FoldedLayout, facts: Collection[str]) -> dict[str, Value]:
        """Return the fields that another layout has otherwise."""
        return megatron_changes(self.reading, layout, facts)

    def words(self, changes: Mapping[str, Value]) -> str:
        """Return changes as arguments."""
        return argument_words(changes)

    def key_of(self, name: str) -> str:
        """Return the argument of an attribute of the layout."""
        if name in ("vpp", "stages", "schedule"):
            return "--num-virtual-stages-per-pipeline-rank"
        keys = keys_of(SETTINGS, name)
        return flag_of_key(keys[0]) if keys else ""

    def written(self, changes: Mapping[str, Value]) -> str:
        """Return the script with changes."""
        texts = {
            key: "" if value in (None, False) else argument_text(key, value)
            for key, value in changes.items()
        }
        return edited(self.text, self.reading.given, texts)

    def read_again(self, text: str) -> LaunchFile:
        """Return another script."""
        return open_launch("the copy", text, self.asked)
