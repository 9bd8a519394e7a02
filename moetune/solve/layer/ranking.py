"""Ranking of the degrees that one strategy and the memory allow, by time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from moetune.domain.constraints import Bounds, Order, Strategy
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.memory import MemoryBudget
from moetune.solve.layer.near_best import fewest_near_best, near_best
from moetune.solve.layer.times import PhaseTime, StepTime, step_time
from moetune.solve.layer.words import explain_pin

_Times = tuple[PhaseTime, ...]
NUM_ALTERNATIVES = 5
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
    def memory_forced(self) -> bool:
        """Whether other degrees would be chosen if their buffers fitted.

        In a tensor-parallel group more chunks take less memory; elsewhere, without reuse, one
        chunk takes the least.
        """
        if self.strategy != "none":
            return False
        if self.chooser.budget is not None:
            return any(
                self.bounds.pinned(phase) is None
                and self.fewest_chunks > self.free.degree(phase, self.tokens)
                for phase in PHASES
            )
        wanted = (self.free.degree(phase, self.tokens) for phase in PHASES)
        return self.tokens > self.chooser.max_pipelined_tokens and max(wanted) > max(
            self.best.degrees
        )

    @property
    def fewest_chunks(self) -> int:
        """The fewest chunks that fit, where more of them take less memory."""
        largest = self.bounds.largest(self.tokens)
        return self.budget.fewest_chunks(
            strategy=self.strategy, tokens=self.tokens, largest=largest
        )

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
        allowed = (
            {time.degree for time in self.forward},
            {time.degree for time in self.backward},
        )
        one_chunk = self.strategy == "none" and all(1 in degrees for degrees in allowed)
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

    def _is_choice(self, degrees: tuple[int, int]) -> bool:
        if self.chooser.is_paired and degrees[0] != degrees[1]:
            return False
        reuses = self.chooser.strategy != "none"
        return not reuses or (
            max(degrees) > 1 and self.budget.fits(strategy=self.strategy, degrees=degrees)
        )

    def _free_best(self, phase: Phase) -> PhaseTime:
        if self.chooser.strategy == "none":
            return self.free.rank(phase, self.tokens)[0]
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
        chooser = DegreeChooser(costs=costs, bounds=bounds, strategy=strategy)
        reused = _rank_reused(chooser, budget, is_rival=is_rival)
        if reused is not None or bounds.strategy != strategy:
            return reused
    least = budget.least_degree(bounds.largest(tokens))
    chooser = DegreeChooser(costs=costs, bounds=bounds, budget=budget)
    pins = chooser.pinned("forward") or least, chooser.pinned("backward") or least
    if not budget.fits(strategy=strategy, degrees=pins):
        return None
    if not budget.shrinks_with_chunks:
        most = budget.max_pipelined_tokens
        chooser = DegreeChooser(costs=costs, bounds=bounds, max_pipelined_tokens=most)
    if strategy != "none":  # pinned, with one chunk each way
        chooser = replace(chooser, bounds=replace(bounds, max_degree=1))
    return Ranking(
        tokens=tokens,
        strategy=strategy,
        costs=costs,
        bounds=bounds,
        budget=budget,
        chooser=chooser,
        free=DegreeChooser(costs=costs, bounds=_without_pins(bounds)),
        forward=chooser.rank("forward", tokens),
        backward=chooser.rank("backward", tokens),
        sequential=_sequential(costs, bounds, tokens),
    )


def _rank_reused(chooser: DegreeChooser, budget: MemoryBudget, *, is_rival: bool) -> Ranking | None:
    tokens, strategy = budget.workload.tokens_per_rank, chooser.strategy

    def fits(degrees: tuple[int, int]) -> bool:
        return max(degrees) > 1 and budget.fits(strategy=strategy, degrees=degrees)

    few = fewest_near_best(chooser, tokens, fits)
    if few is None:
        return None

    def pair(phase: Phase, degree: int) -> tuple[int, int]:
        if chooser.is_paired:
            return degree, degree
        return (degree, few[1].degree) if phase == "forward" else (few[0].degree, degree)

    def ranked(phase: Phase, chosen: PhaseTime) -> _Times:
        """Return the degrees that fit beside the other phase's choice, the chosen one first."""
        allowed = () if is_rival else chooser.allowed(phase, tokens)
        others = [one for one in allowed if one != chosen.degree and fits(pair(phase, one))]
        times = [chooser.time(phase, tokens, one) for one in others]
        return chosen, *sorted(times, key=lambda time: (time.seconds, time.degree))

    forward, backward = few
    return Ranking(
        tokens=tokens,
        strategy=strategy,
        costs=chooser.costs,
        bounds=chooser.bounds,
        budget=budget,
        chooser=replace(chooser, budget=budget),
        free=replace(chooser, bounds=_without_pins(chooser.bounds)),
        forward=ranked("forward", forward),
        backward=ranked("backward", backward),
        sequential=_sequential(chooser.costs, chooser.bounds, tokens),
    )


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
    return step.seconds, *step.degrees
