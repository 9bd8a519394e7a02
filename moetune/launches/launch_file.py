"""Launch files after reading: their problems, and their text with changes."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

from moetune.domain.site import Site
from moetune.domain.training import FoldedLayout
from moetune.export.keys import Value, keys_of, names_of
from moetune.export.megatron_values import DDP, EXPERTS, LAYOUT, NARROW, SETTINGS
from moetune.launches.arguments import Launch
from moetune.launches.keyed import COMMAND, Dialect, key_as_written, keyed_changes, short_value
from moetune.launches.keyed_edit import keyed_text
from moetune.launches.megatron import flag_of_key
from moetune.launches.megatron_changes import (
    argument_text,
    argument_words,
    edit_script,
    megatron_changes,
)
from moetune.launches.megatron_checks import Context, megatron_problems
from moetune.launches.places import Code
from moetune.launches.reading import Asked, Problem, Reading
from moetune.launches.script import Note

BRIDGE_GROUPS = {
    "ddp": names_of(DDP), "train": ("micro_batch_size", "global_batch_size"),
    "optimizer": (*keys_of(SETTINGS, "optimizer"), *keys_of(SETTINGS, "offload_optimizer")),
    "checkpoint": ("ckpt_format",), "model": names_of((*LAYOUT, *EXPERTS, *NARROW)),
}  # fmt: skip
"""Megatron's fields by the part of Megatron-Bridge's configuration that has them."""
DATA = (".json", ".yaml", ".yml")
"""Endings of files without code, which a command or a program reads."""
_MODE, _POLICY = "activation_checkpoint.mode", "activation_checkpoint"
"""torchtitan's activation checkpointing: a word in TOML, and in programs an imported class."""
_POLICIES = "torchtitan.distributed.activation_checkpoint"
_IMPORTS = re.compile(r"(?m)^from torchtitan\b")
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
    def name(self) -> str:
        """The name of the file."""
        ...

    @property
    def asked(self) -> Asked:
        """Options that a user gives in addition to the file."""
        ...

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


def _problem_of(note: Note) -> Problem:
    return Problem(severity="note", line=note.line, what=note.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedFile:
    """A configuration whose keys set the layout.

    Args:
        dialect: form of the configuration; None for Megatron-Bridge, whose keys are fields.
        notes: what of its script is left aside, or read in a turn of a loop.
    """

    reading: Reading
    text: str
    name: str
    asked: Asked
    dialect: Dialect | None = None
    notes: tuple[Note, ...] = ()

    def problems(self, site: Site | None) -> Iterator[Problem]:
        """Yield the problems of the keys."""
        del site
        yield from self.reading.problems
        yield from map(_problem_of, self.notes)

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
        if not self.name.endswith(DATA):
            return False
        if place is None:
            return self.dialect is not None and key in self.dialect.keys_by_table.get(COMMAND, ())
        return not place.line and not place.file


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
        yield from map(_problem_of, self.launch.notes)

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
