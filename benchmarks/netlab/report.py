"""The tables of `docs/results/netlab.md`, and the targets they are checked against."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.netlab.experiment import CellResult
from moetune.domain.records import prediction_error

_MAX_MEDIAN_ERROR, _MAX_ERROR = 0.04, 0.10
_MAX_REGRET = 0.03
_MAX_OVER_BOUND = 1.10
_MIN_BEST_SPEED_UP = 1.7
_MAX_SLOWDOWN = 0.02
_MIN_PEER_RATIO = 1.5
_PEER_SHARE = 1 / 3
_MAX_OVERHEAD = 0.06
_SAFE = (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one cell; every time is a median over the rounds, in seconds."""

    cell: CellResult

    def measured(self, variant: str) -> float:
        """Return the median step of a variant."""
        return statistics.median(self.cell.seconds[variant])

    def degree(self, degree: int) -> float:
        """Return the median step of our layer at a degree."""
        return self.measured(f"ours:{degree}")

    def error(self, degree: int) -> float:
        """Return (predicted − measured) / measured of a degree."""
        return prediction_error(self.cell.predicted_seconds[degree], self.degree(degree))

    @property
    def rate(self) -> str:
        """The rate in words."""
        rate = self.cell.rate_mbit
        return "loopback" if rate is None else f"{rate:g} Mbit/s"

    @property
    def planned_degrees(self) -> tuple[int, int]:
        """Forward and backward degree of the plan."""
        pipeline = self.cell.plan.pipeline
        return pipeline.forward_degree, pipeline.backward_degree

    @property
    def planned(self) -> float:
        """Median step with the plan."""
        return self.measured("planned")

    @property
    def planned_error(self) -> float:
        """(predicted − measured) / measured of the plan."""
        return self.cell.plan.predicted.step_seconds / self.planned - 1

    @property
    def best_degree(self) -> int:
        """The fastest measured degree."""
        return min(self.cell.predicted_seconds, key=self.degree)

    @property
    def regret(self) -> float:
        """How much slower the plan is than the fastest measured degree."""
        return self.planned / self.degree(self.best_degree) - 1

    @property
    def speed_up(self) -> float:
        """Degree 1 over the plan."""
        return self.degree(1) / self.planned

    @property
    def plain_speed_up(self) -> float:
        """One chunk over gloo's all-to-all, over the plan."""
        return self.measured("plain") / self.planned

    @property
    def ceiling(self) -> float:
        """What perfect overlap would make of degree 1's bare collectives and products.

        A phase lasts at least as long as its two collectives, and as its products: two of six
        forward and four backward.
        """
        collectives, products = (self.measured(f"bare_{name}") for name in ("collectives", "gemms"))
        forward, backward = (max(collectives / 2, products * share) for share in (1 / 3, 2 / 3))
        return (collectives + products) / (forward + backward)

    @property
    def over_bound(self) -> float:
        """The plan over the longer of its bare collectives and its products."""
        return self.planned / max(self.measured("bare_collectives"), self.measured("bare_gemms"))

    @property
    def overhead(self) -> float:
        """What degree 1 costs more than its bare products and collectives."""
        return self.degree(1) / self.measured("bare") - 1

    @property
    def overhead_over_ffn(self) -> float:
        """What degree 1 costs more than torch's FFNs between the bare collectives."""
        return self.degree(1) / self.measured("ffn") - 1

    @property
    def peer_ratio(self) -> float | None:
        """DeepSpeed over the plan."""
        if "deepspeed" not in self.cell.seconds:
            return None
        return self.measured("deepspeed") / self.planned

    @property
    def peer_share(self) -> float | None:
        """Plain all-to-alls over DeepSpeed's step: the share of it that is communication."""
        if "deepspeed" not in self.cell.seconds:
            return None
        return self.measured("plain_collectives") / self.measured("deepspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One promise and whether it was kept."""

    promise: str
    measured: str
    is_met: bool


def check_targets(summaries: Sequence[Summary]) -> tuple[Target, ...]:
    """Return every target that these cells can be checked against."""
    lab = [row for row in summaries if row.cell.rate_mbit is not None]
    loopback = [row for row in summaries if row.cell.rate_mbit is None]
    return (
        *(_lab_targets(lab) if lab else ()),
        *(_loopback_targets(loopback) if loopback else ()),
        *_peer_targets(summaries),
        *_overhead_targets(summaries),
    )


def degree_table(summaries: Sequence[Summary]) -> str:
    """Return predicted and measured steps of every cell and degree as Markdown."""
    rows = [
        (row.rate, f"{row.cell.tokens}", f"{degree}", _ms(seconds), _ms(row.degree(degree)),
         f"{row.error(degree):+.1%}")
        for row in summaries
        for degree, seconds in row.cell.predicted_seconds.items()
    ]  # fmt: skip
    return _table(("link", "tokens a rank", "degree", "predicted ms", "measured ms", "error"), rows)


def cell_table(summaries: Sequence[Summary]) -> str:
    """Return one row per cell as Markdown."""
    header = (
        "link", "tokens a rank", "planned degree (forward, backward)", "predicted ms",
        "measured ms", "error", "best degree", "regret", "speed-up over degree 1",
        "with perfect overlap",
        "over one chunk with gloo's all-to-all",
        "DeepSpeed ms", "DeepSpeed / planned", "communication in DeepSpeed's step",
        "bare ms (collectives, products)", "cost over bare", "over torch's FFN",
        "busiest expert / mean",
    )  # fmt: skip
    return _table(header, [_cell_row(row) for row in summaries])


def _cell_row(row: Summary) -> tuple[str, ...]:
    peer = row.measured("deepspeed") if row.peer_ratio else None
    return (
        row.rate,
        f"{row.cell.tokens}",
        "{}, {}".format(*row.planned_degrees),
        _ms(row.cell.plan.predicted.step_seconds),
        _ms(row.planned),
        f"{row.planned_error:+.1%}",
        f"{row.best_degree}",
        f"{row.regret:+.1%}",
        f"{row.speed_up:.2f}",
        f"{row.ceiling:.2f}",
        f"{row.plain_speed_up:.2f}",
        _ms(peer) if peer else "–",
        f"{row.peer_ratio:.2f}" if row.peer_ratio else "–",
        f"{row.peer_share:.0%}" if row.peer_share else "–",
        _floor(row),
        f"{row.overhead:+.1%}",
        f"{row.overhead_over_ffn:+.1%}",
        f"{row.cell.imbalance:.2f}",
    )


def _lab_targets(lab: Sequence[Summary]) -> Iterator[Target]:
    yield from _prediction_targets(lab)
    yield from _speed_targets(lab)


def _prediction_targets(lab: Sequence[Summary]) -> Iterator[Target]:
    errors = [abs(row.error(degree)) for row in lab for degree in row.cell.predicted_seconds]
    error = statistics.median(errors)
    yield Target(
        promise=f"median |predicted − measured| over cells and degrees ≤ {_MAX_MEDIAN_ERROR:.0%}",
        measured=f"{error:.1%} of {len(errors)}",
        is_met=error <= _MAX_MEDIAN_ERROR,
    )
    yield Target(
        promise=f"the largest of them ≤ {_MAX_ERROR:.0%}",
        measured=f"{max(errors):.1%}",
        is_met=max(errors) <= _MAX_ERROR,
    )
    worst = max(lab, key=lambda row: row.regret)
    yield Target(
        promise=f"the plan is within {_MAX_REGRET:.0%} of the best degree in every cell",
        measured=f"at worst {worst.regret:+.1%} ({_name(worst)})",
        is_met=worst.regret <= _MAX_REGRET,
    )


def _speed_targets(lab: Sequence[Summary]) -> Iterator[Target]:
    best = max(lab, key=lambda row: row.speed_up)
    yield Target(
        promise=f"≥ {_MIN_BEST_SPEED_UP} × as fast as degree 1 in the best cell",
        measured=f"{best.speed_up:.2f} × ({_name(best)}); perfect overlap would give "
        f"{best.ceiling:.2f} × there, and {max(row.ceiling for row in lab):.2f} × at best",
        is_met=best.speed_up >= _MIN_BEST_SPEED_UP,
    )
    yield Target(
        promise=f"that cell takes ≤ {_MAX_OVER_BOUND} × its communication or its computation",
        measured=f"{best.over_bound:.2f} ×",
        is_met=best.over_bound <= _MAX_OVER_BOUND,
    )
    plain = max(lab, key=lambda row: row.plain_speed_up)
    yield Target(
        promise="the same over one chunk with gloo's all-to-all, which peers use",
        measured=f"{plain.plain_speed_up:.2f} × ({_name(plain)})",
        is_met=plain.plain_speed_up >= _MIN_BEST_SPEED_UP,
    )
    slowest = min(lab, key=lambda row: row.speed_up)
    yield Target(
        promise=f"nowhere slower than degree 1 by more than {_MAX_SLOWDOWN:.0%}",
        measured=f"at worst {slowest.speed_up:.2f} × ({_name(slowest)})",
        is_met=1 / slowest.speed_up - 1 <= _MAX_SLOWDOWN,
    )


def _loopback_targets(loopback: Sequence[Summary]) -> Iterator[Target]:
    plans = ", ".join("{}+{}".format(*row.planned_degrees) for row in loopback)
    yield Target(
        promise="on plain loopback the plan says degree 1, and why",
        measured=f"{plans}: {loopback[-1].cell.plan.decision.why}",
        is_met=all(row.planned_degrees == _SAFE for row in loopback),
    )


def _peer_targets(summaries: Sequence[Summary]) -> Iterator[Target]:
    ratios = [(row, row.peer_ratio, row.peer_share) for row in summaries]
    known = [(row, ratio, share) for row, ratio, share in ratios if ratio and share]
    bound = [(ratio, _name(row)) for row, ratio, share in known if share >= _PEER_SHARE]
    if bound:
        ratio, name = min(bound)
        yield Target(
            promise=f"DeepSpeed takes ≥ {_MIN_PEER_RATIO} × as long where communication is a "
            "third or more of its step",
            measured=f"at least {ratio:.2f} × ({name}), in {len(bound)} cells",
            is_met=ratio >= _MIN_PEER_RATIO,
        )
    if known:
        ratio, name = min((ratio, _name(row)) for row, ratio, _ in known)
        yield Target(
            promise="DeepSpeed is nowhere faster",
            measured=f"at least {ratio:.2f} × ({name})",
            is_met=ratio >= 1,
        )


def _overhead_targets(summaries: Sequence[Summary]) -> Iterator[Target]:
    worst = max(summaries, key=lambda row: row.overhead)
    least, most = (extreme(row.overhead for row in summaries) for extreme in (min, max))
    yield Target(
        promise=f"degree 1 costs ≤ {_MAX_OVERHEAD:.0%} more than its bare products and collectives",
        measured=f"{least:+.1%} to {most:+.1%} ({_name(worst)})",
        is_met=most <= _MAX_OVERHEAD,
    )
    worst = max(summaries, key=lambda row: row.overhead_over_ffn)
    least, most = (extreme(row.overhead_over_ffn for row in summaries) for extreme in (min, max))
    yield Target(
        promise=f"and ≤ {_MAX_OVERHEAD:.0%} more than torch's FFNs between these collectives",
        measured=f"{least:+.1%} to {most:+.1%} ({_name(worst)})",
        is_met=most <= _MAX_OVERHEAD,
    )


def _floor(row: Summary) -> str:
    parts = (_ms(row.measured(name)) for name in ("bare_collectives", "bare_gemms"))
    return f"{_ms(row.measured('bare'))} ({', '.join(parts)})"


def _name(row: Summary) -> str:
    return f"{row.rate}, {row.cell.tokens} tokens"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
