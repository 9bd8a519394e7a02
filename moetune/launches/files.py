"""A launch file of any kind: opened, read, checked, and written with changes."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from moetune.domain.errors import InputError
from moetune.domain.site import Site
from moetune.domain.training import FoldedLayout
from moetune.export.keys import Value, keys_of
from moetune.export.megatron_values import SETTINGS
from moetune.launches.arguments import Launch, find_launch
from moetune.launches.edit import edited
from moetune.launches.megatron import KEYS, flag_of_key, read_megatron
from moetune.launches.megatron_changes import argument_text, argument_words, megatron_changes
from moetune.launches.megatron_checks import Context, megatron_problems
from moetune.launches.reading import Asked, Problem, Reading
from moetune.launches.shell import read_script

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
        name: of the file.

    Raises:
        InputError: it is of an unknown kind, or something of it is missing or wrong.
    """
    if len(text) > LARGEST_BYTES:
        raise InputError(f"{name} is larger than 1 MiB", "give the script that starts the run")
    if "\0" in text:
        raise InputError(f"{name} is no text", "give the script that starts the run")
    script = read_script(text, extra=asked.extra, values=asked.values)
    launch, cuts = find_launch(script, KEYS)
    return MegatronFile(
        reading=read_megatron(launch, asked),
        launch=launch,
        text=text,
        asked=asked,
        cuts=tuple(cuts),
    )


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
