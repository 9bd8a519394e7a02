"""The training that a launch file describes: its job, its layout, and the place of each value."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moetune.domain.architecture import Decoder
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.units import format_bytes
from moetune.export.keys import Setting, Value

LARGEST_BYTES = 2**20
"""Largest file that is read."""
Severity = Literal["stops", "costs", "note"]
SEVERITIES: tuple[Severity, ...] = ("stops", "costs", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something in a launch that stops it, costs time, or surprises.

    Args:
        line: line of the file; 0 for an argument after `--`, None if no line causes it.
        why: the rule, and the file of the runtime that has it.
        fix: what to write instead; "" if there is nothing to write.
        seconds_saved: seconds of a step that the fix saves; None if it has no price.
    """

    severity: Severity
    line: int | None
    what: str
    why: str = ""
    fix: str = ""
    seconds_saved: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Something that has a place in a launch.

    Args:
        line: its line; 0 for an argument after `--`, and in a file that the launch names.
        file: the name of that file; "" for the launch itself.
    """

    line: int
    file: str = ""

    @property
    def shown(self) -> int | None:
        """The line; None if another file has it."""
        return None if self.file else self.line

    @property
    def where(self) -> str:
        """The words "in line 3", "in sizes.sh" or "behind --"."""
        behind = f"in line {self.line}" if self.line else "behind --"
        return f"in {self.file}" if self.file else behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Given(Placed):
    """A value that a file gives for a key.

    Args:
        written: the key as the file has it, such as "--seq-length".
    """

    value: Value
    written: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A value that the runtime really uses.

    Args:
        key: its key as the runtime spells it.
        line: its line; None for a default.
        file: the file with the value, which the launch names; "" for the launch itself.
    """

    name: str
    value: str
    key: str
    line: int | None
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A launch file after reading.

    Args:
        given: the given values by the runtime's key, with their places.
        values: plain values by key: the given values, and defaults of the launcher.
        facts: facts of the target that the launch changes, such as `hides_gradients`.
        model_words: words on how the model was recognised.
        rows: the values that the runtime uses, with defaults.
        lines: line of each attribute of the layout or the job that the file gives.
        on_host: parts of the predicted memory that wait on the host.
    """

    target: Target
    decoder: Decoder
    model_words: str
    job: TrainingJob
    layout: FoldedLayout
    given: Mapping[str, Given]
    values: Mapping[str, Value]
    facts: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    on_host: frozenset[str] = frozenset()

    def too_large(self, parts: Mapping[str, float], limit: float, fix: str) -> Problem:
        """Return the problem of a launch whose parts of memory, in bytes, exceed a device's limit.

        It is a note if the parts that wait on the host leave enough room.
        """
        peak, held = sum(parts.values()), sum(parts.get(name, 0) for name in self.on_host)
        need, room = format_bytes(round(peak)), format_bytes(round(limit))
        if held and peak - held <= limit:
            what = f"of {need} per device {format_bytes(round(held))} wait on the host"
            why = f"{', '.join(sorted(self.on_host))}; copies to and from them are not priced"
            return Problem(severity="note", line=None, what=what, why=why)
        balanced = peak - parts.get("uneven routing", 0)
        when = "it runs out of memory"
        if balanced <= limit:
            when += f" when routing gets uneven (balanced it takes {format_bytes(round(balanced))})"
        if held:
            when += f" even with {format_bytes(round(held))} on the host"
        return Problem(
            severity="stops", line=None,
            what=f"{when}: {need} per device, more than the {room} there are",
            why=f"predicted, most of it {max(parts, key=parts.__getitem__)}",
            fix=fix or "take more or larger devices",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Options that a user gives in addition to the file.

    Args:
        model: a name or a path; None for the model of the file.
        world_size: number of ranks; None for that of the file.
        devices_per_node: GPUs of a node, for launchers that take all of them.
        extra: words after the file's name and `--`.
        values: variables that a script takes from its environment.
        reads_files: whether a model may be a file of this machine.
        folder: folder of the launch file, for files that it names; None to read no such file.
    """

    target: str | None = None
    model: str | None = None
    world_size: int | None = None
    devices_per_node: int = 8
    extra: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    reads_files: bool = True
    folder: Path | None = None


def rows_of(
    settings: Iterable[Setting], given: Mapping[str, Given], layout: FoldedLayout,
    job: TrainingJob, spelled: Callable[[str], str] = str,
) -> Iterator[Row]:  # fmt: skip
    """Yield the settings of a layout and a job, each with its key and line.

    Args:
        spelled: returns a key as the runtime spells it.
    """
    for setting in settings:
        value = getattr(layout, setting.name, getattr(job, setting.name, None))
        if value is None and setting.name == "narrow":
            value = job.dtype
        if value is None:
            continue
        key = next((key for key in setting.keys if key in given), next(iter(setting.keys)))
        place = given.get(key)
        yield Row(
            name=setting.name, line=place.line if place else None,
            value=", ".join(value) or "none" if isinstance(value, tuple) else str(value),
            key=place.written if place else spelled(key), file=place.file if place else "",
        )  # fmt: skip


def lines_of(settings: Iterable[Setting], given: Mapping[str, Given]) -> dict[str, int]:
    """Return the line of each setting that has a key in the file itself."""
    return {
        setting.name: given[key].line
        for setting in settings for key in setting.keys if key in given and not given[key].file
    }  # fmt: skip
