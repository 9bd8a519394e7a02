"""Layout of help: options in groups, and summaries of commands that are never cut."""

from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

_USUAL = "Options"
_WIDEST = 24
"""Columns of an option, beside its words."""


class GroupedCommand(TyperCommand):
    """A command whose help prints options in their panels."""

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write arguments, the panels in the order of their options, and what is in no panel."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            is_argument = one.param_type_name == "argument"
            title = "Arguments" if is_argument else getattr(one, "rich_help_panel", "") or _USUAL
            if record := one.get_help_record(ctx):
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
        rows = [(name, summary_of(str(one.help))) for name, one in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def summary_of(text: str) -> str:
    """Return the first paragraph of a help text, on one line."""
    return " ".join(text.strip().partition("\n\n")[0].split())
