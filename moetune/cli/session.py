"""Session of one run: the options before the command, and options that commands share."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.render import Screen

if TYPE_CHECKING:
    from moetune.config import Configuration, Settings
    from moetune.domain.ports import Store

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FILE|NAME",
        help="Profile: a .toml file, or a name in the store or of a reference machine. "
        "Default: the setting, else the newest measured one.",
    ),
]


@dataclass(slots=True, kw_only=True)
class Session:
    """One run of the command line; settings are read only by commands that need them."""

    db: str | None = None
    config_file: Path | None = None
    no_config: bool = False
    verbosity: int = 0
    quiet: bool = False
    color: bool = True

    @property
    def screen(self) -> Screen:
        """The output of this run."""
        return Screen(color=self.color, quiet=self.quiet, verbosity=self.verbosity)

    def configuration(self) -> "Configuration":
        """Return the settings and their origins."""
        from moetune.workflows import wiring

        return wiring.configure(db=self.db, file=self.config_file, no_files=self.no_config)

    @property
    def settings(self) -> "Settings":
        """The settings."""
        return self.configuration().settings

    def find_store(self) -> "AbstractContextManager[Store | None]":
        """Open the store to read, None where none was made yet."""
        from moetune.workflows import wiring

        return wiring.find_store(self.settings)


def session_of(context: typer.Context) -> Session:
    """Return the session of the running command."""
    found = context.find_object(Session)
    return found or Session()


def example(command: str) -> str:
    """Return the epilog of a command's help."""
    return f"\b\nExample:\n  {command}"
