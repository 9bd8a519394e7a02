"""What holds for every test: a busy machine changes no result.

One thread a process, because tests share the cores with each other, and products as small as
theirs wait for a second thread longer than they take. No deadlines for drawn examples.
"""

import os

import pytest
from hypothesis import is_hypothesis_test, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Measure no coverage of drawn examples.

    What they run is luck, so that a line they alone run would be covered in one run and not in
    the next, and traced they take twice as long. Where the lines of every single test are asked
    for (`--cov-context`), they are measured like the others.
    """
    if config.getoption("cov_context", default=None) is not None:
        return
    for item in items:
        if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            item.add_marker(pytest.mark.no_cover)
