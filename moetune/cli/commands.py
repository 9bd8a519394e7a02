"""Commands, their groups, options and arguments as values, and the layout of their help."""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from moetune.domain.spelling import about
from moetune.domain.units import parse_age, parse_bytes, parse_count, parse_seconds

if TYPE_CHECKING:
    from moetune.cli.session import Session

MOST_ROWS = 20
"""Rows of a table that is not asked for whole."""
_USUAL = "Options"
_WIDEST = 24
"""Columns of an option in help, next to its words."""
_FORMS = MappingProxyType(
    {Path: "FILE", parse_bytes: "SIZE", parse_seconds: "TIME", parse_age: "TIME", parse_count: "N"}
)
"""Of values in help."""
Names = Callable[[click.Context, str], Iterable[str]]
"""Names that a shell may complete, by the running command and the letters so far."""


class Option(click.Option):
    """An option that stands under a title in help."""

    def __init__(self, flags: list[str], *, title: str, **attributes: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(flags, **attributes)
        self.title = title


class Command(click.Command):
    """A command whose help has its options under their titles."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the titles in the order of their options, and last what has none."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                sections.setdefault(getattr(parameter, "title", _USUAL), []).append(record)
        usual = sections.pop(_USUAL)
        for title, records in (*sections.items(), (_USUAL, usual)):
            with formatter.section(title):
                formatter.write_dl(records, col_max=_WIDEST)


class Group(click.Group):
    """A group whose help wraps the summaries of its commands instead of cutting them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every command with its whole summary."""
        del ctx
        rows = [(name, summary_of(str(made.help))) for name, made in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def option(
    flags: str,
    words: str,
    kind: Any = str,  # noqa: ANN401 - a type of Python's or of click's
    *,
    form: str | None = None,
    names: Names | None = None,
    title: str = _USUAL,
    **attributes: Any,  # noqa: ANN401 - click's
) -> Option:
    """Return an option.

    Args:
        flags: one or several, with spaces between them, and the parameter's name if it differs.
        words: its help.
        kind: str, bool for a flag without a value, Path, a tuple of choices, a type of click's, or
            a function that reads a text, such as `parse_bytes`.
        form: of its value in help; None for that of its kind, of a text the flag's last word.
        names: that a shell completes.
        title: under which it stands in help.
        attributes: of `click.Option`, such as `default` or `multiple`.
    """
    if form is None:
        usual = "N" if isinstance(kind, click.IntRange) else _FORMS.get(kind)
        form = flags.rsplit("-", 1)[-1].upper() if kind is str else usual
    return Option(
        flags.split(),
        title=title,
        help=words,
        type=_type_of(kind),
        is_flag=kind is bool,
        metavar=form,
        shell_complete=_completer(names),
        show_default=kind is not bool and attributes.get("default") is not None,
        **attributes,
    )


def argument(
    name: str,
    words: str,
    kind: Any = str,  # noqa: ANN401 - a type of Python's or of click's
    *,
    form: str | None = None,
    names: Names | None = None,
    **attributes: Any,  # noqa: ANN401 - click's
) -> click.Argument:
    """Return an argument; see `option`."""
    return click.Argument(
        [name],
        help=words,
        type=_type_of(kind),
        metavar=form,
        shell_complete=_completer(names),
        **attributes,
    )


def command(
    example: str, *parameters: click.Parameter
) -> Callable[[Callable[..., int | None]], Command]:
    """Return a decorator that makes a command of a function, with these parameters and `--json`.

    The function gets the session, and the parameters by their names. It may return an exit code.
    Its name is the command's, and its docstring the help.
    """

    def decorate(function: Callable[..., int | None]) -> Command:
        return Command(
            function.__name__.strip("_"),
            callback=click.pass_obj(function),
            params=[*parameters, JSON],
            help=inspect.getdoc(function),
            epilog=f"\b\nExample:\n  {example}",
        )

    return decorate


def group(name: str, words: str, *commands: Command, **named: Command) -> Group:
    """Return a group of commands.

    Args:
        named: commands under another name than their function's.
    """
    by_name: dict[str, click.Command] = {**{str(made.name): made for made in commands}, **named}
    return Group(name, commands=by_name, help=words, no_args_is_help=False)


def summary_of(text: str) -> str:
    """Return the first paragraph of a help text, on one line."""
    return " ".join(text.strip().partition("\n\n")[0].split())


def _type_of(kind: Any) -> Any:  # noqa: ANN401 - click takes both types of Python's and its own
    if kind is Path:
        return click.Path(path_type=Path)
    if isinstance(kind, tuple):
        return click.Choice(kind)
    return _Text(kind) if inspect.isfunction(kind) else kind


class _Text(click.ParamType[object]):
    """A text that a function reads; its errors are about the flag."""

    name = "text"

    def __init__(self, read: Callable[[str], object]) -> None:
        self.read = read

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Return the value in a text."""
        del ctx
        with about(param.opts[0].removeprefix("--") if param else ""):
            return self.read(value) if isinstance(value, str) else value


def _completer(
    names: Names | None,
) -> Callable[[click.Context, click.Parameter, str], list[str]] | None:
    if names is None:
        return None

    def complete(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
        found = names(context, incomplete)
        return [name for name in dict.fromkeys(found) if name.startswith(incomplete)]

    return complete


AT_LEAST_1 = click.IntRange(1)
JSON = option("--json", "Print one JSON document on stdout.", bool, expose_value=False)
"""An option of all commands: `Session.as_json` reads it."""


def _shorten(context: click.Context, _option: click.Parameter, all_rows: bool) -> None:
    session: Session | None = context.obj
    if session is not None and not all_rows:
        session.most_rows = MOST_ROWS


ALL = option(
    "--all", "Print every row of long tables.", bool, expose_value=False, callback=_shorten
)
