"""The queue of a step: what real ranks issue to the link is what the timeline has on it."""

from tests.ranks import run_ranks
from tests.runtime import queue_workers


def test_ranks_issue_exchanges_and_pieces_in_the_predicted_order() -> None:
    found = run_ranks(queue_workers.what_is_issued_is_what_is_predicted, 2)
    assert found == ["", ""]
