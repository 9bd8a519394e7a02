"""Measuring sessions on ranks.

`workflows.launch` starts the ranks; this module, which loads torch, is imported only there.
"""

from collections.abc import Callable

from moetune.domain.errors import CollectiveError
from moetune.measure.device import open_device
from moetune.measure.ranks import MeasuringRanks
from moetune.measure.session import Assignment, News, run_session
from moetune.workflows.launch import rank_device, run_on_ranks
from moetune.workflows.profile_request import MeasurementSetting


def measure_on_ranks(
    assignment: Assignment,
    setting: MeasurementSetting,
    *,
    num_ranks: int,
    on_news: Callable[[News], object] = lambda _: None,
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
            launch=setting.launch,
            environ=setting.environment,
            on_message=on_news,
            oversubscribe=setting.oversubscribe,
        )
    except CollectiveError as error:
        raise CollectiveError(
            str(error),
            "run again with --resume: it omits the points that are already in the database",
        ) from error


def _measure(assignment: Assignment, tell: Callable[[News], object]) -> None:
    device = open_device(rank_device().index or 0)
    run_session(assignment, device=device, ranks=MeasuringRanks(), on_news=tell)
