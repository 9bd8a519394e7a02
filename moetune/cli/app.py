"""The program: its commands, the options before them, and exit codes of errors."""

import gc
import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import cast

import click

from moetune.cli.commands import Group, option
from moetune.cli.completion import VARIABLE
from moetune.cli.session import Session
from moetune.config import environment
from moetune.domain.errors import InputError, MoetuneError, needed_by

INTERRUPTED = 130
_LONG = frozenset({"profile", "verify", "serve"})
"""Commands that run layers or answer for long, and collect their garbage as usual."""
_ALLOCATIONS = 200_000
"""Between collections of garbage in the others, where they took a fifth of the time."""
_NOT_PLANNED = ("--lora", "--qlora", "--peft", "--adapter")
"""Beginnings of options of fine-tuning by adapters, to which no option here is near."""

COMMANDS = {
    "profile": "Measure this machine and fit its profile.",
    "plan": "Solve for the best plan of a layer or model.",
    "memory": "Say which layouts of a model's training fit, and where the memory goes.",
    "explain": "Explain a plan's choice and its times, or why it is not another one.",
    "whatif": "Plan again with changes, and compare.",
    "sensitivity": "Say which part of the machine and which decision a plan's step follows.",
    "export": "Write a training plan as arguments, a configuration or a function of a runtime.",
    "verify": "Run a plan's layer and compare its times.",
    "trace": "Write a plan's timelines for Perfetto.",
    "report": "Draw a profile and plans in one HTML file.",
    "serve": "Serve the store to a team: API and pages.",
    "plans": "Stored plans.",
    "observations": "Observed steps of plans.",
    "profiles": "Profiles: measured speeds of machines.",
    "models": "Models by name, and from their configurations.",
    "schema": "Print the JSON schema of a document, or list their names.",
    "db": "The database of profiles, plans and observations.",
    "config": "The settings that apply in this folder.",
    "doctor": "Print this installation and its problems.",
    "completion": "Print the script that completes commands and names.",
}
"""Summaries by name."""
_MODULES = MappingProxyType({"sensitivity": "explain", "observations": "plans", "config": "doctor"})
"""Modules of `moetune.cli` that have commands of another name."""


class Program(Group):
    """The commands by name, of which only those that are run or completed are imported."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None where it is unknown."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"moetune.cli.{_MODULES.get(cmd_name, cmd_name)}")
        return cast("click.Command", getattr(module, cmd_name))


def program() -> Program:
    """Return the command line. Importing all commands takes long: help needs their names alone."""
    before = (
        option("--db", "Database: a file, sqlite:///… or postgresql+psycopg://…", form="URL"),
        option("--config", "Read settings from this file only.", Path),
        option("--no-config", "Read no settings file.", bool),
        option(
            "--verbose -v", "Print more notes; -vv also prints tracebacks.", click.INT,
            form="", count=True,
        ),
        option("--quiet -q", "No notes on stderr.", bool),
        option("--no-color", "Print without colour.", bool),
        option("--version", "Print the version.", bool),
    )  # fmt: skip
    return Program(
        "moetune",
        help="Measure a cluster once, solve for the best Mixture-of-Experts plan, and run it.",
        params=[*before],
        callback=_begin,
        invoke_without_command=True,
        commands={name: click.Command(name, help=words) for name, words in COMMANDS.items()},
        context_settings={"help_option_names": ["--help", "-h"]},
    )


def run() -> None:
    """Run this process's command and exit with its code."""
    if not _LONG & {*sys.argv}:
        gc.set_threshold(_ALLOCATIONS)
    for stream in (sys.stdout, sys.stderr):
        # A terminal without µ or × gets a question mark instead of an error.
        cast("io.TextIOWrapper", stream).reconfigure(errors="replace")
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe; flushing the rest of the buffer at exit must not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    if "RANK" in environment():
        from moetune.app.launch import leave

        leave(code)
    sys.exit(code)


def main(arguments: Sequence[str]) -> int:
    """Run one command, or answer a shell that completes one, and return the exit code."""
    if environment().get(VARIABLE):
        return _complete()
    session = Session(arguments=tuple(arguments))
    try:
        with needed_by(_command(arguments)):
            code = program().main(
                [*arguments], prog_name="moetune", standalone_mode=False, obj=session
            )
    except MoetuneError as error:
        return _fail(session, error)
    except click.UsageError as error:
        return _fail(session, _usage_error(error))
    except (click.Abort, KeyboardInterrupt):
        session.screen.note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - users see a traceback with -vv only
        return _fail(session, _defect(error))
    return code if isinstance(code, int) else 0


def _command(arguments: Sequence[str]) -> str:
    """Return the words of the command, for an error that names it."""
    return f"moetune {next((word for word in arguments if word in COMMANDS), '')}".strip()


def _complete() -> int:
    """Answer a shell; nothing is printed over the line that is typed, whatever goes wrong."""
    code = 1
    with redirect_stderr(io.StringIO()), suppress(Exception, KeyboardInterrupt):
        try:
            program().main([], prog_name="moetune")
        except SystemExit as done:
            code = int(done.code or 0)
    return code


def _fail(session: Session, error: MoetuneError) -> int:
    session.screen.error(error)
    return error.exit_code


def _usage_error(error: click.UsageError) -> InputError:
    what, option = error.format_message(), str(getattr(error, "option_name", ""))
    hint = f"see `{error.ctx.command_path if error.ctx else 'moetune'} --help`"
    if option in {flag for known in program().params for flag in known.opts}:
        hint = f"write it before the command; {hint}"
    if option.startswith(_NOT_PLANNED):
        what = f"{option}: LoRA and other adapters are not planned yet"
        hint = (
            "`moetune plan` and `moetune memory` plan the training of all parameters; that of "
            "adapters needs less memory"
        )
    return InputError(what, hint)


def _defect(error: Exception) -> MoetuneError:
    defect = MoetuneError(
        f"moetune failed: {type(error).__name__}: {error}",
        "this is a defect of moetune: run it again with -vv and report what it prints",
    )
    defect.__cause__ = error
    return defect


@click.pass_context
def _begin(
    context: click.Context, *, db: str | None, config: Path | None, no_config: bool, verbose: int,
    quiet: bool, no_color: bool, version: bool,
) -> None:  # fmt: skip
    session = context.ensure_object(Session)
    session.db, session.config_file, session.no_config = db, config, no_config
    session.verbosity, session.quiet, session.color = verbose, quiet, not no_color
    if version:
        from importlib.metadata import version as version_of

        session.screen.line(f"moetune {version_of('moetune')}")
        context.exit()
    if context.invoked_subcommand is None:
        session.screen.line(context.get_help())
