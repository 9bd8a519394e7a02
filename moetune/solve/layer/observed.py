"""Times that a watched call of a layer would show: the prediction that observations compare with.

A watched call times its experts while transfers run beside them, and solves its phase's makespan
for the transfer (`domain.operations.transfer_seconds`). The same is done to a simulated phase here,
so that a difference is one of the costs, not of the method.
"""

from statistics import fmean

from moetune.domain.constraints import Order
from moetune.domain.layer import Workload
from moetune.domain.operations import Operation, transfer_seconds
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.timeline import COMPUTE, simulate
from moetune.solve.layer.times import phase_time


def watched_seconds(
    operation: Operation,
    *,
    workload: Workload,
    costs: LayerCosts,
    order: Order,
) -> float:
    """Return the time that a watched call shows of one of its operations; none is reused memory.

    Raises:
        ProfileError: an operation was not measured.
    """
    degree, tokens = operation.degree, workload.tokens_per_rank
    time = phase_time(costs=costs, phase=operation.phase, tokens=tokens, degree=degree, order=order)
    tasks = costs.tasks(
        transfer_seconds=[time.transfer.seconds] * degree,
        compute_seconds=[time.compute.seconds] * degree, gather_seconds=0.0, order=order,
    )  # fmt: skip
    table = costs.interference(rows=costs.rows(tokens, degree=degree), degree=degree)
    found = simulate(tasks, interference=table)
    compute_seconds = fmean(
        span.end_seconds - span.start_seconds for span in found.spans if span.stream == COMPUTE
    )
    if operation.name == "experts":
        return compute_seconds
    return transfer_seconds(
        workload, degree=degree, phase_seconds=found.makespan_seconds,
        compute_seconds=compute_seconds,
    )  # fmt: skip
