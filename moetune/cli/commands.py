"""Commands, their groups, options and arguments as values, of which typer makes the program."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from moetune.domain.spelling import about
from moetune.domain.units import parse_age, parse_bytes, parse_count, parse_seconds

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

MOST_ROWS = 20
"""Rows of a table that is not asked for whole."""
_USUAL = "Options"
_WIDEST = 24
"""Columns of an option in help, next to its words."""
_FORMS = MappingProxyType(
    {Path: "FILE", parse_bytes: "SIZE", parse_seconds: "TIME", parse_age: "TIME", parse_count: "N"}
)
"""Placeholders of values in help."""
Names = Callable[[typer.Context, str], Iterable[str]]
"""Names that a shell may complete, by the running command and the letters so far."""


class Between(NamedTuple):
    """Kind of a whole number within bounds."""

    low: int
    high: int | None = None


AT_LEAST_1 = Between(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """An option or an argument of a command.

    Args:
        name: of the function's parameter.
        flag: its first flag without dashes, for errors.
        kind: type of the value that typer makes of the words.
        info: typer's description.
        default: `inspect.Parameter.empty` of an argument that must be given.
        read: makes the value of a text; its errors are about the flag.
        use: takes the value, which the function then does not get.
    """

    name: str
    flag: str
    kind: Any
    info: Any
    default: Any
    read: Callable[[str], object] | None = None
    use: Callable[[typer.Context, Any], None] | None = None

    @property
    def words(self) -> str:
        """Its help."""
        return str(self.info.help)

    @property
    def in_signature(self) -> inspect.Parameter:
        """The parameter from which typer builds its own."""
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default,
            annotation=Annotated[self.kind, self.info],
        )  # fmt: skip

    def value(self, given: Any) -> object:  # noqa: ANN401 - of any kind
        """Return the function's value of what typer made of the words."""
        if self.read is None or given is None:
            return given
        with about(self.flag):
            if isinstance(given, list):
                return [self.read(text) for text in given]
            return self.read(given)


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
    use: Callable[[typer.Context, Any], None] | None = None,
) -> Parameter:
    """Return an option.

    Args:
        flags: one or several, with spaces between them, and the parameter's name if it differs.
        words: its help.
        kind: str, bool for a flag without a value, Path, a tuple of choices, `Between`, or a
            function that reads a text, such as `parse_bytes`.
        form: of its value in help; None for that of its kind, of a text the flag's last word.
        names: that a shell completes.
        title: under which it stands in help.
        multiple: whether it may be given several times; its value is then a list.
        count: whether its value is how often it is given.
        use: as of `Parameter`.
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
        *given, help=words, metavar=form, rich_help_panel=title, autocompletion=_completer(names),
        show_default=bool(form) and default is not None, count=count, **_bounds(kind),
    )  # fmt: skip
    if required:
        default = inspect.Parameter.empty
    flag = given[0].partition("/")[0].removeprefix("--")
    return _parameter(last, flag, kind, info, default=default, multiple=multiple, use=use)


def argument(
    name: str,
    words: str,
    kind: Any = str,  # noqa: ANN401 - a type of Python's
    *,
    form: str | None = None,
    names: Names | None = None,
    required: bool = True,
    multiple: bool = False,
) -> Parameter:
    """Return an argument; see `option`."""
    if form is None and not isinstance(kind, tuple):
        form = name.upper()
    info = typer.Argument(
        help=words, metavar=form, autocompletion=_completer(names), show_default=False,
        **_bounds(kind),
    )  # fmt: skip
    default = inspect.Parameter.empty if required else None
    return _parameter(name, name, kind, info, default=default, multiple=multiple)


class Command(NamedTuple):
    """A command of the program."""

    name: str
    run: Callable[..., int | None]
    words: str
    epilog: str

    def add_to(self, app: typer.Typer, name: str) -> None:
        """Add it under a name."""
        app.command(name, help=self.words, epilog=self.epilog, cls=_Command)(self.run)


class Group(NamedTuple):
    """Commands of one subject."""

    words: str
    commands: Mapping[str, Command]

    def add_to(self, app: typer.Typer, name: str) -> None:
        """Add it under a name."""
        made = new_program(help=self.words, no_args_is_help=False)
        for key, command in self.commands.items():
            command.add_to(made, key)
        app.add_typer(made, name=name, cls=Commands)


def new_program(**attributes: Any) -> typer.Typer:  # noqa: ANN401 - typer's
    """Return a program, or a group of it, without commands."""
    # No rich markup: importing rich takes longer than the command line may take to start.
    return typer.Typer(
        cls=Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]}, **attributes,
    )  # fmt: skip


def command(example: str, *parameters: Parameter) -> Callable[[Callable[..., int | None]], Command]:
    """Return a decorator that makes a command of a function, with these parameters and `--json`.

    The function gets the session, and the parameters by their names. It may return an exit code.
    Its name is the command's, and its docstring the help.
    """

    def decorate(function: Callable[..., int | None]) -> Command:
        name = function.__name__.strip("_")
        run = with_parameters(
            lambda context, values: function(context.obj, **values), *parameters, JSON
        )
        return Command(name, run, inspect.getdoc(function) or "", f"\b\nExample:\n  {example}")

    return decorate


def with_parameters(
    function: Callable[[typer.Context, dict[str, object]], int | None], *parameters: Parameter
) -> Callable[..., int | None]:
    """Return a function with the signature that typer reads, for one of a context and values."""

    def run(context: typer.Context, **given: Any) -> int | None:  # noqa: ANN401 - of any kind
        values: dict[str, object] = {}
        for parameter in parameters:
            value = parameter.value(given[parameter.name])
            if parameter.use is None:
                values[parameter.name] = value
            else:
                parameter.use(context, value)
        return function(context, values)

    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    made = [parameter.in_signature for parameter in parameters]
    run.__signature__ = inspect.Signature([context, *made])  # type: ignore[attr-defined] # of functions
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (context, *made)}
    return run


def group(words: str, *commands: Command, **named: Command) -> Group:
    """Return a group of commands.

    Args:
        named: commands under another name than their function's.
    """
    return Group(words, {made.name: made for made in commands} | named)


class _Command(TyperCommand):
    """A command whose help has its options under their titles."""

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write arguments, the titles in the order of their options, and last what has none."""
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


class Commands(TyperGroup):
    """A group whose help wraps the summaries of its commands instead of cutting them."""

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write every command with its whole summary."""
        del ctx
        rows = [(name, summary_of(str(made.help))) for name, made in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def summary_of(text: str) -> str:
    """Return the first paragraph of a help text, on one line."""
    return " ".join(text.strip().partition("\n\n")[0].split())


def _parameter(
    name: str,
    flag: str,
    kind: Any,  # noqa: ANN401 - as of `option`
    info: Any,  # noqa: ANN401 - typer's
    *,
    default: Any,  # noqa: ANN401 - of any kind
    multiple: bool,
    use: Callable[[typer.Context, Any], None] | None = None,
) -> Parameter:
    read = kind if inspect.isfunction(kind) else None
    made: Any = str if read else kind
    if isinstance(kind, tuple):
        made = int if isinstance(kind, Between) else Literal[kind]
    if multiple:
        made, default = list[made], [] if default is None else default
    elif default is None:
        made = made | None
    return Parameter(
        name=name, flag=flag, kind=made, info=info, default=default, read=read, use=use
    )


def _bounds(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - as of `option`
    return {"min": kind.low, "max": kind.high} if isinstance(kind, Between) else {}


def _completer(names: Names | None) -> Callable[[typer.Context, str], list[str]] | None:
    if names is None:
        return None

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        candidates = names(context, incomplete)
        return [name for name in dict.fromkeys(candidates) if name.startswith(incomplete)]

    return complete


def _shorten(context: typer.Context, all_rows: bool) -> None:
    if not all_rows:
        context.obj.most_rows = MOST_ROWS


JSON = option("--json", "Print one JSON document on stdout.", bool, use=lambda *_: None)
"""An option of all commands: `Session.as_json` reads it."""
ALL = option("--all", "Print every row of long tables.", bool, use=_shorten)
