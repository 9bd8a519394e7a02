"""The best step of one layer in a tensor-parallel group: what the search for layouts asks."""

from dataclasses import replace

from moetune.domain.costs import Costs
from moetune.domain.layer import Workload
from moetune.solve.choice import Bounds, DegreeChooser
from moetune.solve.layer_costs import layer_costs
from moetune.solve.phases import PHASES
from moetune.solve.predict import StepTime


def best_summed_step(*, workload: Workload, costs: Costs, bounds: Bounds) -> StepTime:
    """Return the step with the best degrees of both phases, whatever memory it takes.

    Args:
        workload: its ranks are the tensor-parallel group, its tokens those that all of them see.

    Raises:
        ProfileError: the profile lacks an operation, such as an all-reduce of so many ranks.
    """
    tokens = workload.tokens_per_rank
    summed = layer_costs(workload=replace(workload, expert_parallel="tensor"), costs=costs)
    chooser = DegreeChooser(costs=summed, bounds=bounds)
    forward, backward = (
        chooser.time(phase, tokens, chooser.degree(phase, tokens)) for phase in PHASES
    )
    return StepTime(forward=forward, backward=backward, overhead=summed.overhead(tokens=tokens))
