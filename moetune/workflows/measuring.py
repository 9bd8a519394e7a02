"""Measuring sessions on ranks, and the steps of layers whose times they take.

`workflows.launch` starts the ranks; this module, which loads torch, is imported only there.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from moetune.comm.group import Communicator
from moetune.config import Launch
from moetune.domain.errors import CollectiveError
from moetune.domain.plan import SAFE_DECISION
from moetune.domain.samples import StepPoint
from moetune.measure.device import Device, open_device
from moetune.measure.ranks import MeasuringRanks
from moetune.measure.session import Assignment, News, run_session
from moetune.workflows.launch import rank_device, run_on_ranks
from moetune.workflows.steps import random_steps


def measure_on_ranks(
    assignment: Assignment,
    *,
    num_ranks: int,
    launch: Launch | None,
    environ: Mapping[str, str],
    on_news: Callable[[News], object],
    oversubscribe: bool = False,
) -> None:
    """Run the session on `num_ranks` ranks of this machine, or as one rank of a launch.

    Raises:
        InputError: fewer CUDA devices or cores than ranks, or an assignment that the session
            refuses.
        CollectiveError: a rank died, or the ranks of the launch cannot reach each other.
    """
    try:
        run_on_ranks(
            _measure,
            assignment,
            num_ranks=num_ranks,
            launch=launch,
            environ=environ,
            on_message=on_news,
            oversubscribe=oversubscribe,
        )
    except CollectiveError as error:
        raise CollectiveError(
            str(error),
            "run again with --resume: it omits the points that are already in the database",
        ) from error


def _measure(assignment: Assignment, tell: Callable[[News], object]) -> None:
    device = open_device(rank_device().index or 0)
    run_session(
        assignment, device=device, ranks=MeasuringRanks(), on_news=tell, layer_step=layer_step
    )


def layer_step(point: StepPoint, device: Device, communicator: Communicator) -> Callable[[], None]:
    """Return a function that runs a layer's step in the point's number of chunks."""
    steps = random_steps(point.workload, device=device.torch_device, communicator=communicator)
    steps.layer.pin(
        replace(SAFE_DECISION, forward_degree=point.degree, backward_degree=point.degree)
    )
    return steps.once
