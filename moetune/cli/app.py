"""The typer program: its commands, the options before them, and exit codes of errors."""

import gc
import io
import os
import sys
from collections.abc import Container, Sequence
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path
from typing import Annotated, cast

import typer

from moetune.cli import completion
from moetune.cli.help import Commands, GroupedCommand
from moetune.cli.session import Session, session_of
from moetune.config import environment
from moetune.domain.errors import InputError, MoetuneError, needed_by

INTERRUPTED = 130
_LONG = frozenset({"profile", "verify", "serve"})
"""Commands that run layers or answer for long, and collect their garbage as usual."""
_ALLOCATIONS = 200_000
"""Between collections of garbage in the others, where they took a fifth of the time."""
_BEFORE_THE_COMMAND = ("--db", "--config", "--no-config", "-v", "-vv", "-q", "--no-color")
_NOT_PLANNED = ("--lora", "--qlora", "--peft", "--adapter")
"""Beginnings of options of fine-tuning by adapters, to which no option here is near."""

# Click's UsageError, the base of all errors in arguments. Some versions of typer include click and
# others import it: this finds the class in both.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])

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
"""Summaries by name. Each is a module of `moetune.cli` that has a function of its name, or an
`app` of several."""


def program(names: Container[str] = COMMANDS) -> typer.Typer:
    """Return the command line, in which the commands of these names can be run.

    Importing all of them takes half a second: the others are only named, for help, for
    completions and for suggestions.
    """
    # No rich markup: importing rich takes longer than the command line may take to start.
    app = typer.Typer(
        name="moetune",
        cls=Commands,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback(invoke_without_command=True)(_moetune)
    for name, summary in COMMANDS.items():
        if name in names:
            _add(app, name)
        else:
            app.command(name, help=summary)(_named)
    return app


def _add(app: typer.Typer, name: str) -> None:
    module = import_module(f"moetune.cli.{name}")
    if hasattr(module, "app"):
        app.add_typer(module.app, name=name, cls=Commands)
    else:
        app.command(name, epilog=module.EPILOG, cls=GroupedCommand)(getattr(module, name))


def _named() -> None:
    raise AssertionError("a command that is run is among the words of the line")


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
    if environment().get(completion.VARIABLE):
        return _complete()
    session = Session(arguments=tuple(arguments))
    as_json = "--json" in arguments
    try:
        app = program(session.arguments)
        with needed_by(_command(arguments)):
            code = app(args=[*arguments], prog_name="moetune", standalone_mode=False, obj=session)
    except MoetuneError as error:
        session.screen.error(error, as_json=as_json)
        return error.exit_code
    except _UsageError as error:
        return _show_usage_error(session, error, as_json=as_json)
    except (typer.Abort, KeyboardInterrupt):
        session.screen.note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - users see a traceback with -vv only
        return _show_defect(session, error, as_json=as_json)
    return code if isinstance(code, int) else 0


def _command(arguments: Sequence[str]) -> str:
    """Return the words of the command, for an error that names it."""
    return f"moetune {next((word for word in arguments if word in COMMANDS), '')}".strip()


def _complete() -> int:
    """Answer a shell; nothing is printed over the line that is typed, whatever goes wrong."""
    with redirect_stderr(io.StringIO()):
        try:
            app = program(completion.prepare_answer(environment()))
            app(args=[], prog_name="moetune", standalone_mode=False)
        except SystemExit as done:
            return int(done.code or 0)
        except (Exception, KeyboardInterrupt):  # noqa: BLE001 - the user has not run a command
            return 1
    return 0


def _show_usage_error(session: Session, error: Exception, *, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    where = context.command_path if context else "moetune"
    what = str(getattr(error, "format_message", error.__str__)())
    what = what.replace(": Value error, ", ": ")  # typer's, of pydantic
    hint, option = f"see `{where} --help`", str(getattr(error, "option_name", ""))
    if option in _BEFORE_THE_COMMAND:
        hint = f"write it before the command; {hint}"
    if option.startswith(_NOT_PLANNED):
        what = f"{option}: LoRA and other adapters are not planned yet"
        hint = (
            "`moetune plan` and `moetune memory` plan the training of all parameters; that of "
            "adapters needs less memory"
        )
    usage_error = InputError(what, hint)
    session.screen.error(usage_error, as_json=as_json)
    return usage_error.exit_code


def _show_defect(session: Session, error: Exception, *, as_json: bool) -> int:
    defect = MoetuneError(
        f"moetune failed: {type(error).__name__}: {error}",
        "this is a defect of moetune: run it again with -vv and report what it prints",
    )
    defect.__cause__ = error
    session.screen.error(defect, as_json=as_json)
    return defect.exit_code


def _moetune(
    context: typer.Context,
    db: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Database: a file, sqlite:///… or postgresql+psycopg://…"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read settings from this file only.")
    ] = None,
    no_config: Annotated[
        bool, typer.Option("--no-config", help="Read no settings file.")
    ] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose", "-v", count=True, show_default=False,
            help="Print more notes; -vv also prints tracebacks.",
        ),
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes on stderr.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Print without colour.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.")
    ] = False,
) -> None:  # fmt: skip
    """Measure a cluster once, solve for the best Mixture-of-Experts plan, and run it."""
    session = session_of(context)
    session.db, session.config_file, session.no_config = db, config, no_config
    session.verbosity, session.quiet, session.color = verbose, quiet, not no_color
    if show_version:
        from importlib.metadata import version

        session.screen.line(f"moetune {version('moetune')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        session.screen.line(context.get_help())
