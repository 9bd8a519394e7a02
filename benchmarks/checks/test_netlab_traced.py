"""The parts of a recorded step, of spans whose times are known."""

import pytest

from benchmarks.netlab.traced import Parts
from moetune.domain.layer import Phase


def test_parts_are_covered_time_and_what_nothing_covers() -> None:
    spans: tuple[tuple[Phase, str, float, float], ...] = (
        ("forward", "comm", 1.0, 3.0), ("forward", "comp", 2.0, 4.0), ("forward", "comm", 2.5, 3.5),
        ("forward", "comp", 6.0, 7.0), ("backward", "comp", 9.0, 10.0),
    )  # fmt: skip
    found = Parts.of(spans, "forward")
    assert (found.experts, found.link) == pytest.approx((3.0, 2.5))
    assert (found.neither, found.total) == pytest.approx((2.0, 6.0))
    assert Parts.of(spans, "backward") == Parts(experts=1.0, link=0.0, neither=0.0, total=1.0)
