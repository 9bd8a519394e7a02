"""Session of a run: the options before the command, and the stores and plans that they select."""

import shlex
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.config import without_password
from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moetune.app.planner import Planner
    from moetune.app.profiles import ResolvedProfile
    from moetune.cli.render import Screen
    from moetune.config import Configuration, Settings
    from moetune.domain.any_plan import AnyPlan
    from moetune.store import SqlStore


@dataclass(slots=True, kw_only=True)
class Session:
    """One run of the command line; settings are read only by commands that need them.

    Args:
        arguments: all arguments of this run, from which commands print the next command.
        most_rows: most rows of a table; None for all, as in commands that have no `--all`.
        is_missing_said: whether this run has said that the store named by `--db` is missing.
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
    def as_json(self) -> bool:
        """Whether the answer is one JSON document."""
        return "--json" in self.arguments

    @property
    def screen(self) -> "Screen":
        """The output of this run."""
        from moetune.cli.render import Screen

        return Screen(
            color=self.color, quiet=self.quiet, verbosity=self.verbosity, most_rows=self.most_rows,
            as_json=self.as_json,
        )  # fmt: skip

    def configuration(self) -> "Configuration":
        """Return the settings and their origins."""
        from moetune.app import wiring

        return wiring.configure(db=self.db, file=self.config_file, no_files=self.no_config)

    @property
    def settings(self) -> "Settings":
        """The settings."""
        return self.configuration().settings

    @property
    def location(self) -> str:
        """The database's address, without a password."""
        return without_password(self.settings.db)

    @contextmanager
    def find_store(self) -> "Iterator[SqlStore | None]":
        """Open the store to read; None if there is none yet, with a note if `--db` names it."""
        from moetune.app import wiring

        with wiring.find_store(self.settings) as store:
            if store is None and self.db is not None and not self.is_missing_said:
                self.screen.note(f"there is no store at {self.db} yet")
                self.is_missing_said = True
            yield store

    def open_store(self) -> AbstractContextManager["SqlStore"]:
        """Open the store to write; make it if there is none."""
        from moetune.app import wiring

        return wiring.open_store(self.settings)

    def made_store(self) -> AbstractContextManager["SqlStore"]:
        """Open an existing store to write, for a command that removes; else raise InputError."""
        from moetune.app import wiring

        settings = self.settings
        with wiring.find_store(settings) as store:
            if store is None:
                raise InputError(f"there is no database at {without_password(settings.db)} yet")
        return wiring.open_store(settings)

    def plan(self, wanted: str) -> "AnyPlan":
        """Return the plan of a file, or of an id in the store."""
        from moetune.app.files import find_plan

        return find_plan(wanted, stores=self.find_store)

    def profile(self, wanted: str) -> "ResolvedProfile":
        """Return the profile of a file, or of a name in the store or of a reference machine."""
        from moetune.app.profiles import find_profile

        return find_profile(wanted, stores=self.find_store)

    def planner(self, profile: str | None) -> AbstractContextManager["Planner"]:
        """Open a planner that stores nothing, with the value of `--profile`."""
        from moetune.app.planner import local_planner

        return local_planner(self.settings, profile=profile)

    def command_again(self, *more: str, without: tuple[str, ...] = ()) -> str:
        """Return this run's command with other flags, ready to paste.

        Missing words of `more` are added at its end; flags of `without` go with their values.
        """
        words: list[str] = []
        left = iter(self.arguments)
        for word in left:
            if word in without:
                next(left, None)
            elif not word.startswith(tuple(f"{flag}=" for flag in without)):
                words.append(word)
        words += [word for word in more if word not in words]
        return shlex.join(["moetune", *words])
