"""Jobs that watch themselves, on real ranks: what changes on the way is named."""

import pytest

from tests.ranks import run_ranks
from tests.runtime import drift_workers


@pytest.mark.dist
def test_a_wire_that_gets_slower_in_mid_run_is_named_within_fifty_steps() -> None:
    assert run_ranks(drift_workers.wire_gets_slower, 2) == ["", ""]
