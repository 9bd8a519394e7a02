"""Stored plans of every kind, and observations, as tables."""

from collections.abc import Callable, Sequence

from moetune.app.library import StoredPlan
from moetune.app.views.words import mfu_cell, tflops_cell, trust_words
from moetune.report.section import EMPTY, Cell, Table

_WIDE = (
    "kind", "tokens/s", "memory", "profile", "TFLOP/s", "MFU", "trust", "tokens per rank",
)  # fmt: skip
_HEADER = ("plan", "model", "ranks", "layout", "for", "step", "made, UTC", *_WIDE)
_NOTE = (
    "step: of the model, of a layer's plan of that layer. tokens/s: of all ranks together. memory: "
    "of the device that needs the most. TFLOP/s: model FLOPs of one device, MFU: their share of "
    "its data sheet's peak."
)


def stored_plans_table(
    found: Sequence[StoredPlan], *, empty: str, num_more: int = 0,
    address: Callable[[str, str], str] | None = None,
) -> Table:  # fmt: skip
    """Return the table of plans.

    Args:
        empty: text without plans.
        num_more: plans that are not in `found`.
        address: of a page, by "plans" or "profiles" and an id or a name; None without pages.
    """
    return Table(
        name="plans",
        title="" if address is None else "Newest first",
        header=_HEADER,
        rows=tuple(_row(one, address) for one in found),
        wide=_WIDE,
        notes=() if address is None else (_NOTE,),
        empty=empty,
        num_more=num_more,
    )


def _row(one: StoredPlan, address: Callable[[str, str], str] | None) -> tuple[Cell, ...]:
    info, plan = one.info, one.plan
    made = info.created_at[:16].replace("T", " ")
    mark = "suspect" if plan and plan.is_suspect else ""
    doubt = " (suspect)" if mark else ""
    speed = plan.throughput if plan else None
    tokens = plan.tokens_per_second if plan else None
    links = {kind: address(kind, name) if address else ""
             for kind, name in (("plans", info.id), ("profiles", info.profile))}  # fmt: skip
    return (
        Cell(text=info.id[:8], value=info.id, href=links["plans"], mark="code"),
        Cell(text=f"{info.model or 'a layer'}{doubt}", value=info.model or "a layer"),
        Cell.count(info.world_size),
        EMPTY if plan is None else _short(plan.words),
        Cell.words(plan.target if plan else ""),
        Cell.words("cannot be read") if plan is None else Cell.seconds(plan.step_seconds),
        Cell(text=made[5:], value=made),
        EMPTY if plan is None else Cell.words(plan.kind),
        EMPTY if tokens is None else Cell(text=f"{tokens:,.0f}", value=tokens),
        EMPTY if plan is None else Cell.size(plan.needed_bytes),
        Cell(text=f"{info.profile}{doubt}", value=info.profile, href=links["profiles"]),
        tflops_cell(speed),
        mfu_cell(speed),
        EMPTY if plan is None else Cell.words(trust_words(plan), mark=mark),
        Cell.count(info.tokens_per_rank),
    )


def _short(words: str) -> Cell:
    """Return a layout as short as it can be told: "dp16 pp2 mb2"."""
    short = words.replace("micro-batch", "mb")
    if " · " in words:
        short = " ".join(size.replace(" ", "") for size in short.split(" · "))
    return Cell(text=short, value=words)
