"""Experts whose widths are cut over ranks: a shard of an expert is an expert of its own."""

import pytest

from tests.ranks import run_ranks
from tests.runtime import width_workers

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("ep", "etp"), [(1, 2), (2, 2), (1, 4), (2, 1)])
def test_layers_whose_ranks_share_widths_equal_dense(ep: int, etp: int) -> None:
    worker, ranks = width_workers.layers_equal_dense, ep * etp
    assert run_ranks(worker, ranks, etp, ("gelu", "swiglu"), (1, 3)) == [""] * ranks
