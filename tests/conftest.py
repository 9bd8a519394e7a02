"""What holds for every test: a busy machine changes no result.

One thread a process, because tests share the cores with each other, and products as small as
theirs wait for a second thread longer than they take. No deadlines for drawn examples.
"""

import os
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")


GOLDEN = Path(__file__).parent / "golden"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Measure no coverage of drawn examples, nor of golden answers and long tests.

    Which lines drawn examples run is luck: a line that they alone run would be covered today and
    not tomorrow. Golden answers are whole plans, whose parts other tests run one by one, and so are
    the tests that are marked "covered": measured, a solver takes three times as long. Where the
    lines of every single test are asked for (`--cov-context`), these are measured like the others.
    """
    if config.getoption("cov_context", default=None) is not None:
        return
    for item in items:
        is_drawn = isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)
        if is_drawn or GOLDEN in item.path.parents or item.get_closest_marker("covered"):
            item.add_marker(pytest.mark.no_cover)
