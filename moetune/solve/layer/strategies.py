"""Every choice that one strategy and the memory allow for one size, in the order of its time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from moetune.domain.constraints import STRATEGIES, Bounds, Order, Strategy
from moetune.domain.errors import InfeasiblePlanError, ProfileError
from moetune.domain.layer import PHASES, Phase, Workload
from moetune.domain.plan import Memory
from moetune.domain.request import OFFLOADS_INPUT, OFFLOADS_MIDDLE
from moetune.domain.units import format_bytes
from moetune.solve.layer.choose import NOISE, WORTH, DegreeChooser
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.memory import Room, total_bytes
from moetune.solve.layer.predict import PhaseTime, StepTime
from moetune.solve.layer.reuse import step_time
from moetune.solve.layer.words import explain_pin

NUM_ALTERNATIVES = 5
WORTH_A_WARNING = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All degrees that are allowed with one strategy, best first.

    Args:
        strategy: the plan's. In one chunk each way there is nothing to use again; the chooser
            is then that of "none", whatever the strategy.
        room: the memory that the choice has to fit into.
        free: chooser without pins and without a memory limit.
        sequential: one chunk each way, allowed or not.
    """

    tokens: int
    strategy: Strategy
    costs: LayerCosts
    bounds: Bounds
    room: Room
    chooser: DegreeChooser
    free: DegreeChooser
    forward: tuple[PhaseTime, ...]
    backward: tuple[PhaseTime, ...]
    sequential: StepTime

    @property
    def best(self) -> StepTime:
        """The chosen step."""
        return self.step(self.forward[0], self.backward[0])

    @property
    def order(self) -> Order:
        """In which the link serves the chunks: reused memory has buffers for one order only."""
        return self.bounds.chosen_order if self.strategy == "none" else "interleaved"

    @property
    def memory_forced(self) -> bool:
        """Whether the buffers of more than one chunk, or of fewer, would be taken if they fitted.

        In a tensor-parallel group more chunks take less memory, in others without reuse more.
        """
        if self.strategy != "none":
            return False
        if self.chooser.room is not None:
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
        """Return the fewest chunks that fit, where more of them take less memory."""
        largest = self.bounds.largest(self.tokens)
        return self.room.fewest_chunks(strategy=self.strategy, tokens=self.tokens, largest=largest)

    def step(self, forward: PhaseTime, backward: PhaseTime) -> StepTime:
        """Return the step of these phases."""
        return StepTime(
            forward=forward,
            backward=backward,
            overhead=self.sequential.overhead,
            strategy=self.strategy,
        )

    def others(self) -> list[StepTime]:
        """Return the choices next in time, and one chunk each way wherever that is allowed."""
        near = (phase[:NUM_ALTERNATIVES] for phase in (self.forward, self.backward))
        steps = [self.step(forward, backward) for forward, backward in product(*near)][1:]
        steps = [step for step in steps if self._is_choice(step.degrees)]
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
        """Yield what each pin costs where that is more than a trifle."""
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
        reuses = self.chooser.strategy != "none"
        return not reuses or (
            max(degrees) > 1 and self.room.fits(strategy=self.strategy, degrees=degrees)
        )

    def _free_best(self, phase: Phase) -> PhaseTime:
        if self.chooser.strategy == "none":
            return self.free.rank(phase, self.tokens)[0]
        near = self.free.near_best(phase, self.tokens)
        return self.free.time(phase, self.tokens, min(near, key=lambda degree: near[degree]))


def rank_degrees(
    *, costs: LayerCosts, bounds: Bounds, room: Room, strategy: Strategy
) -> Ranking | None:
    """Return the degrees that the bounds and the memory leave with that strategy.

    None where it does not fit, or where reuse is left with one chunk each way, in which there
    is nothing to use again, unless the caller pinned it.
    """
    tokens = room.workload.tokens_per_rank
    if strategy != "none":
        reused = _rank_reused(costs=costs, bounds=bounds, room=room, strategy=strategy)
        if reused is not None or bounds.strategy != strategy:
            return reused
    least = room.least_degree(bounds.largest(tokens))
    pins = bounds.forward_degree or least, bounds.backward_degree or least
    if not room.fits(strategy=strategy, degrees=pins):
        return None
    chooser = DegreeChooser(costs=costs, bounds=bounds, room=room)
    if not room.shrinks_with_chunks:
        most = room.max_pipelined_tokens
        chooser = DegreeChooser(costs=costs, bounds=bounds, max_pipelined_tokens=most)
    if strategy != "none":  # pinned, with one chunk each way
        chooser = replace(chooser, bounds=replace(bounds, max_degree=1))
    return Ranking(
        tokens=tokens,
        strategy=strategy,
        costs=costs,
        bounds=bounds,
        room=room,
        chooser=chooser,
        free=DegreeChooser(costs=costs, bounds=_without_pins(bounds)),
        forward=chooser.rank("forward", tokens),
        backward=chooser.rank("backward", tokens),
        sequential=_sequential(costs, bounds, tokens),
    )


def _rank_reused(
    *, costs: LayerCosts, bounds: Bounds, room: Room, strategy: Strategy
) -> Ranking | None:
    tokens = room.workload.tokens_per_rank
    chooser = DegreeChooser(costs=costs, bounds=bounds, strategy=strategy)
    forward, backward = (
        {degree: chooser.time(phase, tokens, degree) for degree in chooser.allowed(phase, tokens)}
        for phase in PHASES
    )

    def fits(degrees: tuple[int, int]) -> bool:
        return max(degrees) > 1 and room.fits(strategy=strategy, degrees=degrees)

    pairs = sorted(
        (first.seconds + second.seconds, (first.degree, second.degree))
        for first in forward.values()
        for second in backward.values()
    )
    best = next(((seconds, degrees) for seconds, degrees in pairs if fits(degrees)), None)
    if best is None:
        return None
    limit = best[0] * (1 + (NOISE if chooser.is_measured else TIE))
    near = (degrees for seconds, degrees in pairs if seconds <= limit and fits(degrees))
    few = min(near, key=lambda degrees: (sum(degrees), degrees))
    return Ranking(
        tokens=tokens,
        strategy=strategy,
        costs=costs,
        bounds=bounds,
        room=room,
        chooser=replace(chooser, room=room),
        free=replace(chooser, bounds=_without_pins(bounds)),
        forward=_ranked(forward, few[0], [one for one in forward if fits((one, few[1]))]),
        backward=_ranked(backward, few[1], [one for one in backward if fits((few[0], one))]),
        sequential=_sequential(costs, bounds, tokens),
    )


def _ranked(times: dict[int, PhaseTime], chosen: int, fitting: list[int]) -> tuple[PhaseTime, ...]:
    """Return the degrees that fit beside the other phase's choice, the chosen one first."""
    order = sorted(fitting, key=lambda degree: (degree != chosen, times[degree].seconds, degree))
    return tuple(times[degree] for degree in order)


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
    """Return what steps are sorted by: time, then chunks."""
    return step.seconds, *step.degrees


UNLIMITED = 2**62
KEPT_ONLY: tuple[Strategy, ...] = ("none",)
"""Of a tensor-parallel group, which dispatches nothing that could be sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One strategy at its best.

    Args:
        step: the fastest one that fits; where none does, the fastest one.
        memory: of that step.
        fits: whether it does.
    """

    strategy: Strategy
    step: StepTime
    memory: Memory
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayer:
    """The chosen strategy with its ranked degrees, and the strategies it was chosen from.

    Args:
        contenders: every strategy whose operations were measured, the chosen one too, in the
            order of their names; empty where the caller pinned the strategy.
    """

    best: Ranking
    contenders: tuple[Contender, ...]

    @property
    def step(self) -> StepTime:
        """The chosen step."""
        return self.best.best

    @property
    def is_forced(self) -> bool:
        """Whether another choice would be made if there were more memory."""
        if self.best.memory_forced:
            return True
        limit = self.best.best.seconds * (1 - TIE)
        return any(not one.fits and one.step.seconds < limit for one in self.contenders)

    @property
    def rivals(self) -> tuple[StepTime, ...]:
        """The best steps of the other strategies that fit."""
        return tuple(one.step for one in self.losers if one.fits)

    @property
    def losers(self) -> tuple[Contender, ...]:
        """All but the chosen one."""
        return tuple(one for one in self.contenders if one.strategy != self.best.strategy)


def choose_strategy(
    *, workload: Workload, costs: LayerCosts, bounds: Bounds, limit_bytes: int
) -> RankedLayer:
    """Return the fastest strategy within the bounds and the memory.

    Where costs are measured, keeping everything gives way only to a gain of `choice.WORTH`, and
    strategies within `choice.NOISE` of each other are one: the first of them is taken.

    Raises:
        InfeasiblePlanError: nothing fits; the text names the smallest plan, and the hint what
            would make it fit.
        ProfileError: the pinned strategy copies, and no copies were measured.
    """
    room = Room(workload=workload, limit_bytes=limit_bytes)
    allowed = KEPT_ONLY if room.shrinks_with_chunks else _allowed(costs, bounds)
    rankings = [
        ranking
        for strategy in allowed
        if (ranking := rank_degrees(costs=costs, bounds=bounds, room=room, strategy=strategy))
    ]
    if not rankings:
        raise _too_large(room, allowed, bounds)
    best = _fastest(rankings)
    return RankedLayer(
        best=best,
        contenders=tuple(_contender(one, best, rankings) for one in allowed)
        if bounds.strategy is None
        else (),
    )


def _allowed(costs: LayerCosts, bounds: Bounds) -> Sequence[Strategy]:
    """Return the strategies that are not excluded by a pin, or because they have no price."""
    copies = OFFLOADS_INPUT | OFFLOADS_MIDDLE
    if bounds.order == "dispatch_first" and bounds.strategy not in {None, "none"}:
        raise InfeasiblePlanError(
            f"strategy {bounds.strategy} with the order dispatch_first is infeasible: two buffers "
            "of received rows let two dispatches run ahead, no more",
            "leave --order away, or take --order interleaved",
        )
    if bounds.strategy is None and bounds.order == "dispatch_first":
        return ["none"]
    if bounds.strategy is None:
        has_copies = costs.costs.copy_mode is not None
        return [one for one in STRATEGIES if has_copies or one not in copies]
    if bounds.strategy in copies and costs.costs.copy_mode is None:
        raise ProfileError(
            f"strategy {bounds.strategy} copies to the host, and the profile has no copies "
            "in both directions",
            "measure them with `moetune profile`, or take --strategy S4",
        )
    return [bounds.strategy]


def _fastest(rankings: Sequence[Ranking]) -> Ranking:
    least = min(ranking.best.seconds for ranking in rankings)
    is_measured = rankings[0].chooser.is_measured
    kept = rankings[0]
    if kept.strategy == "none" and least >= kept.best.seconds * (1 - WORTH * is_measured):
        return kept
    limit = least * (1 + (NOISE if is_measured else TIE))
    return next(ranking for ranking in rankings if ranking.best.seconds <= limit)


def all_contenders(ranked: RankedLayer) -> tuple[Contender, ...]:
    """Return the candidates that were ranked; where the strategy was pinned, the others besides.

    The chosen strategy's is the chosen step itself. The others are ranked with the caller's
    other pins.
    """
    best = ranked.best
    if best.bounds.strategy is None:
        return ranked.contenders
    free = replace(best.bounds, strategy=None)
    strategies = KEPT_ONLY if best.room.shrinks_with_chunks else _allowed(best.costs, free)
    others = [
        ranking
        for one in strategies
        if one != best.strategy
        and (ranking := rank_degrees(costs=best.costs, bounds=free, room=best.room, strategy=one))
    ]
    return tuple(_contender(one, best, [best, *others]) for one in strategies)


def _contender(strategy: Strategy, best: Ranking, rankings: Sequence[Ranking]) -> Contender:
    """Return the strategy's best step that fits; where none does, its fastest one.

    Args:
        best: the chosen ranking, for what every strategy is ranked with.
        rankings: of all strategies that fit.
    """
    ranking = next((one for one in rankings if one.strategy == strategy), None)
    fits = ranking is not None
    if ranking is None:
        ranking = rank_degrees(
            costs=best.costs,
            bounds=replace(best.bounds, strategy=strategy),
            room=replace(best.room, limit_bytes=UNLIMITED),
            strategy=strategy,
        )
    assert ranking is not None  # noqa: S101 - everything fits without a limit
    step = ranking.best
    return Contender(
        strategy=strategy,
        step=step,
        memory=best.room.memory(strategy=strategy, degrees=step.degrees),
        fits=fits,
    )


def _too_large(room: Room, allowed: Sequence[Strategy], bounds: Bounds) -> InfeasiblePlanError:
    strategy, degrees, memory = _smallest(room, allowed, bounds)
    needed = total_bytes(memory)
    chunks = f"{degrees[0]} and {degrees[1]} chunks, strategy {strategy}"
    return InfeasiblePlanError(
        f"memory binds: the smallest plan ({chunks}) needs {format_bytes(needed)} per device "
        f"(states {format_bytes(memory.state_bytes)}, activations "
        f"{format_bytes(memory.activation_bytes)}, buffers {format_bytes(memory.buffer_bytes)}), "
        f"{format_bytes(needed - room.limit_bytes)} more than the limit of "
        f"{format_bytes(room.limit_bytes)}",
        _what_would_fit(room, strategy, degrees, bounds),
    )


def _smallest(
    room: Room, allowed: Sequence[Strategy], bounds: Bounds
) -> tuple[Strategy, tuple[int, int], Memory]:
    """Return the plan with the least memory: one chunk, or as many as may be with reuse."""
    most = bounds.largest(room.workload.tokens_per_rank)
    choices = []
    for strategy in reversed(allowed):  # all that reuse take the same, S4 needs no host memory
        for degree in (1, most):
            degrees = bounds.forward_degree or degree, bounds.backward_degree or degree
            choices.append((strategy, degrees, room.memory(strategy=strategy, degrees=degrees)))
    return min(choices, key=lambda choice: total_bytes(choice[2]))


def _what_would_fit(
    room: Room, strategy: Strategy, degrees: tuple[int, int], bounds: Bounds
) -> str:
    tokens = room.workload.tokens_per_rank
    free = replace(bounds, forward_degree=None, backward_degree=None, strategy=None)
    if free != bounds:
        nearest: tuple[Strategy, ...] = ("none", "S4")  # the one of least change, then least need
        for one in nearest[:1] if room.shrinks_with_chunks else nearest:
            name, chunks, memory = _smallest(room, [one], free)
            if total_bytes(memory) <= room.limit_bytes:
                return f"nearest: {chunks[0]} and {chunks[1]} chunks with strategy {name}"
    most = room.most_tokens(strategy=strategy, degrees=degrees)
    if most >= 1:
        return f"nearest: {most} tokens per rank instead of {tokens}"
    return "no number of tokens fits: spread the experts over more ranks, or allow more memory"
