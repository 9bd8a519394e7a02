"""Stored plans of every kind as a table."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from moetune.app.library import StoredPlan
from moetune.report.section import EMPTY, Cell, Table
from moetune.report.words import mfu_words, speed_cell, trust_words

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
    plans: Sequence[StoredPlan], *, empty: str, num_more: int = 0,
    address: Callable[[str, str], str] | None = None,
) -> Table:  # fmt: skip
    """Return the table of stored plans.

    Args:
        empty: text if there are no plans.
        num_more: number of further plans that are not in `plans`.
        address: returns a page's address from its kind and an id or a name; None without pages.
    """
    return Table(
        name="plans",
        title="" if address is None else "Newest first",
        header=_HEADER,
        rows=tuple(_row(stored, address) for stored in plans),
        wide=_WIDE,
        notes=() if address is None else (_NOTE,),
        empty=empty,
        num_more=num_more,
    )


def _row(stored: StoredPlan, address: Callable[[str, str], str] | None) -> tuple[Cell, ...]:
    info, plan = stored.info, stored.plan
    made = info.created_at[:16].replace("T", " ")
    mark = "suspect" if plan and plan.is_suspect else ""
    doubt = " (suspect)" if mark else ""
    links = {kind: address(kind, name) if address else ""
             for kind, name in (("plans", info.id), ("profiles", info.profile))}  # fmt: skip
    words = plan.words if plan else ""
    short = words.replace("micro-batch", "mb")
    if " · " in words:  # a layout, as "dp16 pp2 mb2"
        short = " ".join(size.replace(" ", "") for size in short.split(" · "))
    tokens, speed = (plan.tokens_per_second, plan.throughput) if plan else (None, None)
    return (
        Cell(text=info.id[:8], value=info.id, href=links["plans"], mark="code"),
        Cell(text=f"{info.model or 'a layer'}{doubt}", value=info.model or "a layer"),
        Cell.count(info.world_size),
        Cell(text=short, value=words) if plan else EMPTY,
        Cell.words(plan.target if plan else ""),
        Cell.seconds(plan.step_seconds) if plan else Cell.words("cannot be read"),
        Cell(text=made[5:], value=made),
        Cell.words(plan.kind) if plan else EMPTY,
        EMPTY if tokens is None else Cell.count(tokens),
        Cell.size(plan.needed_bytes) if plan else EMPTY,
        Cell(text=f"{info.profile}{doubt}", value=info.profile, href=links["profiles"]),
        replace(speed_cell(speed), text=f"{speed.flops_per_second / 1e12:.3g}") if speed else EMPTY,
        Cell(text=mfu_words(speed).removeprefix("MFU "), value=speed.mfu, unit="1")
        if speed
        else EMPTY,
        Cell.words(trust_words(plan), mark=mark) if plan else EMPTY,
        Cell.count(info.tokens_per_rank),
    )
