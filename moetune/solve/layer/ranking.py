"""Ranking of the degrees that one strategy and the memory allow, by time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from moetune.domain.constraints import Bounds, Order, Strategy
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.budget import Degrees, MemoryBudget
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.near_best import EveryDegree, fewest_near_best, near_best
from moetune.solve.layer.times import PhaseTime, StepTime, step_time
from moetune.solve.layer.words import explain_pin
from moetune.solve.layer.worth_ranking import (
    NUM_ALTERNATIVES,
    rounded,
    worth_ranking,
    worth_ranking_together,
)

_Times = tuple[PhaseTime, ...]
WORTH_A_WARNING = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All degrees that are allowed with one strategy, best first.

    Args:
        strategy: the plan's. One chunk each way reuses no memory: the chooser is then that of
            "none", whatever the strategy.
        budget: the memory that the choice has to fit into.
        free: chooser without pins and without a memory limit.
        sequential: one chunk each way, allowed or not.
    """

    tokens: int
    strategy: Strategy
    costs: LayerCosts
    bounds: Bounds
    budget: MemoryBudget
    chooser: DegreeChooser
    free: DegreeChooser
    forward: _Times
    backward: _Times
    sequential: StepTime

    @property
    def best(self) -> StepTime:
        """The chosen step."""
        return self.step(self.forward[0], self.backward[0])

    @property
    def order(self) -> Order:
        """The link's order of the chunks; reused memory has buffers for the interleaved one."""
        return self.bounds.chosen_order if self.strategy == "none" else "interleaved"

    @property
    def wanted(self) -> StepTime:
        """The step that would be chosen with this strategy if there were more memory."""
        forward, backward = replace(self.chooser, budget=None).best(self.tokens)
        return self.step(forward, backward)

    @property
    def memory_forced(self) -> bool:
        """Whether other degrees would be chosen, without reuse, if there were more memory."""
        if self.strategy != "none":
            return False
        return not self.budget.fits(strategy="none", degrees=self.wanted.degrees)

    def step(self, forward: PhaseTime, backward: PhaseTime) -> StepTime:
        """Return the step of these phases."""
        return StepTime(
            forward=forward,
            backward=backward,
            overhead=self.sequential.overhead,
            strategy=self.strategy,
        )

    def others(self) -> list[StepTime]:
        """Return the next fastest choices, and one chunk each way wherever that is allowed."""
        most = None if self.chooser.is_paired else NUM_ALTERNATIVES
        near = (phase[:most] for phase in (self.forward, self.backward))
        steps = [
            self.step(forward, backward)
            for forward, backward in product(*near)
            if self._is_choice((forward.degree, backward.degree))
        ][1:]
        steps.sort(key=order_of_steps)
        allowed = all(
            1 in {time.degree for time in phase} for phase in (self.forward, self.backward)
        )
        one_chunk = self.strategy == "none" and allowed and self._is_choice((1, 1))
        if max(self.best.degrees) == 1 or not one_chunk:
            return steps[:NUM_ALTERNATIVES]
        others = [step for step in steps if max(step.degrees) > 1]
        return sorted([*others[: NUM_ALTERNATIVES - 1], self.sequential], key=order_of_steps)

    def pin_warnings(self) -> Iterator[str]:
        """Yield a warning for each pin whose phase is slower than the best by 0.1 % or more."""
        for phase, chosen in zip(PHASES, (self.forward[0], self.backward[0]), strict=True):
            if self.bounds.pinned(phase) is None:
                continue
            best = self._free_best(phase)
            slower = chosen.seconds / best.seconds - 1
            if slower > WORTH_A_WARNING:
                yield explain_pin(
                    phase=phase, pinned=chosen.degree, best=best.degree, slower=slower
                )

    def _is_choice(self, degrees: Degrees) -> bool:
        if self.chooser.is_paired and degrees[0] != degrees[1]:
            return False
        if self.chooser.strategy != "none" and max(degrees) == 1:
            return False
        return self.chooser.fits(self.tokens, degrees)

    def _free_best(self, phase: Phase) -> PhaseTime:
        if self.chooser.strategy == "none":
            best = self.free.degrees(self.tokens)
            return self.free.time(phase, self.tokens, best[PHASES.index(phase)])
        near = near_best(self.free, phase, self.tokens)
        return self.free.time(phase, self.tokens, min(near, key=lambda degree: near[degree]))


def rank_degrees(
    *,
    costs: LayerCosts,
    bounds: Bounds,
    budget: MemoryBudget,
    strategy: Strategy,
    is_rival: bool = False,
) -> Ranking | None:
    """Return the degrees that the bounds and the memory leave with that strategy.

    None where nothing fits, or where a strategy that reuses memory is left with one chunk each
    way, which reuses none, unless the caller pinned it.

    Args:
        is_rival: where memory is reused, and every degree has to be simulated, the best ones are
            enough.
    """
    tokens = budget.workload.tokens_per_rank
    if strategy != "none":
        chooser = DegreeChooser(costs=costs, bounds=bounds, strategy=strategy, budget=budget)
        reused = _rank_reused(chooser, budget, is_rival=is_rival)
        if reused is not None or bounds.strategy != strategy:
            return reused
    chooser = DegreeChooser(costs=costs, bounds=bounds, budget=budget)
    if strategy != "none":  # pinned, with one chunk each way
        chooser = replace(chooser, bounds=replace(bounds, max_degree=1))
    best = chooser.degrees_that_fit(tokens)
    if best is None or (strategy != "none" and max(best) > 1):
        return None
    return Ranking(
        tokens=tokens,
        strategy=strategy,
        costs=costs,
        bounds=bounds,
        budget=budget,
        chooser=chooser,
        free=DegreeChooser(costs=costs, bounds=_without_pins(bounds)),
        forward=chooser.rank("forward", tokens, best),
        backward=chooser.rank("backward", tokens, best),
        sequential=_sequential(costs, bounds, tokens),
    )


def _rank_reused(chooser: DegreeChooser, budget: MemoryBudget, *, is_rival: bool) -> Ranking | None:
    tokens, strategy = budget.workload.tokens_per_rank, chooser.strategy

    def fits(degrees: Degrees) -> bool:
        return max(degrees) > 1 and chooser.fits(tokens, degrees)

    every = EveryDegree(replace(chooser, budget=None), tokens)
    few = fewest_near_best(every, fits)
    if few is None:
        return None
    chosen = few[0].degree, few[1].degree
    wanted: tuple[set[int], set[int]] = set(), set()
    if not is_rival:
        wanted = _wanted(every, chooser, fits, chosen)

    def ranked(phase: Phase, first: PhaseTime) -> _Times:
        """Return the degrees that fit beside the other phase's choice, the chosen one first."""
        others = wanted[PHASES.index(phase)] - {first.degree}
        times = [every.time(phase, one) for one in others]
        return first, *sorted(times, key=lambda time: (rounded(time.seconds), time.degree))

    forward, backward = few
    return Ranking(
        tokens=tokens,
        strategy=strategy,
        costs=chooser.costs,
        bounds=chooser.bounds,
        budget=budget,
        chooser=chooser,
        free=replace(chooser, bounds=_without_pins(chooser.bounds), budget=None),
        forward=ranked("forward", forward),
        backward=ranked("backward", backward),
        sequential=_sequential(chooser.costs, chooser.bounds, tokens),
    )


def _wanted(
    every: EveryDegree, chooser: DegreeChooser, fits: Callable[[Degrees], bool], chosen: Degrees
) -> tuple[set[int], set[int]]:
    """Return the degrees of each phase that are worth ranking."""
    forward, backward = map(every.seconds, PHASES)
    if not chooser.is_paired:
        return (
            worth_ranking(forward, lambda one: fits((one, chosen[1])), chosen=chosen[0], ties=True),
            worth_ranking(
                backward, lambda one: fits((chosen[0], one)), chosen=chosen[1], ties=True
            ),
        )
    found = worth_ranking_together(
        (forward, backward), lambda one: fits((one, one)), chosen=chosen[0], ties=True,
        around_seconds=chooser.costs.overhead(tokens=every.tokens).seconds,
    )  # fmt: skip
    return found, found


def _without_pins(bounds: Bounds) -> Bounds:
    return replace(bounds, forward_degree=None, backward_degree=None)


def _sequential(costs: LayerCosts, bounds: Bounds, tokens: int) -> StepTime:
    return step_time(
        costs=costs,
        tokens=tokens,
        forward_degree=1,
        backward_degree=1,
        order=bounds.chosen_order,
    )


def order_of_steps(step: StepTime) -> tuple[float, int, int]:
    """Return the sort key of steps: time, then chunks."""
    return rounded(step.seconds), *step.degrees
