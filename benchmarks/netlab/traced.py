"""Steps of the lab on a trace: what experts, transfers and neither take, predicted and recorded.

    python -m benchmarks.netlab.traced      # as root, about 6 minutes on two quiet cores

`benchmarks.netlab` says which targets are missed; this page shows where the time is. A recorded
step is the median of several by its length, on rank 0.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.experiment import (
    DTYPE,
    NUM_RANKS,
    PROFILE,
    measure_profile,
    measure_steps,
    steps_command,
)
from benchmarks.netlab.lab import Lab, check_supported
from moetune.domain.constraints import Bounds, Constraints
from moetune.domain.layer import PHASES, LayerShape, Phase
from moetune.domain.request import PlanRequest
from moetune.solve.trace import MICROSECONDS, PREDICTED
from moetune.workflows.files import plan_to_json, write_text
from moetune.workflows.plan import make_plan

_FOLDER = Path(__file__).parents[2] / "docs/results"
_LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=2, top_k=1, activation="relu")
_CASES: tuple[tuple[float | None, int, int], ...] = (
    (500.0, 4096, 8), (200.0, 1024, 16), (1000.0, 4096, 8), (None, 1024, 1), (None, 4096, 1),
)  # fmt: skip
"""Mbit/s, tokens of a rank, chunks."""
_BARE = ("bare_gemms", "bare_collectives", "ffn")
_RECORDED, _ROUNDS = 7, 7
_SHARE = {"forward": 1 / 3, "backward": 2 / 3}
"""Of a step's products."""
_WIDTH, _LANE, _GAP = 900, 16, 6
_COLORS = {"comp": "#2a6f97", "comm": "#e07a5f", "mem": "#81b29a"}

_Span = tuple[Phase, str, float, float]
"""Phase, class of operation, start and end in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Seconds of one phase: under computation, under transfers, under neither, and in all."""

    experts: float
    link: float
    neither: float
    total: float

    @classmethod
    def of(cls, spans: Sequence[_Span], phase: Phase) -> "Parts":
        """Return those of a phase's spans."""
        mine = [one for one in spans if one[0] == phase]
        low, high = min(one[2] for one in mine), max(one[3] for one in mine)
        experts = _covered([one[2:] for one in mine if one[1] == "comp"])
        link = _covered([one[2:] for one in mine if one[1] == "comm"])
        busy = _covered([one[2:] for one in mine])
        return cls(experts=experts, link=link, neither=high - low - busy, total=high - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One cell.

    Args:
        bare: seconds of a step's products, collectives, and torch's own FFN with them.
        seconds: of the layer's step, not recorded.
    """

    name: str
    degree: int
    bare: Mapping[str, float]
    seconds: float
    predicted: tuple[_Span, ...]
    recorded: tuple[_Span, ...]


def main() -> None:
    """Measure, and write the page with its pictures."""
    check_supported()
    found = [_measure(*case) for case in _CASES]
    for number, one in enumerate(found):
        write_text(_FOLDER / f"netlab-trace-{number}.svg", _picture(one))
    report = "\n".join(_lines(found)) + "\n"
    print(report)
    write_text(_FOLDER / "netlab-traces.md", report)


def _measure(rate_mbit: float | None, tokens: int, degree: int) -> Traced:
    with Lab(num_ranks=NUM_RANKS, rate_mbit=rate_mbit) as lab, tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        profile = measure_profile(
            lab, layer=_LAYER, tokens=tokens, budget="45s", folder=folder, echo=sys.stderr
        )
        pinned = Bounds(forward_degree=degree, backward_degree=degree)
        request = PlanRequest(
            layer=_LAYER, world_size=NUM_RANKS, tokens_per_rank=tokens, dtype=DTYPE,
            constraints=Constraints(bounds=pinned),
        )  # fmt: skip
        write_text(folder / "plan.json", plan_to_json(make_plan(request, profile=profile)))
        traces = [_trace(lab, folder) for _ in range(_RECORDED)]
        variants = [f"ours:{degree}", *_BARE]
        command = steps_command(layer=_LAYER, tokens=[tokens], variants=variants, rounds=_ROUNDS)
        lines = measure_steps(lab, command, peer=None, echo=sys.stderr)
    median = {name: statistics.median(lines[tokens, name].seconds) for name in variants}
    recorded = sorted((_spans(one, PREDICTED + 1) for one in traces), key=_length)
    link = "loopback" if rate_mbit is None else f"{rate_mbit:g} Mbit/s"
    return Traced(
        name=f"{link}, {tokens} tokens", degree=degree,
        bare={name: median[name] for name in _BARE}, seconds=median[f"ours:{degree}"],
        predicted=_spans(traces[0], PREDICTED), recorded=recorded[len(recorded) // 2],
    )  # fmt: skip


def _trace(lab: Lab, folder: Path) -> dict[str, object]:
    """Return what `moetune trace` writes of one recorded step."""
    command = [
        *(sys.executable, "-m", "moetune", "--db", str(folder / "netlab.db"), "--no-config"),
        *("trace", str(folder / "plan.json"), "--profile", PROFILE),
        *("--output", str(folder / "trace.json")),
    ]
    lab.run(command, timeout_seconds=120, echo=sys.stderr)
    found: dict[str, object] = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    return found


def _spans(trace: Mapping[str, object], process: int) -> tuple[_Span, ...]:
    events = trace["traceEvents"]
    assert isinstance(events, list)  # noqa: S101 - of the document
    return tuple(
        (
            one["name"].partition(" ")[0],
            one["cat"],
            one["ts"] / MICROSECONDS,
            (one["ts"] + one["dur"]) / MICROSECONDS,
        )
        for one in events
        if one["ph"] == "X" and one["pid"] == process
    )


def _length(spans: Sequence[_Span]) -> float:
    return max(one[3] for one in spans) - min(one[2] for one in spans)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds in which at least one span runs."""
    total, end = 0.0, 0.0
    for low, high in sorted(spans):
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return total


def _lines(found: Sequence[Traced]) -> Iterator[str]:
    yield from ("# Steps of the network lab on a trace", "", describe_machine(peer=False, load=0.0))
    yield ""
    yield (
        "Layer and lab as in the [network lab](netlab.md), a profile of 45 s each. *Experts* and "
        "*link* are the times in which one computes or a transfer is under way, *neither* is the "
        "layer's own work; *alone* is the same work without the other at its side."
    )
    for number, one in enumerate(found):
        yield from ("", f"## {one.name}, {one.degree} chunks", "")
        yield (
            f"A step takes {_ms(one.seconds)} ms. Its bare products take "
            f"{_ms(one.bare['bare_gemms'])} ms, its bare collectives "
            f"{_ms(one.bare['bare_collectives'])}, and torch's own FFNs between these "
            f"{_ms(one.bare['ffn'])}."
        )
        yield from ("", "| phase | | experts ms | link ms | neither ms | in all ms |")
        yield "|---|---|---:|---:|---:|---:|"
        for phase in PHASES:
            gemms, link = one.bare["bare_gemms"] * _SHARE[phase], one.bare["bare_collectives"] / 2
            yield f"| {phase} | alone | {_ms(gemms)} | {_ms(link)} | | |"
            for source, spans in (("predicted", one.predicted), ("recorded", one.recorded)):
                parts = Parts.of(spans, phase)
                times = (parts.experts, parts.link, parts.neither, parts.total)
                yield f"| {phase} | {source} | {' | '.join(map(_ms, times))} |"
        yield from ("", f"![predicted above, recorded below](netlab-trace-{number}.svg)")


def _picture(one: Traced) -> str:
    """Return both timelines as SVG: experts and link, predicted above recorded."""
    longest = max(sum(Parts.of(each, phase).total for phase in PHASES)
                  for each in (one.predicted, one.recorded))  # fmt: skip
    bars: list[str] = []
    for row, spans in enumerate((one.predicted, one.recorded)):
        start = 0.0
        for phase in PHASES:
            mine = [each for each in spans if each[0] == phase]
            low = min(each[2] for each in mine)
            for _, resource, begin, end in mine:
                lane = 2 * row + (resource == "comm")
                x, width = (begin - low + start) / longest, (end - begin) / longest
                bars.append(
                    f'<rect x="{x * _WIDTH:.1f}" y="{lane * (_LANE + _GAP)}" '
                    f'width="{max(width * _WIDTH - 0.5, 0.5):.1f}" height="{_LANE}" '
                    f'fill="{_COLORS[resource]}" fill-opacity="0.75"/>'
                )
            start += Parts.of(spans, phase).total
    height = 4 * (_LANE + _GAP)
    title = escape(f"{one.name}, {one.degree} chunks: {longest * 1e3:.0f} ms wide")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'role="img"><title>{title}</title>{"".join(bars)}</svg>\n'
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


if __name__ == "__main__":
    main()
