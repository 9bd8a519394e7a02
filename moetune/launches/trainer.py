"""Commands with arguments of transformers' Trainer, and the files that they name for its engine.

LLaMA-Factory, TRL and ms-swift pass such arguments. A DeepSpeed JSON, an accelerate YAML or an
FSDP configuration is read where it lies next to the launch, or under the current folder.
"""

from collections.abc import Iterator
from pathlib import Path

from moetune.domain.errors import InputError
from moetune.launches.arguments import PER_DEVICE, Argument, Launch, check_values
from moetune.launches.entries import Entry, entries_of
from moetune.launches.megatron import plain_value
from moetune.launches.reading import Asked

_NAMING = ("config_file", "deepspeed", "deepspeed_config_file", "fsdp_config")
"""Keys whose value is a file of an engine, or of accelerate."""
_KINDS = (".json", ".yaml", ".yml")


def trainer_entries(launch: Launch, asked: Asked) -> tuple[Entry, ...]:
    """Return the arguments of a command that are Trainer's, behind those of the files it names.

    Raises:
        InputError: a variable has no value, or a named file is of no kind that is read.
    """
    arguments = [*launch.launcher, *launch.arguments]
    if all(_field(argument) != PER_DEVICE for argument in launch.arguments):
        return ()
    check_values((f"--{one.name}", one.values[0]) for one in launch.arguments if one.values)
    given = tuple(
        Entry(_field(one), plain_value(one.values[0].text) if one.values else True, one.line)
        for one in arguments
    )
    return with_named_files(given, asked)


def with_named_files(entries: tuple[Entry, ...], asked: Asked) -> tuple[Entry, ...]:
    """Return entries behind those of the files that they name, which they replace.

    A file that is not there stays named, for a note that says so.
    """
    named: list[Entry] = []
    kept: list[Entry] = []
    for entry in entries:
        file = _file(entry, asked)
        if file is None:
            kept.append(entry)
        else:
            named += _of_file(file, asked)
    return (*named, *kept)


def _field(argument: Argument) -> str:
    return argument.name.replace("-", "_")


def _file(entry: Entry, asked: Asked) -> Path | None:
    """Return the file that an entry names, where it can be read."""
    value, key = entry.value, entry.path.rpartition(".")[2]
    if asked.folder is None or key not in _NAMING or not str(value).endswith(_KINDS):
        return None
    places = (asked.folder / str(value), Path(str(value)))
    return next((place for place in places if place.is_file()), None)


def _of_file(file: Path, asked: Asked) -> Iterator[Entry]:
    """Yield the values of a named file, on no line of the launch; "auto" says nothing."""
    try:
        entries = entries_of(file.name, file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}", "mend the file, or its name") from None
    for entry in with_named_files(entries, asked):
        if entry.value != "auto":
            yield entry._replace(line=0)
