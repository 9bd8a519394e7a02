"""A measuring session on ranks that are started for it, or on those of a launch."""

from collections.abc import Callable, Mapping

from moetune.config import Launch
from moetune.domain.errors import CollectiveError
from moetune.measure.device import open_device
from moetune.measure.ranks import Ranks
from moetune.measure.session import Assignment, News, run_session
from moetune.workflows.launch import rank_device, run_on_ranks
from moetune.workflows.steps import block_makers


def measure_on_ranks(
    assignment: Assignment,
    *,
    num_ranks: int,
    launch: Launch | None,
    environ: Mapping[str, str],
    hear: Callable[[News], object],
) -> None:
    """Run the session on `num_ranks` ranks of this machine, or as one rank of a launch.

    Raises:
        InputError: fewer CUDA devices than ranks; or what the session finds wrong.
        CollectiveError: a rank died, or the ranks of the launch do not find each other.
    """
    try:
        run_on_ranks(
            _measure,
            assignment,
            num_ranks=num_ranks,
            launch=launch,
            environ=environ,
            hear=hear,
        )
    except CollectiveError as error:
        raise CollectiveError(
            str(error),
            "run again: with --resume, finished points that are in the database are not repeated",
        ) from error


def _measure(assignment: Assignment, tell: Callable[[News], object]) -> None:
    device = open_device(rank_device().index or 0)
    run_session(assignment, device=device, ranks=Ranks(), tell=tell, makers=block_makers())
