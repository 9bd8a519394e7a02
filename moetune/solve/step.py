"""The time of a phase and of a step with any strategy: one door to both predictors."""

from moetune.domain.plan_inputs import Order, Strategy
from moetune.solve.phases import PHASES, LayerCosts, Phase
from moetune.solve.predict import PhaseTime, StepTime, phase_time
from moetune.solve.reuse import reuse_time


def strategy_time(
    *,
    costs: LayerCosts,
    phase: Phase,
    tokens: int,
    degree: int,
    order: Order,
    strategy: Strategy,
) -> PhaseTime:
    """Return the time of one phase. Reused memory is always interleaved, whatever `order` is."""
    if strategy == "none":
        return phase_time(costs=costs, phase=phase, tokens=tokens, degree=degree, order=order)
    return reuse_time(costs=costs, phase=phase, strategy=strategy, tokens=tokens, degree=degree)


def step_time(
    *,
    costs: LayerCosts,
    tokens: int,
    forward_degree: int,
    backward_degree: int,
    order: Order = "dispatch_first",
    strategy: Strategy = "none",
) -> StepTime:
    """Return the predicted time of one step: what `verify` compares with the measured one.

    In one chunk each way there is nothing to use again, and every strategy is alike.
    """
    degrees = {"forward": forward_degree, "backward": backward_degree}
    how = "none" if max(degrees.values()) == 1 else strategy
    forward, backward = (
        strategy_time(
            costs=costs, phase=phase, tokens=tokens, degree=degrees[phase], order=order,
            strategy=how,
        )
        for phase in PHASES
    )  # fmt: skip
    return StepTime(
        forward=forward,
        backward=backward,
        overhead=costs.overhead(tokens=tokens),
        strategy=strategy,
    )
