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
    degree = operation.degree
    rows = costs.rows(workload.tokens_per_rank, degree=degree)
    transfer, compute = (
        costs.in_step(one, rows=rows, degree=degree).seconds
        for one in (
            costs.transfer(rows=rows, degree=degree),
            costs.compute(phase=operation.phase, rows=rows),
        )
    )
    tasks = costs.tasks(
        transfer_seconds=[transfer] * degree, compute_seconds=[compute] * degree,
        gather_seconds=0.0, order=order,
    )  # fmt: skip
    found = simulate(tasks, interference=costs.interference(rows=rows, degree=degree))
    compute_seconds = fmean(
        span.end_seconds - span.start_seconds for span in found.spans if span.stream == COMPUTE
    )
    if operation.name == "experts":
        return compute_seconds
    return transfer_seconds(
        workload, degree=degree, phase_seconds=found.makespan_seconds,
        compute_seconds=compute_seconds,
    )  # fmt: skip
