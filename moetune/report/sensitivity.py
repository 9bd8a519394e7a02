"""Sentences on what a plan's step is sensitive to: parts of its machine, and its decisions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moetune.domain.document import encode
from moetune.domain.units import format_seconds
from moetune.fit.speeds import BANDWIDTH, INTERFERENCE, START

SENSITIVITY_SCHEMA = "moetune.sensitivity/1"
PERCENT = 0.01
_TIE = 1e-9
OP_WORDS: Mapping[str, str] = MappingProxyType({
    "all_to_all": "all-to-alls", "all_reduce": "all-reduces", "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters", "send": "sends",
})  # fmt: skip
_NAMES: Mapping[str, str] = MappingProxyType({
    "gemm rate": "rate of GEMMs", "gemm start-up": "start-up time of GEMMs",
    INTERFERENCE: "interference of what overlaps",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEffect:
    """Effect of a part of the machine on the step.

    Args:
        name: the part in words.
        seconds_per_percent: seconds that the step gets longer for each percent that the part takes
            longer, with the plan's choice fixed.
    """

    part: str
    name: str
    seconds_per_percent: float
    share_per_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobEffect:
    """Effect of a decision of the plan, moved to a neighbour.

    Args:
        knob: the flag of the decision.
        choice: the neighbour, in words.
        seconds: seconds that the step gets longer; None if the neighbour is not possible.
        share: the same as a share of the plan's step.
        note: why the neighbour is not possible, or that it does not fit.
    """

    knob: str
    choice: str
    seconds: float | None
    share: float | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Effects on a plan's step.

    Args:
        plan: its id.
        choice: the plan's choice, in words.
        parts: effects of the machine's parts, the largest first.
        knobs: the plan's decisions at their neighbours, the shortest step first.
        without_effect: parts that do not change the step.
    """

    plan: str
    choice: str
    step_seconds: float
    parts: tuple[PartEffect, ...]
    knobs: tuple[KnobEffect, ...]
    without_effect: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """Sentences, the most important first."""
        return tuple(_words(self))

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune sensitivity`."""
        return {"schema": SENSITIVITY_SCHEMA, **encode(self), "words": list(self.words)}


def part_words(part: str) -> str:
    """Return a part in words: "bandwidth of all-to-alls"."""
    for ending, words in ((BANDWIDTH, "bandwidth of"), (START, "start-up time of")):
        if part.endswith(ending) and not part.startswith("gemm"):
            return f"{words} {OP_WORDS.get(part[: -len(ending) - 1], part)}"
    return _NAMES.get(part, part)


def _words(effects: Sensitivity) -> Iterator[str]:
    if not effects.parts:
        yield f"No part of the machine changes the step of {format_seconds(effects.step_seconds)}."
        return
    first, *following = effects.parts
    more, share = format_seconds(abs(first.seconds_per_percent)), abs(first.share_per_percent)
    yield (
        f"The step follows the {first.name} most: {more} for every percent, {100 * share:.2g} % of "
        f"its {format_seconds(effects.step_seconds)}."
    )
    if following:
        rest = [
            f"the {part.name} ({format_seconds(abs(part.seconds_per_percent))})"
            for part in following[:2]
        ]
        yield f"Then {' and '.join(rest)}."
    yield from _knob_words(effects)


def _knob_words(effects: Sensitivity) -> Iterator[str]:
    memory = next((knob for knob in effects.knobs if knob.knob == "memory-limit"), None)
    rest = [
        knob
        for knob in effects.knobs
        if knob is not memory and knob.seconds is not None and not knob.note
    ]
    if rest:
        nearest = rest[0]
        assert nearest.seconds is not None  # noqa: S101 - as filtered
        how = "longer" if nearest.seconds > 0 else "shorter"
        more = f"{format_seconds(abs(nearest.seconds))} {how}"
        if abs(nearest.seconds) <= _TIE * effects.step_seconds:
            more = "as long"
        yield f"Of its decisions' neighbours the best is {nearest.choice}: {more}."
    if memory is not None and memory.seconds is not None:
        gain = -memory.seconds
        what = (
            "nothing" if gain <= PERCENT * PERCENT * effects.step_seconds else format_seconds(gain)
        )
        yield f"One GiB more of a device's memory would save {what}."
