"""Check of a launch: what it runs, what stops it or costs time, and what would be better.

Each change comes from a search that pins all other decisions of the launch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

from moetune.app.training import stand_in_ratios, step_spread
from moetune.app.training_plan import answer_of
from moetune.domain.budget import Budget, Spread, TrainingRun
from moetune.domain.errors import MoetuneError
from moetune.domain.layout import BrokenRule
from moetune.domain.profile import Profile
from moetune.domain.records import Calibration, factor_of
from moetune.domain.request import gemm_dtypes
from moetune.domain.rules import broken_rules
from moetune.domain.site import site_of
from moetune.domain.target_rules import model_rules, target_rules
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.domain.training_document import TrainingAnswer
from moetune.domain.units import format_bytes
from moetune.fit.costs import costs_of
from moetune.fit.missing import check_numbers
from moetune.launches.files import LaunchFile
from moetune.launches.reading import SEVERITIES, Problem, Reading
from moetune.report.model_warnings import tight_words
from moetune.solve.model.alternatives import LEAST_SAVED
from moetune.solve.model.best import BestLayouts, with_room
from moetune.solve.model.memory import is_tight
from moetune.solve.model.profiled import search_of, step_prices, usable_bytes
from moetune.solve.model.search import FoldedSearch, PricedLayout
from moetune.solve.model.uncertainty import confidence_of

MOST_CHANGES = 3
_GROUPS: tuple[tuple[str, ...], ...] = (
    ("tp",), ("cp",), ("pp", "vpp", "schedule", "stages"), ("vpp", "schedule", "stages"), ("ep",),
    ("etp",), ("micro_batch",), ("recompute",), ("dispatcher",), ("overlap",), ("zero",),
    ("offload_activations",), ("offload_optimizer",),
)  # fmt: skip
"""Decisions that change alone; those of a pipeline change together."""
_NAMES = ("tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch", "dp", "global_batch", "recompute",
          "dispatcher", "overlap", "zero", "stages")  # fmt: skip
_WORDS = {
    "num_heads": "tp", "layers": "pp", "recomputation": "recompute", "ZeRO": "zero",
    "deepep": "dispatcher", "hybrid_ep": "dispatcher", "all_gather": "dispatcher",
}  # fmt: skip
"""Decision that a word in a broken rule's text means."""
_PINS = re.compile(
    "--(dispatcher|overlap|recompute|zero|vpp|cuda-graphs|offload|schedule|stages|dtype|optimizer)"
    r"(?: |-\w+ )"
)
_OFF = {
    "hides_gradients": "no computation hides the reduction of gradients",
    "splits_sequence": "tensor ranks do not share the sequence between their layers",
}  # fmt: skip
"""Facts of a target that a launch may turn off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """A change of the launch, with the step and the memory after it.

    Args:
        change: the changed keys, as the file would write them.
        keys: value of each changed key; None for a key to leave out.
        seconds_saved: seconds that a step gets shorter; None if the launch cannot start as it is.
    """

    change: str
    keys: Mapping[str, Any]
    answer: TrainingAnswer
    seconds_saved: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The check of a launch file.

    Args:
        problems: first those that stop the launch, causes before their consequences.
        answer: step and memory of the launch as it is; None if its layout has no price.
        seconds: seconds of that step, with their range.
        better: single changes, the shortest step first.
        best: all changes that lead to the best layout; None if none is better.
        calibration: factor of observed runs on its steps; None without such runs.
        budget: tokens and price of the whole training; None if they are not asked for.
    """

    file: str
    profile: Profile
    reading: Reading
    problems: tuple[Problem, ...]
    answer: TrainingAnswer | None
    limit_bytes: int
    better: tuple[Better, ...]
    best: Better | None
    seconds: Spread | None
    calibration: Calibration | None
    budget: Budget | None = None

    @property
    def run(self) -> TrainingRun | None:
        """The whole training of the budget, at the launch's seconds a step."""
        if self.budget is None or self.seconds is None:
            return None
        job = self.reading.job
        return self.budget.run(self.seconds, tokens_per_step=job.tokens, world_size=job.world_size)

    @property
    def starts(self) -> bool:
        """Whether no known problem stops it."""
        return all(problem.severity != "stops" for problem in self.problems)


@dataclass(slots=True)
class LaunchCheck:
    """The checker of a launch; it raises ProfileError for a profile that lacks an operation."""

    file: str
    launch: LaunchFile
    profile: Profile
    calibration: Calibration | None
    limit_bytes: int = field(init=False)
    facts: Mapping[str, Any] = field(init=False)
    _searches: dict[object, FoldedSearch] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.limit_bytes = usable_bytes(self.profile.machine)
        self.facts = dict(self.reading.facts)
        if self.reading.decoder.num_moe_layers:  # which do not start otherwise
            self.facts["splits_sequence"] = self.reading.target.splits_sequence

    @property
    def reading(self) -> Reading:
        """The launch as read from the file."""
        return self.launch.reading

    @property
    def job(self) -> TrainingJob:
        """The priced job: in bfloat16 if it is in float16 and the profile has no float16 GEMMs."""
        job = self.reading.job
        return replace(job, dtype="bfloat16") if self._stands_in else job

    @property
    def _stands_in(self) -> bool:
        measured, dtype = gemm_dtypes(self.profile), self.reading.job.dtype
        return dtype == "float16" and "bfloat16" in measured and dtype not in measured

    def checked(self) -> Checked:
        """Return the problems, the price and the better changes of the launch."""
        refusals = [*self._refusals()]
        problems = [*self.launch.problems(site_of(self.profile))]
        if self._stands_in:
            what = "products in float16 are priced as in bfloat16, which have as many bytes"
            problems.append(Problem(severity="note", line=None, what=what))
        is_sound = next(broken_rules(self.reading.layout, self.reading.job), None) is None
        try:
            check_numbers(self.profile, self.job, self.reading.target)
            search = self._search(self.facts)
            row = search.price(self.reading.layout) if is_sound else None
            priced = None if row is None else search.answer_of(row)
        except MoetuneError as error:  # nor has any other layout a price
            what = f"it has no price: {error.what}"
            note = Problem(severity="note", line=None, what=what, fix=error.hint)
            return self._answered([*problems, *refusals, note])
        fits = priced is not None and search.fits(priced.layout)
        startable = priced if fits and not refusals else None
        if self._refuses_job:
            return self._answered([*problems, *refusals], priced)
        better = self._better(startable)
        problems += [_with_fix(problem, better) for problem in refusals]
        if priced is not None:
            problems += [] if fits else [self._too_large(priced, better)]
            tight = tight_words(priced.memory, self.limit_bytes)
            problems += [Problem(severity="note", line=None, what=what) for what in tight]
            problems += self._costs(priced)
        return self._answered(problems, priced, better, self._best(startable, better))

    def _answered(
        self, problems: list[Problem], priced: PricedLayout | None = None,
        better: tuple[Better, ...] = (), best: Better | None = None,
    ) -> Checked:  # fmt: skip
        problems.sort(key=lambda problem: SEVERITIES.index(problem.severity))
        return Checked(
            file=self.file, profile=self.profile, reading=self.reading, problems=tuple(problems),
            answer=None if priced is None else self._answer(priced), limit_bytes=self.limit_bytes,
            better=better, best=best, calibration=self.calibration,
            seconds=None if priced is None else self._seconds(priced),
        )  # fmt: skip

    def _seconds(self, priced: PricedLayout) -> Spread:
        """Return the seconds of a step with their range, computed as for a plan."""
        job, target = self.job, self._search(self.facts).target
        price = partial(step_prices, job, target, self.profile)
        ratios = stand_in_ratios(price, self.profile, priced)
        sure = confidence_of(
            [priced.step.seconds], ratios=ratios, target=target.name, calibration=self.calibration
        )
        return step_spread(self._answer(priced).predicted.step_seconds, sure)

    @property
    def _refuses_job(self) -> bool:
        """Whether the runtime refuses the job in every layout, such as for an optimizer's dtype."""
        reading, site = self.reading, site_of(self.profile)
        plain = [FoldedLayout(dp=reading.job.world_size, zero=zero) for zero in reading.target.zero]
        broken = [
            {rule.what for rule in target_rules(layout, reading.target, reading.job, site)}
            for layout in (reading.layout, *plain)
        ]
        return bool(set.intersection(*broken))

    def _refusals(self) -> Iterator[Problem]:
        """Yield each rule of the model, the layout or the runtime that the launch breaks."""
        reading, seen = self.reading, set[str]()
        site = site_of(self.profile)
        describes = reading.target.name == "megatron"  # by its arguments, whatever the model
        rules = chain(
            () if describes else model_rules(reading.decoder, reading.target),
            broken_rules(reading.layout, reading.job),
            target_rules(reading.layout, reading.target, reading.job, site),
        )
        for rule in rules:
            if rule.what not in seen:
                seen.add(rule.what)
                yield self._problem(rule)

    def _problem(self, rule: BrokenRule) -> Problem:
        """Return a broken rule with its line, its source, and its fix in the runtime's keys."""
        words = re.findall(r"[A-Za-z_]+", rule.what)
        names = [_WORDS.get(word, word) for word in words]
        lines = [self.reading.lines[name] for name in names if name in self.reading.lines]
        what, _, source = rule.what.rpartition(": ")
        is_sourced = bool(what) and "/" in source
        return Problem(
            severity="stops", line=lines[0] if lines else None,
            what=what if is_sourced else rule.what,
            why=source if is_sourced else self._source(rule), fix=self._in_keys(rule.hint),
        )  # fmt: skip

    def _source(self, rule: BrokenRule) -> str:
        """Return the source of a rule whose text names no file."""
        target = self.reading.target
        is_of_target = rule.what.startswith(target.label)
        return f"{target.label}: {target.source}" if is_of_target else "a rule of every runtime"

    def _in_keys(self, hint: str) -> str:
        """Return a hint with flags of `moetune plan` replaced by the runtime's keys."""

        def key(match: re.Match[str]) -> str:
            name = match[1].replace("-", "_")
            return self.launch.key_of(name) or match[0]

        names = "|".join(name.replace("_", "[_-]") for name in _NAMES)
        return re.sub(rf"(?:--)?\b({names})(?= \d)", key, hint.removeprefix("use "))

    def _search(self, facts: Mapping[str, Any]) -> FoldedSearch:
        key = tuple(facts.items())
        if key not in self._searches:
            target = replace(self.reading.target, **facts)
            costs = costs_of(self.profile, allow_modelled=True)
            prices = step_prices(self.job, target, self.profile, costs)
            self._searches[key] = search_of(prices, self.profile, limit_bytes=self.limit_bytes)
        return self._searches[key]

    def _bounded(self, facts: Mapping[str, Any], priced: PricedLayout | None) -> FoldedSearch:
        """Return the search, limited to the launch's memory if the launch is tight."""
        search = self._search(facts)
        if priced is None or not is_tight(priced.memory, self.limit_bytes):
            return search
        tight = partial(replace, search, limit_bytes=priced.memory.peak_bytes)
        return search.remembered("no more than the launch", tight)

    def _answer(self, priced: PricedLayout) -> TrainingAnswer:
        reading, device = self.reading, self.profile.machine.device
        factor = factor_of(self.calibration)
        return answer_of(priced, reading.job, device, reading.target, factor=factor)

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

    @property
    def _off(self) -> tuple[str, ...]:
        layout = self.reading.layout
        counts = {"hides_gradients": layout.dp > 1, "splits_sequence": layout.tp > 1}
        return tuple(name for name in counts if counts[name] and not self.facts.get(name, True))

    def _costs(self, priced: PricedLayout) -> Iterator[Problem]:
        """Yield each default of the runtime that the launch turns off, with the time it costs."""
        for name in self._off:
            search = self._search({**self.facts, name: True})
            saved = priced.step.seconds - search.price(priced.layout).step.seconds
            saved *= factor_of(self.calibration)
            keys = self.launch.changes(priced.layout, [name])
            yield Problem(
                severity="costs", line=None, what=_OFF[name], seconds_saved=max(0.0, saved),
                why=f"{self.reading.target.label}: the default", fix=self.launch.words(keys),
            )  # fmt: skip

    def _better(self, priced: PricedLayout | None) -> tuple[Better, ...]:
        """Return the single changes that save most; `priced` is None if the launch cannot run."""
        search, pins = self._bounded(self.facts, priced), self._pins
        answers = (self._fastest(search, pins.without(group), priced) for group in _GROUPS)
        changes = [self._change(best, priced) for best in answers if best is not None]
        for name in self._off if priced is not None else ():
            changed = self._search({**self.facts, name: True})
            row = changed.answer_of(changed.price(self.reading.layout))
            changes.append(self._change(row, priced, name))
        seconds = attrgetter("answer.predicted.step_seconds")
        ordered = sorted(filter(None, changes), key=seconds)
        unique = {better.change: better for better in reversed(ordered)}
        return tuple([*reversed(unique.values())][:MOST_CHANGES])

    def _fastest(
        self, search: FoldedSearch, pins: LayoutRequest, priced: PricedLayout | None
    ) -> PricedLayout | None:
        """Return the fastest layout with pins that fits and is worth a change, else None."""
        try:
            layouts = BestLayouts.of(with_room(search, pins), pins)
            if priced is not None:
                return layouts.best_below(priced.step.seconds * (1 - LEAST_SAVED))
            best = layouts.best()
        except MoetuneError:
            return None
        return best if layouts.search.fits(best.layout) else None

    def _change(
        self, best: PricedLayout, priced: PricedLayout | None, *facts: str
    ) -> Better | None:
        """Return a layout as a change; None if it saves too little or changes no key."""
        step, factor = None if priced is None else priced.step.seconds, factor_of(self.calibration)
        if step is not None and best.step.seconds > step * (1 - LEAST_SAVED):
            return None
        keys = self.launch.changes(best.layout, facts)
        if not keys:
            return None
        return Better(
            change=self.launch.words(keys), keys=keys, answer=self._answer(best),
            seconds_saved=None if step is None else factor * (step - best.step.seconds),
        )  # fmt: skip

    def _best(self, priced: PricedLayout | None, better: tuple[Better, ...]) -> Better | None:
        """Return the change to the best layout, with the launch's CUDA graphs and all overlaps."""
        off = tuple(name for name in _OFF if not self.facts.get(name, True))
        search = self._bounded({**self.facts, **dict.fromkeys(off, True)}, priced)
        pins = LayoutRequest(cuda_graphs=self.reading.layout.cuda_graphs)
        best = self._fastest(search, pins, priced)
        change = None if best is None else self._change(best, priced, *off)
        return None if change is None or change.change in [row.change for row in better] else change

    @property
    def _pins(self) -> LayoutRequest:
        """Pins of all the launch's decisions, with its schedule and its CUDA graphs."""
        layout = self.reading.layout
        values = {name: getattr(layout, name) for group in _GROUPS for name in group}
        values |= {"schedule": layout.order, "cuda_graphs": layout.cuda_graphs}
        return LayoutRequest(**values)


def _with_fix(problem: Problem, better: tuple[Better, ...]) -> Problem:
    """Return a problem; a change that starts replaces a fix in flags of `moetune plan`."""
    if better and _PINS.search(problem.fix):
        return replace(problem, fix=better[0].change)
    return problem
