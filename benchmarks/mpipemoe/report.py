"""The tables of `docs/results/mpipemoe.md`, and the targets they are checked against."""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.mpipemoe.figures import MIB, interference_speeds
from benchmarks.mpipemoe.lab import Step, StrategyCell
from benchmarks.mpipemoe.memory import Row
from benchmarks.netlab.report import Target
from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.interference import Interference
from moetune.domain.prediction_error import prediction_error

_MAX_OVER_BOUND = 1.02
_MAX_MEMORY_ERROR = 0.02
_MIN_SHARE = 0.98
_MAX_REGRET = 0.05
_MAX_ERROR = 0.10
_CHECKED: tuple[tuple[float, Strategy], ...] = ((200, "S4"), (1000, "S3"))


def memory_targets(rows: Sequence[Row]) -> Iterator[Target]:
    """Yield the promises about the peak of a step."""
    over = max(rows, key=lambda row: row.measured.live_bytes / row.bound_bytes)
    share = over.measured.live_bytes / over.bound_bytes
    yield Target(
        promise=f"peak ≤ {_MAX_OVER_BOUND} × (states + 2 · activations − 2Δ), relu",
        found=f"at most {share:.3f} × ({_row_name(over)})",
        is_met=share <= _MAX_OVER_BOUND,
    )
    errors = {row: prediction_error(row.predicted_bytes, row.measured.live_bytes) for row in rows}
    worst = max(rows, key=lambda row: abs(errors[row]))
    yield Target(
        promise=f"the predicted peak is within {_MAX_MEMORY_ERROR:.0%} of the measured one",
        found=f"at worst {errors[worst]:+.1%} ({_row_name(worst)})",
        is_met=abs(errors[worst]) <= _MAX_MEMORY_ERROR,
    )
    least = min(rows, key=lambda row: row.share_of_bound)
    yield Target(
        promise=f"at least {_MIN_SHARE:.0%} of the saving of Eq. 6 (the paper: about 95 %)",
        found=f"at least {least.share_of_bound:.1%} ({_row_name(least)}), mean "
        f"{statistics.mean(row.share_of_bound for row in rows):.1%}",
        is_met=least.share_of_bound >= _MIN_SHARE,
    )


def lab_targets(cells: Sequence[StrategyCell]) -> Iterator[Target]:
    """Yield the promises about the choice and its time."""
    worst = max(cells, key=lambda cell: cell.regret)
    yield Target(
        promise=f"under a limit that binds the plan is within {_MAX_REGRET:.0%} of the best "
        "measured feasible choice, in every cell",
        found=f"at worst {worst.regret:+.1%} ({_name(worst)}), median "
        f"{statistics.median(cell.regret for cell in cells):+.1%}",
        is_met=worst.regret <= _MAX_REGRET,
    )
    for rate, strategy in _CHECKED:
        errors = [
            (abs(step.error), cell, step)
            for cell in cells
            if cell.rate_mbit == rate
            for step in cell.steps
            if step.strategy == strategy
        ]
        if errors:
            error, cell, step = max(errors, key=lambda one: one[0])
            yield Target(
                promise=f"{strategy} at {rate:g} Mbit/s costs what the timeline says within "
                f"{_MAX_ERROR:.0%}",
                found=f"median {statistics.median(one[0] for one in errors):.1%}, at worst "
                f"{step.error:+.1%} ({_name(cell)}, {step.degree} chunks)",
                is_met=error <= _MAX_ERROR,
            )
    ours, paper = count_best(cells)
    yield Target(
        promise="the strategy measured best is taken more often than by Eq. 10",
        found=f"ours in {ours} of {len(cells)} cells, Eq. 10 in {paper}; mean regret "
        f"{statistics.mean(cell.regret for cell in cells):+.1%} against "
        f"{statistics.mean(cell.paper_regret for cell in cells):+.1%} of Eq. 10's strategy at "
        "its best degree",
        is_met=ours >= paper,
    )


def count_best(cells: Sequence[StrategyCell]) -> tuple[int, int]:
    """Return in how many cells ours, and Eq. 10, took the strategy measured best."""
    ours = sum(cell.limited.strategy == cell.best.strategy for cell in cells)
    return ours, sum(cell.paper_choice == cell.best.strategy for cell in cells)


def memory_table(rows: Sequence[Row]) -> str:
    """Return every measured peak as Markdown (Fig. 10)."""
    header = (
        "model", "tokens", "n", "strategy", "measured MiB", "bound MiB", "measured / bound",
        "predicted MiB", "error", "saving, % of Eq. 6", "host MiB",
    )  # fmt: skip
    return table(
        header,
        [
            (
                row.model, f"{row.tokens}", f"{row.degree}", row.strategy,
                mib(row.measured.live_bytes), mib(row.bound_bytes),
                f"{row.measured.live_bytes / row.bound_bytes:.3f}", mib(row.predicted_bytes),
                f"{prediction_error(row.predicted_bytes, row.measured.live_bytes):+.1%}",
                f"{100 * row.share_of_bound:.1f}", mib(row.measured.host_bytes),
            )
            for row in rows
        ],
    )  # fmt: skip


def breakdown_table(rows: Sequence[tuple[str, int, int, int, int]]) -> str:
    """Return Fig. 2 as Markdown."""
    header = ("model", "tokens", "states MiB", "activations MiB", "buffers MiB", "not states")
    return table(
        header,
        [
            (model, f"{tokens}", mib(states), mib(activations), mib(buffers),
             f"{(activations + buffers) / (states + activations + buffers):.0%}")
            for model, tokens, states, activations, buffers in rows
        ],
    )  # fmt: skip


def interference_table(tables: Sequence[tuple[str, Interference]]) -> str:
    """Return Fig. 3 as Markdown."""
    names = list(interference_speeds(tables[0][1]))
    rows = [
        (link, *(f"{speed:.2f}" for speed in interference_speeds(one).values()))
        for link, one in tables
    ]
    return table(("link", *names), rows)


def degree_table(cells: Sequence[StrategyCell]) -> str:
    """Return Figs. 8 and 12 as Markdown: ms by degree, the plan's, and DeepSpeed's."""
    degrees = sorted({one.degree for one in cells[0].steps})
    header = (
        "model", "link", "tokens", *(f"n = {degree}" for degree in degrees), "plan",
        "chunks planned", "DeepSpeed", "times as fast",
    )  # fmt: skip
    rows = [
        (
            cell.model, link(cell), f"{cell.tokens}",
            *(ms(cell.of("none", degree).seconds) for degree in degrees), ms(cell.free.seconds),
            f"{cell.free.forward_degree}, {cell.free.backward_degree}",
            ms(cell.peer_seconds) if cell.peer_seconds else "–",
            f"{cell.peer_seconds / cell.free.seconds:.2f}" if cell.peer_seconds else "–",
        )
        for cell in cells
    ]  # fmt: skip
    return table(header, rows)


def choice_table(cells: Sequence[StrategyCell]) -> str:
    """Return Fig. 13 as Markdown: each strategy's fastest feasible step, and what was chosen."""
    header = (
        "model", "link", "tokens", "limit MiB", *(f"{one} ms" for one in STRATEGIES[1:]),
        "chosen", "chunks", "predicted ms", "measured ms", "best", "regret", "Eq. 10", "its regret",
        "without a limit ms",
    )  # fmt: skip

    def fastest(cell: StrategyCell, strategy: Strategy) -> Step:
        mine = [one for one in cell.feasible if one.strategy == strategy]
        return min(mine, key=lambda one: one.seconds)

    rows = [
        (
            cell.model, link(cell), f"{cell.tokens}", mib(cell.limit_bytes),
            *(ms(fastest(cell, one).seconds) for one in STRATEGIES[1:]),
            cell.limited.strategy,
            f"{cell.limited.forward_degree}, {cell.limited.backward_degree}",
            ms(cell.limited.predicted_seconds), ms(cell.limited.seconds),
            f"{cell.best.strategy}, {cell.best.degree}", f"{cell.regret:+.1%}",
            cell.paper_choice, f"{cell.paper_regret:+.1%}", ms(cell.free.seconds),
        )
        for cell in cells
    ]  # fmt: skip
    return table(header, rows)


def step_table(cells: Sequence[StrategyCell]) -> str:
    """Return every measured step as Markdown (Figs. 9, 11 and 13)."""
    header = (
        "model", "link", "tokens", "strategy", "n", "predicted ms", "measured ms", "error",
        "formula MiB", "measured peak MiB",
    )  # fmt: skip
    rows = [
        (
            cell.model, link(cell), f"{cell.tokens}", step.strategy, f"{step.degree}",
            ms(step.predicted_seconds), ms(step.seconds), f"{step.error:+.1%}",
            mib(step.needed_bytes), mib(step.peak_bytes) if step.peak_bytes else "–",
        )
        for cell in cells
        for step in cell.steps
    ]  # fmt: skip
    peers = [
        (
            cell.model, link(cell), f"{cell.tokens}", "DeepSpeed", "–", "–", ms(cell.peer_seconds),
            "–", "–", mib(cell.peer_bytes) if cell.peer_bytes else "–",
        )
        for cell in cells
        if cell.peer_seconds
    ]  # fmt: skip
    return table(header, [*rows, *peers])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def link(cell: StrategyCell) -> str:
    """Return the cell's link in words."""
    return "loopback" if cell.rate_mbit is None else f"{cell.rate_mbit:g} Mbit/s"


def ms(seconds: float) -> str:
    """Return milliseconds."""
    return f"{seconds * 1e3:.1f}"


def mib(num_bytes: float) -> str:
    """Return MiB."""
    return f"{num_bytes / MIB:.1f}"


def _name(cell: StrategyCell) -> str:
    return f"{cell.model}, {link(cell)}, {cell.tokens} tokens"


def _row_name(row: Row) -> str:
    return f"{row.model}, {row.tokens} tokens, n = {row.degree}, {row.strategy}"
