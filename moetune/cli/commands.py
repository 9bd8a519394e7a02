"""Commands, groups, options and arguments as values, from which typer makes the program."""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from typer.core import TyperCommand

from moetune.domain.spelling import about
from moetune.domain.units import parse_age, parse_bytes, parse_count, parse_seconds

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

MOST_ROWS = 20
"""Most rows of a table without `--all`."""
_USUAL = "Options"
_WIDEST = 24
"""Width of the options' column in help, in characters."""
_FORMS = MappingProxyType(
    {Path: "FILE", parse_bytes: "SIZE", parse_seconds: "TIME", parse_age: "TIME", parse_count: "N"}
)
"""Placeholders of values in help."""
Names = Callable[[typer.Context, str], Iterable[str]]
"""Function from the context and the letters so far to names that a shell may complete."""


class Between(NamedTuple):
    """Kind of a whole number within bounds."""

    low: int
    high: int | None = None


AT_LEAST_1 = Between(1)


def option(
    flags: str,
    words: str,
    kind: Any = str,  # noqa: ANN401 - a type of Python's, or what makes a value
    *,
    form: str | None = None,
    names: Names | None = None,
    title: str = _USUAL,
    default: Any = None,  # noqa: ANN401 - of any kind
    required: bool = False,
    multiple: bool = False,
    count: bool = False,
) -> inspect.Parameter:
    """Return an option.

    Args:
        flags: flags with spaces between them, and the parameter's name if it differs.
        words: its help.
        kind: str, bool for a flag without a value, Path, a tuple of choices, `Between`, or a
            function that reads a text, such as `parse_bytes`.
        form: placeholder of its value in help. Default: by its kind, or a text flag's last word.
        names: returns the names that a shell completes.
        title: heading above it in help.
        multiple: whether it may be given several times; its value is then a list.
        count: whether its value is how often it is given.
    """
    *given, last = flags.split()
    if last.startswith("-"):
        given.append(last)
        last = next(flag for flag in given if flag.startswith("--"))
        last = last.partition("/")[0].removeprefix("--").replace("-", "_")
    if form is None:
        usual = "N" if isinstance(kind, Between) else _FORMS.get(kind)
        form = given[0].rsplit("-", 1)[-1].upper() if kind is str else usual
    info = typer.Option(
        *given, help=words, metavar=form, rich_help_panel=title,
        show_default=bool(form) and default is not None, count=count,
        **_reading(kind, given[0].partition("/")[0].removeprefix("--"), names),
    )  # fmt: skip
    default = inspect.Parameter.empty if required else default
    return _parameter(last, kind, info, default=default, multiple=multiple)


def argument(
    name: str,
    words: str,
    kind: Any = str,  # noqa: ANN401 - a type of Python's
    *,
    form: str | None = None,
    names: Names | None = None,
    required: bool = True,
    multiple: bool = False,
) -> inspect.Parameter:
    """Return an argument; see `option`."""
    if form is None and not isinstance(kind, tuple):
        form = name.upper()
    reading = _reading(kind, name, names)
    info = typer.Argument(help=words, metavar=form, show_default=False, **reading)
    default = inspect.Parameter.empty if required else None
    return _parameter(name, kind, info, default=default, multiple=multiple)


class Command(NamedTuple):
    """A command of the program."""

    name: str
    run: Callable[..., int | None]
    words: str
    epilog: str

    def add_to(self, app: typer.Typer, name: str) -> None:
        """Add the command to a program under a name."""
        # Typer wraps a short help that it is given, but cuts a short help that it makes.
        short = summary_of(self.words)
        app.command(name, help=self.words, short_help=short, epilog=self.epilog, cls=_Command)(
            self.run
        )


def new_program(**attributes: Any) -> typer.Typer:  # noqa: ANN401 - typer's
    """Return a program, or a group of commands, without commands."""
    # No rich markup: importing rich takes longer than the command line may take to start.
    return typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]}, **attributes,
    )  # fmt: skip


def command(
    example: str, *parameters: inspect.Parameter
) -> Callable[[Callable[..., int | None]], Command]:
    """Return a decorator that makes a command of a function, with these parameters and `--json`.

    The function gets the session, and the parameters by their names. It may return an exit code.
    Its name is the command's, and its docstring is the help.
    """

    def decorate(function: Callable[..., int | None]) -> Command:
        def run(context: typer.Context, **values: Any) -> int | None:  # noqa: ANN401 - of any kind
            del values["json"]  # `Session.as_json` reads it
            if not values.pop("all", True):
                context.obj.most_rows = MOST_ROWS
            return function(context.obj, **values)

        name, words = function.__name__.strip("_"), inspect.getdoc(function) or ""
        made = with_parameters(run, *parameters, _JSON)
        return Command(name, made, words, f"\b\nExample:\n  {example}")

    return decorate


def with_parameters(
    run: Callable[..., int | None], *parameters: inspect.Parameter
) -> Callable[..., int | None]:
    """Return the function with the signature that typer reads: a context and these parameters."""
    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    run.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined] # of functions
    run.__annotations__ = {made.name: made.annotation for made in (context, *parameters)}
    return run


def group(words: str, *commands: Command, **named: Command) -> typer.Typer:
    """Return a group of commands; those in `named` have that name instead of their function's."""
    made = new_program(help=words, no_args_is_help=False)
    for name, command in ({command.name: command for command in commands} | named).items():
        command.add_to(made, name)
    return made


class _Command(TyperCommand):
    """A command whose help has its options under their titles."""

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write the arguments, the options by title, and last the options without a title."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            title = getattr(parameter, "rich_help_panel", "") or _USUAL
            if parameter.param_type_name == "argument":
                title = "Arguments"
            if record := parameter.get_help_record(ctx):
                sections.setdefault(title, []).append(record)
        usual = sections.pop(_USUAL, [])
        for title, records in (*sections.items(), (_USUAL, usual)):
            with formatter.section(title):
                formatter.write_dl(records, col_max=_WIDEST)


def summary_of(text: str) -> str:
    """Return the first paragraph of a help text, on one line."""
    return " ".join(text.strip().partition("\n\n")[0].split())


def _parameter(
    name: str,
    kind: Any,  # noqa: ANN401 - as of `option`
    info: Any,  # noqa: ANN401 - typer's
    *,
    default: Any,  # noqa: ANN401 - of any kind
    multiple: bool,
) -> inspect.Parameter:
    made: Any = str if inspect.isfunction(kind) else kind
    if isinstance(kind, tuple):
        made = int if isinstance(kind, Between) else Literal[kind]
    if multiple:
        made, default = list[made], [] if default is None else default
    elif default is None:
        made = made | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[made, info]
    )


def _reading(kind: Any, flag: str, names: Names | None) -> dict[str, Any]:  # noqa: ANN401 - as of `option`
    """Return typer's arguments to complete and to read a value; errors name the flag."""
    reading: dict[str, Any] = {"autocompletion": _completer(names)}
    if isinstance(kind, Between):
        reading |= {"min": kind.low, "max": kind.high}
    elif inspect.isfunction(kind):
        reading["parser"] = about(flag)(kind)
    return reading


def _completer(names: Names | None) -> Callable[[typer.Context, str], list[str]] | None:
    if names is None:
        return None

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        candidates = names(context, incomplete)
        return [name for name in dict.fromkeys(candidates) if name.startswith(incomplete)]

    return complete


_JSON = option("--json", "Print one JSON document on stdout.", bool)
ALL = option("--all", "Print every row of long tables.", bool)
