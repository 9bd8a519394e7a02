"""Layout of help: options in groups, and summaries of commands that are never cut."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

GROUPS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "plan": {
        "What is planned": (
            "model", "d_model", "d_hidden", "num_experts", "top_k", "activation", "num_layers",
            "num_heads", "vocab", "moe_every", "tokens", "batch", "seq", "global_batch", "routing",
            "optimizer", "dtype",
        ),
        "Machine and its memory": (
            "profile", "world_size", "nodes", "target", "memory_limit", "memory_taken",
            "allow_modelled",
        ),
        "Pin the layout of a model": (
            "cp", "tp", "pp", "vpp", "ep", "etp", "expert_parallel", "sequence_parallel",
            "expert_placement", "micro_batch", "zero", "schedule", "stages",
        ),
        "Pin how memory is saved": (
            "strategy", "recompute", "offload_activations", "offload_optimizer",
        ),
        "Pin chunks and exchanges": (
            "forward_degree", "backward_degree", "max_degree", "min_chunk_tokens", "order",
            "overlap", "dispatcher", "cuda_graphs",
        ),
    },
    "profile": {
        "How much is measured": ("preset", "budget", "plan_only", "resume"),
        "What is measured": (
            "model", "d_model", "d_hidden", "num_experts", "top_k", "activation", "tokens",
            "num_layers", "num_heads", "seq", "vocab", "moe_every", "dtype",
        ),
        "Ranks and the profile's name": ("nproc", "oversubscribe", "group_sizes", "name", "base"),
    },
    "serve": {
        "Address": ("host", "port", "allow_host", "tls_cert", "tls_key"),
        "Tokens": ("read_token_file", "write_token_file"),
        "Limits": (
            "max_body", "deadline", "plans_per_hour", "observations_per_hour", "max_store",
        ),
    },
}  # fmt: skip
"""Parameters by command and title; those in no group follow under "Options"."""


class GroupedCommand(TyperCommand):
    """A command whose help prints options in the groups of its name."""

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write arguments, the groups, and what is in no group."""
        titles = {
            name: title for title, names in GROUPS.get(str(self.name), {}).items() for name in names
        }
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        sections |= {title: [] for title in titles.values()}
        sections["Options"] = []
        for one in self.get_params(ctx):
            usual = "Arguments" if one.param_type_name == "argument" else "Options"
            if record := one.get_help_record(ctx):
                sections[titles.get(str(one.name), usual)].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


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
