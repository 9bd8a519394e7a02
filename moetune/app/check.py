"""A launch file checked: what it runs, what stops it or costs time, and what would be better.

The file's layout is held against the rules of its runtime and priced as a plan is; each change is
the answer of a search in which all else is pinned.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from moetune.app.plan import sound_numbers
from moetune.app.training import search_of, step_prices, usable_bytes
from moetune.app.training_plan import answer_of
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.layout import BrokenRule
from moetune.domain.profile import Profile
from moetune.domain.rules import broken_rules
from moetune.domain.site import check_format, site_of
from moetune.domain.target_rules import model_rules, target_rules
from moetune.domain.targets import Target
from moetune.domain.training import LayoutRequest
from moetune.domain.training_document import TrainingAnswer
from moetune.domain.units import format_bytes
from moetune.fit.costs import costs_of
from moetune.launches.files import LARGEST_BYTES, LaunchFile, open_launch
from moetune.launches.reading import SEVERITIES, Asked, Problem, Reading
from moetune.solve.model.alternatives import LEAST_SAVED, with_graphs
from moetune.solve.model.best import BestLayouts
from moetune.solve.model.search import FoldedSearch, PricedLayout

MOST_CHANGES = 3
_GROUPS: tuple[tuple[str, ...], ...] = (
    ("tp",), ("cp",), ("pp", "vpp", "schedule", "stages"), ("vpp", "schedule", "stages"), ("ep",),
    ("etp",), ("micro_batch",), ("recompute",), ("dispatcher",), ("overlap",), ("zero",),
    ("offload_activations",), ("offload_optimizer",),
)  # fmt: skip
"""Decisions that are changed one at a time; those of a pipeline go together."""
_NAMES = ("tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch", "dp", "global_batch", "recompute",
          "dispatcher", "overlap", "zero", "stages")  # fmt: skip
_WORDS = {
    "num_heads": "tp", "layers": "pp", "recomputation": "recompute", "ZeRO": "zero",
    "deepep": "dispatcher", "hybrid_ep": "dispatcher", "all_gather": "dispatcher",
}  # fmt: skip
"""Words of rules, and the decision that they are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """A change of the launch, with the step and the memory that it leads to.

    Args:
        change: as the file would have it.
        keys: that change, with their values; None for one that is left out.
        seconds_saved: of a step; None where the launch as it is cannot start.
    """

    change: str
    keys: Mapping[str, Any]
    answer: TrainingAnswer
    seconds_saved: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A launch file, checked.

    Args:
        problems: those that stop it first.
        answer: the step and the memory as it is; None where the layout has none.
        better: single changes, the shortest step first.
        best: all changes that lead to the best layout; None where none is better.
    """

    file: str
    profile: Profile
    reading: Reading
    problems: tuple[Problem, ...]
    answer: TrainingAnswer | None
    limit_bytes: int
    better: tuple[Better, ...] = ()
    best: Better | None = None

    @property
    def starts(self) -> bool:
        """Whether nothing that is known stops it."""
        return all(problem.severity != "stops" for problem in self.problems)


def check_file(file: Path, asked: Asked, profile: Profile) -> tuple[LaunchFile, Checked]:
    """Return a launch file and its check on a profile's machine.

    Raises:
        InputError: it cannot be read, is of an unknown kind, or something of it is missing.
        ProfileError: the profile lacks an operation.
    """
    try:
        if file.stat().st_size > LARGEST_BYTES:
            raise InputError(f"{file} is larger than 1 MiB", "give the file that starts the run")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}", "give a file") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is no text", "give the file that starts the run") from None
    width = site_of(profile).devices_per_node
    launch = open_launch(file.name, text, replace(asked, devices_per_node=width))
    return launch, check_launch(str(file), launch, profile)


def written_change(launch: LaunchFile, checked: Checked, take: str) -> str:
    """Return the file with one of the changes, which is read again to prove it.

    Args:
        take: its number in `better`, or "best".

    Raises:
        InputError: there is no such change, or the file's lines cannot have it.
    """
    choices = {str(number): better for number, better in enumerate(checked.better, start=1)}
    if checked.best is not None:
        choices["best"] = checked.best
    if take not in choices:
        known = ", ".join(choices) or "none: nothing better is known"
        raise InputError(f"--take {take!r} is no change", f"use one of {known}")
    chosen = choices[take]
    text = launch.written(chosen.keys)
    again, wanted = launch.read_again(text).reading, chosen.answer.layout
    if again.layout.explicit(again.decoder) != wanted.explicit(again.decoder):
        raise InputError(
            "the file's lines cannot have this change", f"write it by hand: {chosen.change}"
        )
    return text


def check_launch(file: str, launch: LaunchFile, profile: Profile) -> Checked:
    """Return a launch file as it runs on a profile's machine.

    Raises:
        ProfileError: the profile lacks an operation.
    """
    with sound_numbers(profile.name):
        return _Check(file, launch, profile).checked()


@dataclass(slots=True)
class _Check:
    """The check of a launch."""

    file: str
    launch: LaunchFile
    profile: Profile
    limit_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.limit_bytes = usable_bytes(self.profile.machine)

    @property
    def reading(self) -> Reading:
        """What the file says."""
        return self.launch.reading

    def checked(self) -> Checked:
        """Return what there is to say."""
        problems = [*self.launch.problems(site_of(self.profile)), *self._refusals()]
        is_sound = next(broken_rules(self.reading.layout, self.reading.job), None) is None
        priced = self._priced() if is_sound else None
        fits = priced is not None and self._search().fits(priced.layout)
        starts = fits and all(problem.severity != "stops" for problem in problems)
        better = self._better(priced if starts else None)
        if priced is not None and not fits:
            problems.append(self._too_large(priced, better))
        problems += self._costs(priced) if priced is not None else ()
        problems.sort(key=lambda problem: (SEVERITIES.index(problem.severity), problem.line or 0))
        return Checked(
            file=self.file, profile=self.profile, reading=self.reading, problems=tuple(problems),
            answer=None if priced is None else self._answer(priced), limit_bytes=self.limit_bytes,
            better=better, best=self._best(priced if starts else None),
        )  # fmt: skip

    def _refusals(self) -> Iterator[Problem]:
        """Yield the rules that the layout breaks."""
        reading, seen = self.reading, set[str]()
        site = site_of(self.profile)
        rules = chain(
            model_rules(reading.decoder, reading.target),
            broken_rules(reading.layout, reading.job),
            target_rules(reading.layout, reading.target, reading.job, site),
        )
        for rule in rules:
            if rule.what not in seen:
                seen.add(rule.what)
                yield self._problem(rule)

    def _problem(self, rule: BrokenRule) -> Problem:
        words = re.findall(r"[A-Za-z_]+", rule.what)
        names = [_WORDS.get(word, word) for word in words]
        lines = [self.reading.lines[name] for name in names if name in self.reading.lines]
        what, _, source = rule.what.rpartition(": ")
        is_sourced = bool(what) and "/" in source
        return Problem(
            severity="stops", line=lines[0] if lines else None,
            what=what if is_sourced else rule.what,
            why=source if is_sourced else "a rule of every runtime", fix=self._in_keys(rule.hint),
        )  # fmt: skip

    def _in_keys(self, hint: str) -> str:
        """Return a hint whose flags of `moetune plan` are the runtime's keys."""

        def key(match: re.Match[str]) -> str:
            name = match[1].replace("-", "_")
            return (self.launch.key_of(name) or match[0]) + match[2]

        names = "|".join(name.replace("_", "[_-]") for name in _NAMES)
        return re.sub(rf"(?:--)?\b({names})( (?=\d))", key, hint.removeprefix("use "))

    def _search(self, *, facts: Mapping[str, Any] | None = None, asks: bool = True) -> FoldedSearch:
        """Return the search with the launch's facts of the target, or with others."""
        reading = self.reading
        target: Target = replace(reading.target, **(reading.facts if facts is None else facts))
        costs = costs_of(self.profile, allow_modelled=True)
        prices = step_prices(reading.job, target, self.profile, costs)
        return search_of(prices, self.profile, limit_bytes=self.limit_bytes, asks_runtime=asks)

    def _priced(self) -> PricedLayout | None:
        """Return the launch's own layout with its price; None where a time is not known."""
        try:
            check_format(self.profile, self.reading.job.dtype)
            search = self._search(asks=False)
            return search.answer_of(search.price(self.reading.layout))
        except InputError:
            return None

    def _answer(self, priced: PricedLayout) -> TrainingAnswer:
        return answer_of(priced, self.reading.job, self.profile.machine.device)

    def _too_large(self, priced: PricedLayout, better: tuple[Better, ...]) -> Problem:
        parts, peak = priced.memory.parts, priced.memory.peak_bytes
        need, limit = format_bytes(round(peak)), format_bytes(self.limit_bytes)
        balanced = peak - parts.get("uneven routing", 0)
        when = "it runs out of memory"
        if balanced <= self.limit_bytes:
            when += f" when routing gets uneven (balanced it takes {format_bytes(round(balanced))})"
        return Problem(
            severity="stops", line=None,
            what=f"{when}: {need} per device, more than the {limit} there are",
            why=f"predicted, most of it {max(parts, key=parts.__getitem__)}",
            fix=better[0].change if better else "take more or larger devices",
        )  # fmt: skip

    def _costs(self, priced: PricedLayout) -> Iterator[Problem]:
        """Yield facts that cost time, as the launch has them."""
        layout = self.reading.layout
        if layout.dp > 1 and not self.reading.facts.get("hides_gradients", True):
            facts = {**self.reading.facts, "hides_gradients": True}
            step = self._search(facts=facts, asks=False).price(layout).step.seconds
            yield Problem(
                severity="costs", line=self.reading.lines.get("zero"),
                what="gradients are reduced with nothing beside it",
                why=f"{self.reading.target.label}: the default",
                fix=self.launch.key_of("hides_gradients"),
                seconds_saved=max(0.0, priced.step.seconds - step),
            )  # fmt: skip

    def _better(self, priced: PricedLayout | None) -> tuple[Better, ...]:
        """Return the single changes worth most.

        Args:
            priced: the launch as it is; None where it does not start or does not fit.
        """
        search, pins = self._search(), self._pins
        found: list[PricedLayout] = []
        for group in _GROUPS:
            try:
                best = BestLayouts.of(search, pins.without(group)).best()
            except MoetuneError:
                continue
            if search.fits(best.layout):
                found.append(best)
        changes = [better for best in found if (better := self._change(best, priced)) is not None]
        changes += self._hidden(priced)
        changes.sort(key=lambda better: better.answer.predicted.step_seconds)
        unique = {tuple(better.keys.items()): better for better in reversed(changes)}
        return tuple([*reversed(unique.values())][:MOST_CHANGES])

    def _hidden(self, priced: PricedLayout | None) -> Iterator[Better]:
        """Yield the change that hides collectives of gradients."""
        if priced is None or self.reading.facts.get("hides_gradients", True):
            return
        facts = {"hides_gradients": True}
        search = self._search(facts={**self.reading.facts, **facts})
        better = self._change(search.answer_of(search.price(priced.layout)), priced, facts)
        if better is not None:
            yield better

    def _change(
        self,
        best: PricedLayout,
        priced: PricedLayout | None,
        facts: Mapping[str, Any] | None = None,
    ) -> Better | None:
        """Return a layout as a change of the launch; None where it is not worth one."""
        step = None if priced is None else priced.step.seconds
        if step is not None and best.step.seconds > step * (1 - LEAST_SAVED):
            return None
        keys = self.launch.changes(best.layout, facts or {})
        if not keys:
            return None
        return Better(
            change=self.launch.words(keys), keys=keys, answer=self._answer(best),
            seconds_saved=None if step is None else step - best.step.seconds,
        )  # fmt: skip

    def _best(self, priced: PricedLayout | None) -> Better | None:
        """Return the best layout without any pin, with all that the runtime can hide."""
        facts = {name: True for name in ("hides_gradients",) if name in self.reading.facts}
        own = {name: value for name, value in self.reading.facts.items()
               if name not in (*facts, "splits_sequence")}  # fmt: skip
        search, free = self._search(facts={**own, **facts}), LayoutRequest()
        try:
            plain = BestLayouts.of(search, free).best()
            graphed = with_graphs(search, free, plain)
            best = plain if graphed is None else graphed.best()
        except MoetuneError:
            return None
        if not search.fits(best.layout):
            return None
        is_off = not self.reading.facts.get("hides_gradients", True)
        return self._change(best, priced, facts if is_off else None)

    @property
    def _pins(self) -> LayoutRequest:
        """The launch's layout, pinned."""
        layout = self.reading.layout
        values = {name: getattr(layout, name) for group in _GROUPS for name in group}
        values |= {"schedule": layout.order, "cuda_graphs": layout.cuda_graphs}
        return LayoutRequest(**values)
