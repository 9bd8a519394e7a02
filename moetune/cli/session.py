"""Session of one run: the options before the command, and options that commands share."""

import shlex
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from moetune.cli.completers import plan_ids, profile_names
from moetune.config import NO_STORE
from moetune.domain.errors import SchemaMismatchError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moetune.cli.render import Screen
    from moetune.config import Configuration, Settings
    from moetune.store import SqlStore

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
All = Annotated[bool, typer.Option("--all", help="Print every row of long tables.")]
T = TypeVar("T")
_OF_STORES = StoreUnavailableError, SchemaMismatchError
MOST_ROWS = 20
"""Rows of a table that is not asked for whole."""
Oversubscribe = Annotated[
    bool, typer.Option("--oversubscribe", help="Start more ranks than there are cores.")
]
PlanArgument = Annotated[
    str,
    typer.Argument(
        help="A plan's JSON file, or the beginning of an id in the store.",
        autocompletion=plan_ids,
    ),
]
TrainedModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FILE",
        help="The config.json that a Hugging Face model's plan was made for, where its name is not "
        "in `moetune models list`.",
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FILE|NAME",
        autocompletion=profile_names,
        help="Profile: a .toml file, or a name in the store or of a reference machine. "
        "Default: the setting, else the newest measured one.",
    ),
]


@dataclass(slots=True, kw_only=True)
class Session:
    """One run of the command line; settings are read only by commands that need them.

    Args:
        arguments: all of this run, for commands that say how to go on.
        most_rows: of a table; None for all, as of commands without `--all`.
        is_missing_said: that the store which was named is not there, which is said once.
    """

    arguments: tuple[str, ...] = ()
    db: str | None = None
    config_file: Path | None = None
    no_config: bool = False
    verbosity: int = 0
    quiet: bool = False
    color: bool = True
    most_rows: int | None = None
    is_missing_said: bool = field(default=False, init=False)

    @property
    def screen(self) -> "Screen":
        """The output of this run."""
        from moetune.cli.render import Screen

        return Screen(
            color=self.color, quiet=self.quiet, verbosity=self.verbosity, most_rows=self.most_rows
        )

    def configuration(self) -> "Configuration":
        """Return the settings and their origins."""
        from moetune.app import wiring

        return wiring.configure(db=self.db, file=self.config_file, no_files=self.no_config)

    @property
    def settings(self) -> "Settings":
        """The settings."""
        return self.configuration().settings

    @contextmanager
    def find_store(self) -> "Iterator[SqlStore | None]":
        """Open the store to read, None where none was made yet, and say so where one was named."""
        from moetune.app import wiring

        with wiring.find_store(self.settings) as store:
            if store is None and self.db is not None and not self.is_missing_said:
                self.screen.note(f"there is no store at {self.db} yet")
                self.is_missing_said = True
            yield store


def saved_or_written(
    session: Session, plan: "Callable[..., T]", *, save: bool, output: Path | None
) -> tuple[T, bool]:
    """Return a plan and whether the store has it.

    A plan that is written to a file is not lost where the store cannot be used: that is a warning.

    Args:
        plan: takes the settings, and whether to save.
        output: the file.

    Raises:
        MoetuneError: as of `plan`; of the store, where there is no file.
    """
    try:
        return plan(settings=session.settings, save=save), save
    except _OF_STORES as problem:
        if not save or output is None:
            raise
        reason = problem
    try:
        made = plan(settings=session.settings, save=False)
    except _OF_STORES:  # nor can it be read
        made = plan(settings=replace(session.settings, db=NO_STORE), save=False)
    session.screen.note(f"warning: the plan is not saved in the store: {reason}")
    return made, False


def command_again(session: Session, *more: str, without: tuple[str, ...] = ()) -> str:
    """Return this run's command with other flags, to be pasted.

    Args:
        more: added at its end, unless they are there.
        without: flags that are left out with their values.
    """
    words: list[str] = []
    left = iter(session.arguments)
    for word in left:
        if word in without:
            next(left, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in without)):
            words.append(word)
    words += [word for word in more if word not in words]
    return shlex.join(["moetune", *words])


def session_of(context: typer.Context, *, all_rows: bool = True) -> Session:
    """Return the session of the running command.

    Args:
        all_rows: print long tables whole; of commands that have `--all`, whether it was given.
    """
    found = context.find_object(Session) or Session()
    found.most_rows = None if all_rows else MOST_ROWS
    return found


def example(command: str) -> str:
    """Return the epilog of a command's help."""
    return f"\b\nExample:\n  {command}"
