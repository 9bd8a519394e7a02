"""The program: its commands, the options before them, and exit codes of errors."""

import gc
import io
import os
import sys
from collections.abc import Container, Sequence
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import typer

from moetune.cli import completion
from moetune.cli.commands import Command, new_program, option, with_parameters
from moetune.cli.session import Session
from moetune.config import environment
from moetune.domain.errors import InputError, MoetuneError, needed_by

INTERRUPTED = 130
_LONG = frozenset({"profile", "verify", "serve"})
"""Commands that run layers or serve for long: Python collects their garbage as usual."""
_ALLOCATIONS = 1_000_000
"""Allocations between garbage collections of other commands, which took a fifth of their time."""
_ADAPTERS = ("--lora", "--qlora", "--peft", "--adapter")
"""Beginnings of other tools' options for adapters, which resemble no option here."""

_BEFORE_THE_COMMAND = ("--db", "--config", "--no-config", "-v", "-vv", "-q", "--no-color")
_WORDS = "Measure a cluster once, solve for the best Mixture-of-Experts plan, and run it."

# Click's UsageError, the base of all errors in arguments. Some versions of typer include click and
# others import it: this finds the class in both.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])

COMMANDS = {
    "profile": "Measure this machine and fit its profile.",
    "plan": "Solve for the best plan of a layer or model.",
    "compare": "Compare machines, numbers of GPUs and runtimes for a model's training.",
    "memory": "Say which layouts of a model's training fit, and where the memory goes.",
    "explain": "Explain a plan's choice and its times, or why it is not another plan.",
    "whatif": "Plan again with changes, and compare.",
    "sensitivity": "Say which part of the machine and which decision a plan's step follows.",
    "check": "Say what a launch file runs, what stops it, and what would be better.",
    "observe": "Say whether a run is what was predicted, and if not, where the difference is.",
    "export": "Write a training plan as arguments, a configuration or a function of a runtime.",
    "verify": "Run a plan's layer and compare its times.",
    "trace": "Write a plan's timelines for Perfetto.",
    "report": "Draw a profile and plans in one HTML file.",
    "serve": "Serve the store to a team: API and pages.",
    "plans": "Stored plans.",
    "observations": "Observed runs of models.",
    "profiles": "Profiles: measured speeds of machines.",
    "models": "Models by name, and from their configurations.",
    "schema": "Print the JSON schema of a document, or list their names.",
    "db": "The database of profiles, plans and observed runs.",
    "doctor": "Print this installation and its problems.",
    "completion": "Print the script that completes commands and names.",
}
"""Summaries of the commands by name."""
_MODULES = MappingProxyType({
    "sensitivity": "explain", "observations": "plans", "observe": "check", "memory": "models",
    "trace": "export", "report": "export",
})  # fmt: skip
"""Modules of `moetune.cli` by command, for commands that are named otherwise."""


_BEFORE = (
    option("--db", "Database: a file, sqlite:///… or postgresql+psycopg://…", form="URL"),
    option("--config", "Read settings from this file only.", Path),
    option("--no-config", "Read no settings file.", bool, default=False),
    option(
        "--verbose -v", "Print more notes; -vv also prints tracebacks.", int, form="", default=0,
        count=True,
    ),
    option("--quiet -q", "No notes on stderr.", bool, default=False),
    option("--no-color", "Print without colour.", bool, default=False),
    option("--version", "Print the version, and those of the targets.", bool, default=False),
)  # fmt: skip
"""Options before the command."""


def program(names: Container[str] = COMMANDS) -> typer.Typer:
    """Return the command line, which can run the commands of these names.

    Importing all commands takes half a second: the others have only a name and a summary, for
    help, completions and suggestions.
    """
    app = new_program(name="moetune", help=_WORDS)
    app.callback(invoke_without_command=True)(with_parameters(_begin, *_BEFORE))
    for name, summary in COMMANDS.items():
        if name in names:
            made = getattr(import_module(f"moetune.cli.{_MODULES.get(name, name)}"), name)
            if isinstance(made, Command):
                made.add_to(app, name)
            else:
                app.add_typer(made, name=name, short_help=summary)
        else:
            app.command(name, help=summary, short_help=summary)(_named)
    return app


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
    gc.freeze()  # without another garbage collection at exit
    sys.exit(code)


def main(arguments: Sequence[str]) -> int:
    """Run a command, or answer a shell's request for completions, and return the exit code."""
    if environment().get(completion.VARIABLE):
        return _complete()
    session = Session(arguments=tuple(arguments))
    try:
        with needed_by(_command(arguments)):
            app = program(session.arguments)
            code = app(args=[*arguments], prog_name="moetune", standalone_mode=False, obj=session)
    except MoetuneError as error:
        return _fail(session, error)
    except _UsageError as error:
        return _fail(session, _usage_error(error, _command(arguments)))
    except (typer.Abort, KeyboardInterrupt):
        session.screen.note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - users see a traceback with -vv only
        return _fail(session, _defect(error))
    return code if isinstance(code, int) else 0


def _command(arguments: Sequence[str]) -> str:
    return f"moetune {next((word for word in arguments if word in COMMANDS), '')}".strip()


def _complete() -> int:
    """Answer a shell's request for completions, and print no error over the line that is typed."""
    with redirect_stderr(io.StringIO()):
        try:
            app = program(completion.prepare_answer(environment()))
            app(args=[], prog_name="moetune", standalone_mode=False)
        except SystemExit as done:
            return int(done.code or 0)
        except (Exception, KeyboardInterrupt):  # noqa: BLE001 - the user has not run a command
            return 1
    return 0


def _fail(session: Session, error: MoetuneError) -> int:
    session.screen.error(error)
    return error.exit_code


def _usage_error(error: Exception, command: str) -> InputError:
    context, option = getattr(error, "ctx", None), str(getattr(error, "option_name", ""))
    what = str(getattr(error, "format_message", error.__str__)())
    what = what.replace(": Value error, ", ": ")  # pydantic's words, from typer
    path = context.command_path if context else command
    hint = f"see `{path} --help`"
    if option in _BEFORE_THE_COMMAND:
        hint = f"write it before the command; {hint}"
    if what.startswith("No such option: --model"):
        hint = f"name the model without a flag: {path} NAME"
    elif what.startswith("No such option") and path == "moetune whatif":
        hint = f"a flag of `moetune plan` is --constraint {option.removeprefix('--')}=VALUE"
    elif option.startswith(_ADAPTERS):
        what = f"{option} is no option: --train says what trains"
        hint = "--train lora:rank=16, or --train qlora:rank=16, of `moetune plan` and `memory`"
    return InputError(what, hint)


def _defect(error: Exception) -> MoetuneError:
    defect = MoetuneError(
        f"moetune failed: {type(error).__name__}: {error}",
        "this is a defect of moetune: run it again with -vv and report what it prints",
    )
    defect.__cause__ = error
    return defect


def _begin(context: typer.Context, **values: Any) -> None:  # noqa: ANN401 - of any kind
    session: Session = context.ensure_object(Session)
    session.db, session.config_file = values["db"], values["config"]
    session.no_config, session.verbosity = values["no_config"], values["verbose"]
    session.quiet, session.color = values["quiet"], not values["no_color"]
    if values["version"]:
        from importlib.metadata import version as version_of

        from moetune.domain.targets import TARGETS, target_releases

        session.screen.line(f"moetune {version_of('moetune')}")
        for target in TARGETS[1:]:  # the first is moetune's runtime
            session.screen.line(f"{target} {', '.join(target_releases(target))}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        session.screen.line(context.get_help())
