"""Sensitivity of a training plan: its layout under other prices."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf

from moetune.domain.costs import Costs
from moetune.domain.errors import InfeasiblePlanError, InputError, ProfileError
from moetune.domain.profile import Profile
from moetune.domain.training import FoldedLayout
from moetune.domain.training_document import TrainingDocument
from moetune.fit.costs import costs_of
from moetune.fit.slowed import ATTENTION, GEMM_RATE, PARTS, Slowdown, slowed
from moetune.solve.joint.best import BestLayouts
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.training.machine import DevicePrices
from moetune.solve.training.step import StepPrices
from moetune.workflows.planned_training import PlannedTraining, read_planned_training
from moetune.workflows.sensitivity import (
    GIB,
    KnobEffect,
    Sensitivity,
    check_same,
    sensitivity_of,
)
from moetune.workflows.training import search_of
from moetune.workflows.training_plan import layout_words
from moetune.workflows.training_prices import step_prices

LAUNCHES, POSTED = "launches", "posted messages"
_MOVED = ("tp", "cp", "pp", "ep", "micro_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSubject:
    """A training plan, priced again.

    Raises:
        InputError: this version of moetune predicts another step for the plan's layout.
    """

    planned: PlannedTraining
    costs: Costs = field(init=False)
    prices: StepPrices = field(init=False)
    _known: dict[Slowdown, StepPrices] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        request, profile = self.planned.priced, self.planned.profile
        costs = costs_of(profile, allow_modelled=True)
        object.__setattr__(self, "costs", costs)
        prices = step_prices(request.job, request.target, profile, costs)
        object.__setattr__(self, "prices", prices)
        check_same(self.plan_id, now=self.step(None), then=self.recorded_seconds)

    @property
    def plan_id(self) -> str:
        """The plan's id."""
        return self.planned.plan.id

    @property
    def recorded_seconds(self) -> float:
        """The step that the plan predicted."""
        return self.planned.plan.best.predicted.step_seconds

    @property
    def name(self) -> str:
        """The layout."""
        return layout_words(self._own)

    @property
    def parts(self) -> tuple[str, ...]:
        """Every part, and the host's."""
        return (*PARTS, LAUNCHES, POSTED)

    def step(self, slowdown: Slowdown | None) -> float:
        """Return the seconds of the plan's own layout."""
        return self._priced(slowdown).step(self._own).seconds

    def knobs(self) -> Iterator[KnobEffect]:
        """Yield half and twice each size of the layout, and more memory."""
        for name in _MOVED:
            size = getattr(self._own, name)
            moved = [2 * size] if size % 2 else [size // 2, 2 * size]
            yield from (self._moved(name, one) for one in moved)
        yield self._memory()

    def _moved(self, name: str, size: int) -> KnobEffect:
        own, pins = self._own, self.planned.priced.pins
        knob, words = name.replace("_", "-"), f"{name.replace('_', '-')} {size}"
        sizes = {one: getattr(own, one) for one in (*_MOVED, "etp")}
        sizes[name] = size
        sizes["etp"] = min(sizes["etp"], sizes["tp"])
        search = self._search(self.planned.priced.memory_limit_bytes or inf)
        try:
            found = BestLayouts(search, replace(pins, **sizes)).best()
        except (InputError, InfeasiblePlanError, ProfileError) as error:
            return KnobEffect(knob=knob, choice=words, note=error.what)
        fits = search.fits(found.layout)
        seconds = found.step.seconds - self.recorded_seconds
        return KnobEffect(
            knob=knob, choice=f"{words}: {layout_words(found.layout)}", seconds=seconds,
            share=seconds / self.recorded_seconds, note="" if fits else "does not fit",
        )  # fmt: skip

    def _memory(self) -> KnobEffect:
        limit = (self.planned.priced.memory_limit_bytes or inf) + GIB
        found = BestLayouts(self._search(limit), self.planned.priced.pins).best()
        seconds = found.step.seconds - self.recorded_seconds
        return KnobEffect(
            knob="memory-limit", choice=f"1 GiB more memory: {layout_words(found.layout)}",
            seconds=seconds, share=seconds / self.recorded_seconds,
        )  # fmt: skip

    def _search(self, limit_bytes: float) -> FoldedSearch:
        planned = self.planned
        return search_of(self.prices, planned.profile, limit_bytes=limit_bytes)

    @property
    def _own(self) -> FoldedLayout:
        return self.planned.layouts[0]

    def _priced(self, slowdown: Slowdown | None) -> StepPrices:
        if slowdown is None or slowdown.factor == 1:
            return self.prices
        if slowdown not in self._known:
            self._known[slowdown] = self._prices(slowdown)
        return self._known[slowdown]

    def _prices(self, slowdown: Slowdown) -> StepPrices:
        request, profile = self.planned.priced, self.planned.profile
        if slowdown.part == LAUNCHES:
            factor = request.target.launches * slowdown.factor
            target = replace(request.target, launches=factor)
            return step_prices(request.job, target, profile, self.costs)
        costs = slowed(self.costs, slowdown)
        found = step_prices(request.job, request.target, profile, costs)
        return replace(found, device=_slowed_device(found.device, slowdown))


def _slowed_device(device: DevicePrices, slowdown: Slowdown) -> DevicePrices:
    """Return a device of which what costs do not have is slower.

    Attention does not follow the GEMMs: it is a part of its own.
    """
    if slowdown.part == POSTED:
        return replace(device, posted_chunk_seconds=device.posted_chunk_seconds * slowdown.factor)
    if slowdown.part == ATTENTION:
        return replace(device, attention_factor=slowdown.factor)
    if slowdown.part == GEMM_RATE:
        return replace(device, gemm_factor=slowdown.factor)
    return device


def training_sensitivity(
    plan: TrainingDocument, *, profile: Profile, model: str | None
) -> Sensitivity:
    """Return what the step of a training plan follows.

    Args:
        profile, model: as of `read_planned_training`.

    Raises:
        InputError: it is of another version of moetune.
    """
    planned = read_planned_training(plan, profile=profile, model=model)
    return sensitivity_of(TrainingSubject(planned=planned))
